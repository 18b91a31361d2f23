"""Leave-one-out densities and joint draws on several processes equal those of one."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_nngp.distributed import ShardedData
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson, StudentT
from pyro_nngp.models import LOO, NPVI, SVGP, SWSGP, VNNGP, Vecchia
from pyro_nngp.variational import factored_posterior
from pyro_nngp.variational import observed as sites
from tests.builders import surface
from tests.oracles.processes import check_same, on_processes

pytestmark = pytest.mark.filterwarnings("ignore:SWSGP. intervals of f from Poisson data")

N = 200
CASES = {
    "vecchia": (Vecchia, Gaussian(0.1), {"num_neighbors": 8}),
    "loo": (LOO, StudentT(0.1, 4.0), {"num_neighbors": 8}),
    "sites of counts": (VNNGP, Poisson(), {"num_neighbors": 8}),
    "two outputs": (VNNGP, Poisson(), {"num_neighbors": 8}),
    "weights and offset": (VNNGP, Gaussian(0.1), {"num_neighbors": 8}),
    "factor": (NPVI, Poisson(), {"num_neighbors": 8}),
    "svgp": (SVGP, Poisson(), {"inducing": 12}),
    "svgp, normal": (SVGP, Gaussian(0.1), {"inducing": 12, "objective": "fitc"}),
    "swsgp": (SWSGP, Poisson(), {"inducing": 12, "num_neighbors": 8}),
    "inducing points": (VNNGP, Poisson(), {"inducing": 20, "num_neighbors": 8}),
}
CONDITIONED = "vecchia", "sites of counts", "weights and offset"  # on observations: draws have the same bits
BY_DEFAULT = "sites of counts"


def build(case, sharded):
    method, likelihood, options = CASES[case]
    x, y, _ = surface(type(likelihood))
    if case == "two outputs":
        y = torch.stack([y, y.flip(0)], -1)
    by_row = {"offset": x[:, 0], "weights": 1 + (x[:, 1] > 0.5).double()} if case == "weights and offset" else {}
    options = options | {"kernel": Matern52(2, 1.0, 0.3), "likelihood": likelihood}
    gp = method(ShardedData(x, y, **by_row), **options) if sharded else method(x, y, **options, **by_row)
    if getattr(gp, "can_solve", False):
        gp.solve()
    return gp


def found_at(case, sharded):
    """Densities of all rows and of two by their places in the data, joint posteriors, and draws from one seed."""
    gp, new = build(case, sharded), surface(Gaussian)[2]
    densities = gp.loo()
    every = gp.shard.in_order(densities) if sharded else densities
    rows = gp.shard.rows if sharded else torch.arange(N)
    some = (rows < 2).nonzero()[:, 0] if sharded and gp.shard.world.size == 1 else torch.arange(2)
    torch.testing.assert_close(gp.loo(some), densities[..., some], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gp.loo_by_draw(some, from_guide=True)({}), densities[..., some], rtol=1e-5, atol=1e-5)
    found = {"loo": every}
    if case in CONDITIONED:
        found["joint mean"], found["joint covariance"] = (part.detach() for part in gp.joint(new.view(3, 3, 2)))
        one = gp.sample(new[:1], 2, num_neighbors=1, seed=0)
        found["one neighbor"] = torch.cat([one.flatten(), gp(new[:1], num_neighbors=1)[0].detach()])
    if case in CONDITIONED or "inducing" in CASES[case][2]:
        found["draws"] = gp.sample(new, 3, seed=1)
    if isinstance(gp, Vecchia):
        torch.manual_seed(0)
        found["predictions"] = gp.predictions_by_draw(new, seed=1)({})[1]
    return found


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c == BY_DEFAULT else pytest.mark.slow) for c in CASES])
def test_two_processes_are_one(case, tmp_path, monkeypatch):
    monkeypatch.setattr(factored_posterior, "MOST_OPERATIONS", 0.0)  # of several processes there is no sparse factor
    expected = found_at(case, False)
    for found in on_processes(2, tmp_path, found_at, case, True):
        check_same(found, expected, 1e-6)


def drawn(sharded):
    """Mean and covariance of many draws of f from a factor at the data."""
    draws = build("factor", sharded).sample(surface(Poisson)[2], 4000, seed=0)
    return {"mean": draws.mean(0), "covariance": draws.T.cov()}


@pytest.mark.slow
def test_draws_from_a_factor_have_its_moments(tmp_path):
    expected = drawn(False)
    for found in on_processes(2, tmp_path, drawn, True):
        check_same(found, expected, 0.03)


def at_samples(sharded):
    """Densities and joint draws at posterior draws of the lengthscale."""
    kernel = Matern52(2, 1.0, 0.3)
    kernel.lengthscale = PyroSample(dist.LogNormal(torch.full((2,), -1.0), 0.5).to_event(1))
    x, y, new = surface(Gaussian)
    options = {"kernel": kernel, "likelihood": Gaussian(0.1), "num_neighbors": 8}
    gp = Vecchia(ShardedData(x, y), **options) if sharded else Vecchia(x, y, **options)
    samples = {"kernel.lengthscale": torch.tensor([[0.2, 0.3], [0.4, 0.3], [0.3, 0.2]], dtype=torch.float64)}
    densities = gp.loo(samples=samples)
    found = {"loo": gp.shard.in_order(densities) if sharded else densities}
    return found | {"draws": gp.sample(new, 3, samples=samples, seed=0), "mean": gp(new, samples=samples)[0]}


@pytest.mark.slow
def test_posterior_draws_of_hyperparameters(tmp_path):
    expected = at_samples(False)
    assert expected["loo"].shape == (3, N)
    for found in on_processes(2, tmp_path, at_samples, True):
        check_same(found, expected, 1e-8)


def test_neighbors_of_predictions_are_chosen_at_medians(monkeypatch):
    values, choose = [], sites.enough_for_predictions
    monkeypatch.setattr(sites, "enough_for_predictions", lambda *args: values.append(args[2](x, x)) or choose(*args))
    x, y, _ = surface(Gaussian)
    for data in ((x, y), (ShardedData(x, y),)):
        kernel = Matern52(2, 1.0, 0.3)
        kernel.lengthscale = PyroSample(dist.LogNormal(torch.full((2,), -1.0), 0.5).to_event(1))
        gp = VNNGP(*data, kernel=kernel, num_neighbors=8)
        gp.solve()
        gp.prediction_neighbors()
    assert torch.equal(*values)


def test_malformed_rows_and_numbers_of_neighbors():
    gp = build("vecchia", True)
    with pytest.raises(ValueError, match=r"Vecchia.loo: expected idx"):
        gp.loo(torch.tensor([N]))
    with pytest.raises(ValueError, match="expected num_neighbors"):
        gp.loo(num_neighbors=N)
    assert gp.loo(torch.arange(2), num_neighbors=N - 1).isfinite().all()
    with pytest.raises(ValueError, match="expected num_neighbors"):
        gp.sample(surface(Gaussian)[2], 2, num_neighbors=N + 9)
    assert gp.sample(surface(Gaussian)[2], 2, num_neighbors=N + 3).shape == (2, 9)  # the data and earlier new places
