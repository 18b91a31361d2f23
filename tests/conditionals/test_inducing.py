"""Conditionals given all inducing values against dense formulas."""

import pytest
import torch
from builders import matern
from oracles.dense import dense_covariance

from pyro_nngp.conditionals import whitened_conditional
from pyro_nngp.kernels import Matern52
from pyro_nngp.linalg import NotPositiveDefiniteError, cholesky

F64 = torch.float64


@pytest.fixture
def kernel():
    return matern().requires_grad_(False)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_whitened_conditional_is_the_dense_one(kernel, batch):
    x, z = torch.rand(*batch, 5, 2, dtype=F64), torch.rand(7, 2, dtype=F64)
    a, var, tril = whitened_conditional(kernel, x, z)
    cov, cross = dense_covariance(kernel, z), kernel(x, z)
    torch.testing.assert_close(tril @ tril.mT, cov)
    weights = a @ torch.linalg.inv(tril)
    torch.testing.assert_close(weights, cross @ torch.linalg.inv(cov), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(var, 1.3 * (1 + 1e-6) - (weights * cross).sum(-1), rtol=1e-6, atol=1e-9)


def test_hundreds_of_inducing_points_have_a_conditional_in_float32():
    x, z = torch.rand(20, 2), torch.rand(400, 2)
    smooth = Matern52(2, variance=1.3, lengthscale=0.5).requires_grad_(False)
    with pytest.raises(NotPositiveDefiniteError):
        cholesky(smooth(z, z))
    found = whitened_conditional(smooth, x, z)
    exact = whitened_conditional(smooth, x.double(), z.double())
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_at_an_inducing_point_the_nugget_is_left(kernel):
    z = torch.rand(4, 2, dtype=F64)
    _, var, _ = whitened_conditional(kernel, z, z, 1e-3)
    assert (var >= 1.3e-3 * (1 - 1e-9)).all()
    assert (var < 3e-3 * 1.3).all()


def test_coinciding_inducing_points_without_a_nugget_are_an_error(kernel):
    z = torch.zeros(3, 2, dtype=F64)
    with pytest.raises(NotPositiveDefiniteError, match=r"cholesky: input is not positive-definite"):
        whitened_conditional(kernel, torch.ones(1, 2, dtype=F64), z, 0.0)
