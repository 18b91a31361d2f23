"""Matérn kernels of any smoothness: special cases, SciPy's Bessel functions, gradients in the smoothness."""

import math

import pytest
import scipy.special
import torch
from oracles.kernels import fresh, points, tensor

from pyro_nngp.kernels import Matern, Matern12, Matern32, Matern52


@pytest.mark.parametrize(("nu", "cls"), [(0.5, Matern12), (1.5, Matern32), (2.5, Matern52)])
def test_special_cases(nu: float, cls: type) -> None:
    x, lengthscale = points(30, 2), tensor(0.4, 2.0)
    x = torch.cat([x, x[:1] + 1e-7, x[:1] + 50])
    ours, theirs = fresh(Matern(2, 1.7, lengthscale, smoothness=nu)), fresh(cls(2, 1.7, lengthscale))
    torch.testing.assert_close(ours(x, x), theirs(x, x), rtol=0.0, atol=1e-13)
    torch.testing.assert_close(ours.diag(x), theirs.diag(x))


@pytest.mark.parametrize("nu", [0.05, 0.3, 1.0, 3.7, 12.0])
def test_against_bessel_functions(nu: float) -> None:
    r = torch.logspace(-6, 1.5, 60, dtype=torch.float64)
    z = math.sqrt(2 * nu) * r
    log_scale = (1 - nu) * math.log(2) - math.lgamma(nu) + nu * z.log()
    exact = log_scale.exp() * torch.as_tensor(scipy.special.kv(nu, z.numpy()))
    ours = fresh(Matern(1, smoothness=torch.tensor(nu, dtype=torch.float64)))(tensor(0.0)[:, None], r[:, None])[0]
    torch.testing.assert_close(ours, exact, rtol=0.0, atol=1e-12)


def test_gradients() -> None:
    """In the smoothness, to the accuracy of interpolation; in the inputs, also between equal points."""
    z = tensor(0.1, 0.7, 2.0)[:, None]

    def block(nu: torch.Tensor) -> torch.Tensor:
        return fresh(Matern(1, smoothness=nu))(tensor(0.0)[:, None], z)

    nu = tensor(1.3).squeeze().requires_grad_()
    gradient = torch.autograd.functional.jacobian(block, nu)
    step = 1e-3
    want = (block(nu.detach() + step) - block(nu.detach() - step)) / (2 * step)
    torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-8)
    x = points(4, 2).requires_grad_()
    slope, exact = (
        torch.autograd.grad(fresh(kernel)(x, x).square().sum(), x)[0]
        for kernel in (Matern(2, smoothness=2.5), Matern52(2))
    )
    torch.testing.assert_close(slope, exact, rtol=1e-8, atol=1e-9)


def test_a_batch_of_smoothnesses() -> None:
    x, nu = points(5, 2), tensor(0.5, 1.5, 2.5)
    each = [fresh(cls(2)) for cls in (Matern12, Matern32, Matern52)]
    kernel = Matern(2)
    del kernel.smoothness
    kernel.smoothness = nu
    cov = fresh(kernel)
    assert cov.batch_shape == (3,)
    torch.testing.assert_close(cov(x, x), torch.stack([one(x, x) for one in each]), rtol=0.0, atol=1e-13)
