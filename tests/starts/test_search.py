"""The search for hyperparameters that best predict points from their neighbors."""

import pytest
import torch
from oracles.problems import draw

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern12, Matern32
from pyro_nngp.likelihoods import (
    Gaussian,
)
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
