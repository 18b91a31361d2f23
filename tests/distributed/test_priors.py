"""Methods with inducing points on several processes: all of them have the same inducing points and q(u)."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_nngp.distributed import ShardedData
from pyro_nngp.inference import Checkpoint, Schedule, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.models import SVGP, SWSGP, VNNGP
from pyro_nngp.variational import FullRank, SparseCholesky
from tests.builders import surface
from tests.oracles.processes import check_same, on_processes

pytestmark = pytest.mark.filterwarnings("ignore:SWSGP. intervals of f from Poisson data")

N = 200
CASES = {
    "svgp": (SVGP, Gaussian, {"inducing": 20}),
    "svgp of counts": (SVGP, Poisson, {"inducing": 12}),
    "svgp, fitc": (SVGP, Gaussian, {"inducing": 12, "objective": "fitc", "learn_inducing": False}),
    "swsgp": (SWSGP, Gaussian, {"inducing": 40, "num_neighbors": 8}),
    "swsgp of fixed points": (SWSGP, Gaussian, {"inducing": 40, "num_neighbors": 8, "learn_inducing": False}),
    "vnngp": (VNNGP, Poisson, {"inducing": 30, "num_neighbors": 8}),
    "vnngp, factor": (
        VNNGP,
        Gaussian,
        {"inducing": 30, "num_neighbors": 8, "learn_inducing": True, "guide": SparseCholesky(4)},
    ),
    "swsgp, full covariance": (SWSGP, Poisson, {"inducing": 20, "num_neighbors": 8, "guide": FullRank()}),
}


def build(case, sharded):
    method, likelihood, options = CASES[case]
    x, y, _ = surface(likelihood)
    options = options | {"likelihood": likelihood()}
    return method(ShardedData(x, y), **options) if sharded else method(x, y, **options)


def refreshes(gp, every):
    return every if hasattr(gp, "refresh_neighbors") else None


def trained(case, sharded):
    """Losses, hyperparameters and predictions after some steps on all rows, and draws from the same seed."""
    gp, new = build(case, sharded), surface(Gaussian)[2]
    result = fit(gp, 6, batch_size=N, refresh_every=refreshes(gp, 3), progress=False)
    found = {"losses": result.losses, "lengthscale": gp.kernel.lengthscale.detach()}
    mean, variance = gp(new)
    found["inducing"] = gp.graph.x if isinstance(gp, VNNGP) else gp.z.detach()
    found["moments"] = torch.stack([mean, variance, gp.predict(new).variance]).detach()
    found["draws"] = gp.sample(new, 3, seed=0)
    return found


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c == "swsgp" else pytest.mark.slow) for c in CASES])
def test_two_processes_are_one(case, tmp_path):
    expected = trained(case, False)
    for found in on_processes(2, tmp_path, trained, case, True):
        check_same(found, expected, 1e-6)


def still(case, batch_size):
    """Losses of steps too small to move anything."""
    gp = build(case, True)
    options = {"solve_every": 0 if case == "svgp" else None, "progress": False}
    return {"losses": fit(gp, 5, batch_size=batch_size, lr=1e-30, schedule=Schedule(()), **options).losses}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["svgp", "swsgp"])
def test_minibatches_of_an_epoch_average_to_the_bound_of_all_rows(case, tmp_path):
    for name in ("batches", "all"):
        (tmp_path / name).mkdir()
    batches = on_processes(2, tmp_path / "batches", still, case, N // 5)
    whole = on_processes(2, tmp_path / "all", still, case, N)
    assert torch.equal(batches[0]["losses"], batches[1]["losses"])
    assert batches[0]["losses"].std() > 0.001
    torch.testing.assert_close(batches[0]["losses"].mean(), whole[0]["losses"][0], rtol=1e-6, atol=0)


class Stop(Exception):
    """Ends a run in the middle."""


def in_minibatches(case, path=None, end=None):
    def stop(step, loss):
        if step == end:
            raise Stop

    gp = build(case, True)
    checkpoint = None if path is None else Checkpoint(path / "checkpoint", every=5)
    options = {"checkpoint": checkpoint, "callback": stop, "progress": False}
    try:
        result = fit(gp, 12, batch_size=60, refresh_every=refreshes(gp, 5), **options)
    except Stop:
        return {}
    return {"losses": result.losses, "inducing": gp.z.detach(), "moments": torch.stack(gp(gp.z[:5])).detach()}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["svgp", "swsgp", "swsgp of fixed points", "vnngp, factor"])
def test_processes_stay_together_in_minibatches_and_continue_from_a_checkpoint(case, tmp_path):
    for name in ("whole", "begun", "continued"):
        (tmp_path / name).mkdir()
    one, other = on_processes(2, tmp_path / "whole", in_minibatches, case)
    for name, value in one.items():
        assert torch.equal(other[name], value)
    on_processes(2, tmp_path / "begun", in_minibatches, case, tmp_path, 7)
    found = on_processes(2, tmp_path / "continued", in_minibatches, case, tmp_path)
    for name, value in one.items():
        assert torch.equal(found[0][name], value), name


def with_priors(sharded, count):
    """Losses at draws of the lengthscale, whose prior and guide each process counts with its share."""
    x, y, _ = surface(Gaussian)
    kernel = Matern52(2, 1.0)
    kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2).double() - 1, 0.3).to_event(1))
    options = {"kernel": kernel, "likelihood": Gaussian(0.1), "inducing": 10, "learn_inducing": False}
    gp = SVGP(ShardedData(x, y), **options) if sharded else SVGP(x, y, **options)
    steps = {"solve_every": 0, "lr": 1e-30, "schedule": Schedule(()), "progress": False}
    return {"losses": fit(gp, count, batch_size=N, **steps).losses}


@pytest.mark.slow
def test_priors_count_once(tmp_path):
    expected = with_priors(False, 400)["losses"].double()
    found = on_processes(2, tmp_path, with_priors, True, 400)[0]["losses"].double()
    error = (expected.var() / 400 + found.var() / 400).sqrt()
    assert error < 0.1
    assert (found.mean() - expected.mean()).abs() < 4 * error
