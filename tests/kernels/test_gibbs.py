"""Gibbs kernels: the formula, constant factors, every error."""

import pytest
import torch
from builders import normal, tensor
from oracles.kernels import growing

from pyro_nngp.kernels import RBF, Gibbs, Kernel, Matern12, Matern32, Matern52, RationalQuadratic, bind


def test_the_formula() -> None:
    x = normal(5, 1)
    a = growing(x)
    mean = (a[:, None].square() + a.square()) / 2
    want = (a[:, None] * a / mean).sqrt() * torch.exp(-(x - x.mT).square() / (2 * 0.36 * mean))
    torch.testing.assert_close(bind(Gibbs(RBF(1, 1.0, tensor(0.6)), growing))(x, x), want)


@pytest.mark.parametrize("cls", [RBF, Matern12, Matern32, Matern52])
def test_a_constant_factor_leaves_a_stationary_kernel(cls: type[Kernel]) -> None:
    x, z = normal(5, 2), normal(4, 2)
    ours = bind(Gibbs(cls(2, 1.5, tensor(0.6)), lambda x: torch.full_like(x[..., 0], 3.0)))
    torch.testing.assert_close(ours(x, z), bind(cls(2, 1.5, tensor(1.8)))(x, z))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Gibbs(RationalQuadratic(2), growing), TypeError, "Gibbs: expected kern to be RBF, Matern12"),
        (lambda: Gibbs(RBF(2), 2.0), TypeError, "Gibbs: expected factor"),
        (lambda: Gibbs(RBF(2), lambda x: x)(normal(4, 2)), ValueError, r"Gibbs: expected factor of shape \(4,\)"),
    ],
)
def test_errors(make: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()  # type: ignore[operator]
