"""Leave-one-out densities and joint draws on several processes: posterior draws, moments, wrong calls."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_nngp.distributed import ShardedData
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.models import NPVI, VNNGP, Vecchia
from pyro_nngp.variational import observed as sites
from tests.builders import surface
from tests.oracles.processes import check_same, on_processes

N = 200


def build(method, likelihood, sharded, **options):
    """A method on the rows of this process, or on all."""
    x, y, _ = surface(type(likelihood))
    options = {"kernel": Matern52(2, 1.0, 0.3), "likelihood": likelihood, "num_neighbors": 8} | options
    return method(ShardedData(x, y), **options) if sharded else method(x, y, **options)


def drawn(sharded):
    """Mean and covariance of many draws of f from a factor at the data."""
    gp = build(NPVI, Poisson(), sharded)
    gp.solve()
    draws = gp.sample(surface(Poisson)[2], 4000, seed=0)
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
    new = surface(Gaussian)[2]
    gp = build(Vecchia, Gaussian(0.1), sharded, kernel=kernel)
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
    gp = build(Vecchia, Gaussian(0.1), True)
    with pytest.raises(ValueError, match=r"Vecchia.loo: expected idx"):
        gp.loo(torch.tensor([N]))
    with pytest.raises(ValueError, match="expected num_neighbors"):
        gp.loo(num_neighbors=N)
    assert gp.loo(torch.arange(2), num_neighbors=N - 1).isfinite().all()
    with pytest.raises(ValueError, match="expected num_neighbors"):
        gp.sample(surface(Gaussian)[2], 2, num_neighbors=N + 9)
    assert gp.sample(surface(Gaussian)[2], 2, num_neighbors=N + 3).shape == (2, 9)  # the data and earlier new places
