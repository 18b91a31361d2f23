"""A smooth function at places in meters, with noise."""

import pytest
import torch
from oracles.problems import draw

from pyro_nngp.kernels import Matern32

F64 = torch.float64
N = 300


@pytest.fixture(scope="module")
def field():
    """A Matern-3/2 field of variance 1 at N + 100 places in the unit square, and noisy values."""
    x = torch.rand(N + 100, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    f = draw(Matern32(2, lengthscale=torch.tensor([0.3, 0.3], dtype=F64)).bind()(x, x))
    return x, f, f + 0.2 * torch.randn(len(f), generator=torch.Generator().manual_seed(2), dtype=F64)
