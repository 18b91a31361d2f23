"""The search for hyperparameters that best predict points from their neighbors."""

import pytest
import torch
from oracles.problems import draw

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern12, Matern32, Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO, Vecchia

F64 = torch.float64


@pytest.mark.parametrize("method", [LOO, pytest.param(Vecchia, marks=pytest.mark.slow)])
def test_neighbors_in_space_and_time_follow_a_product_kernel(method):
    """Places in km and times in days: distances in raw units say nothing of which points matter."""
    generator = torch.Generator().manual_seed(0)
    x = 1000 * torch.rand(900, 2, generator=generator, dtype=F64)
    x = torch.cat([x, torch.randint(0, 14, (900, 1), generator=generator)], -1)

    def kernel(*values):
        variance, place, time = values or (None, None, None)
        return Matern32(2, variance, place, [0, 1]) * Matern12(1, None if variance is None else 1.0, time, [2])

    true = kernel(1.0, torch.full((2,), 400.0, dtype=F64), 0.5)
    f = draw(true.bind()(x, x))
    y = f + 0.1 * torch.randn(900, generator=generator, dtype=F64)
    gp = method(x[:700], y[:700], kernel(), num_neighbors=8)
    fit(gp, progress=False)
    near = gp.graph.others(8)
    assert (x[near, 2] == x[:700, None, 2]).double().mean() > 0.8
    best = method(x[:700], y[:700], true, Gaussian(0.01), num_neighbors=8, mean=lambda z: torch.zeros_like(z[:, 0]))
    errors = [(one(x[700:])[0].detach() - f[700:]).square().mean().sqrt() for one in (gp, best)]
    assert errors[0] < 1.05 * errors[1]
    assert errors[1] < 0.35


@pytest.mark.parametrize(("count", "years", "months"), [(300, 24, 4), (1500, 50, 12), (3000, 100, 12)])
def test_a_season_that_all_places_share_is_no_noise(count, years, months):
    """One short lengthscale: with common factors all places are strangers, and the season is noise of variance .46."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 3, generator=generator, dtype=F64)
    x[:, 2] = torch.randint(0, years * months, (count,), generator=generator) / (years * months)
    season = torch.sin(2 * torch.pi * years * x[:, 2])
    y = season + 0.3 * torch.sin(20 * x[:, 0] + x[:, 1]) + 0.1 * torch.randn(count, generator=generator, dtype=F64)
    gp = Vecchia(x, y, Matern52(3), num_neighbors=16)
    assert gp.kernel.lengthscale[2] < 1.2 / years
    assert gp.likelihood.variance < 0.1


@pytest.mark.parametrize(("count", "cycles"), [(300, 30), (2000, 100)])
def test_many_cycles_of_a_series_are_no_noise(count, cycles):
    """A daily cycle among days: at lengthscales of a part of the series it is noise of variance .5."""
    x = torch.arange(count, dtype=F64)[:, None] / count
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=F64)
    y = torch.sin(2 * torch.pi * cycles * x[:, 0]) + 0.5 * torch.sin(8 * x[:, 0]) + 0.3 * noise
    gp = Vecchia(x, y, Matern52(1), num_neighbors=16)
    assert 0.1 < gp.kernel.lengthscale[0] * cycles < 1
    assert gp.likelihood.variance < 0.2
