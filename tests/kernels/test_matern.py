"""Matérn kernels of any smoothness: special cases, gradients in the smoothness, batches of it."""

import pytest
import torch
from builders import normal, tensor

from pyro_nngp.kernels import Matern, Matern12, Matern32, Matern52, bind


@pytest.mark.parametrize(("nu", "cls"), [(0.5, Matern12), (1.5, Matern32), (2.5, Matern52)])
def test_special_cases(nu: float, cls: type) -> None:
    x, lengthscale = normal(30, 2), tensor(0.4, 2.0)
    x = torch.cat([x, x[:1] + 1e-7, x[:1] + 50])
    ours, theirs = bind(Matern(2, 1.7, lengthscale, smoothness=nu)), bind(cls(2, 1.7, lengthscale))
    torch.testing.assert_close(ours(x, x), theirs(x, x), rtol=0.0, atol=1e-13)
    torch.testing.assert_close(ours.diag(x), theirs.diag(x))


def test_gradients() -> None:
    """In the smoothness, to the accuracy of interpolation; in the inputs, also between equal points."""
    z = tensor(0.1, 0.7, 2.0)[:, None]

    def block(nu: torch.Tensor) -> torch.Tensor:
        return bind(Matern(1, smoothness=nu))(tensor(0.0)[:, None], z)

    nu = tensor(1.3).squeeze().requires_grad_()
    gradient = torch.autograd.functional.jacobian(block, nu)
    step = 1e-3
    want = (block(nu.detach() + step) - block(nu.detach() - step)) / (2 * step)
    torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-8)
    x = normal(4, 2).requires_grad_()
    slope, exact = (
        torch.autograd.grad(bind(kernel)(x, x).square().sum(), x)[0]
        for kernel in (Matern(2, smoothness=2.5), Matern52(2))
    )
    torch.testing.assert_close(slope, exact, rtol=1e-8, atol=1e-9)


def test_a_batch_of_smoothnesses() -> None:
    x, nu = normal(5, 2), tensor(0.5, 1.5, 2.5)
    each = [bind(cls(2)) for cls in (Matern12, Matern32, Matern52)]
    kernel = Matern(2)
    del kernel.smoothness
    kernel.smoothness = nu
    cov = bind(kernel)
    assert cov.batch_shape == (3,)
    torch.testing.assert_close(cov(x, x), torch.stack([one(x, x) for one in each]), rtol=0.0, atol=1e-13)


def test_an_unset_smoothness_is_learned_between_bounds_and_a_given_one_is_free() -> None:
    unset, given = Matern(2), Matern(2, smoothness=0.05)
    assert unset.smoothness.item() == pytest.approx(2.5)
    with torch.no_grad():
        for far, bound in ((-30.0, 0.1), (30.0, 5.0)):
            unset.smoothness_unconstrained.fill_(far)
            assert unset.smoothness.item() == pytest.approx(bound)
    given.smoothness = 40.0
    assert given.smoothness.item() == pytest.approx(40.0)


@pytest.mark.parametrize("nu", [1e9, 10**12])
def test_a_smoothness_whose_table_is_too_large_is_refused(nu: float) -> None:
    with pytest.raises(ValueError, match=r"Matern: expected smoothness below 1048576, got .* or more\. Use RBF"):
        bind(Matern(2, smoothness=nu))(normal(3, 2), normal(3, 2))
