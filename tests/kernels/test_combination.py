"""A combination of kernels is the covariance function that the sum or product computes block by block."""

import pytest
import torch
from builders import normal, tensor
from pyro.nn import PyroParam

from pyro_nngp.kernels import (
    RBF,
    Constant,
    Cosine,
    Linear,
    Matern,
    Matern12,
    Matern32,
    Periodic,
    RationalQuadratic,
    Rotation,
    Warped,
    Wendland,
    bind,
)
from pyro_nngp.kernels.combination import MAX_PARTS, block

KERNELS = {
    "sum": lambda: Matern32(3) + RBF(3, lengthscale=tensor(0.5, 1.0, 2.0)),
    "product": lambda: Matern(2, smoothness=0.8, active_dims=[2, 0]) * Matern12(1, active_dims=[1]),
    "three": lambda: Matern32(3) + Constant(3, 0.4) * Wendland(3, lengthscale=4.0) * Matern(3, smoothness=1.7),
    "nested": lambda: (RBF(3) + Matern12(1, active_dims=[0])) * (Matern(3, smoothness=2.2) + Constant(3)),
    "circles": lambda: Periodic(2, period=tensor(0.7, 1.1), active_dims=[0, 1]) + Cosine(3, period=0.9) * RBF(3),
    "warped": lambda: Warped(Matern32(2) * RBF(1, active_dims=[1]), Rotation(), 2, active_dims=[1, 2]) + RBF(3),
    "batch": lambda: (
        RBF(3, lengthscale=PyroParam(tensor(0.5, 2.0)[:, None]))
        * Matern32(1, PyroParam(tensor(1.0, 2.0)), active_dims=[2])
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_blocks(name):
    kernel, x, z = KERNELS[name]().double(), normal(4, 3), normal(2, 5, 3)
    cov = bind(kernel)
    parts = cov.radial
    found = block(
        parts.columns(x), parts.columns(z), parts.lengthscale, parts.variance, parts.profile, parts.smoothness
    )
    torch.testing.assert_close(found, cov(x, z), rtol=1e-12, atol=1e-12)
    assert parts.columns(x).shape == (4, parts.dim)


def test_there_is_none_with_other_kernels_or_too_many_parts():
    for other in (Linear(2), RationalQuadratic(2), Periodic(2, period=PyroParam(tensor(0.5, 0.7, 0.9)[:, None]))):
        assert bind(other + RBF(2)).radial is None
        assert bind(RBF(2) * other).radial is None
    most = sum((RBF(2) for _ in range(MAX_PARTS - 1)), start=RBF(2))
    assert bind(most).radial is not None
    assert bind(most + RBF(2)).radial is None
