"""Stationary kernels: lengthscales, distances in float32, curvature at distance zero, the metric of neighbors."""

import math
from typing import Any

import pytest
import torch
from builders import normal, tensor
from oracles.kernels import STATIONARY, name_of

import pyro_nngp as nngp
from pyro_nngp.kernels import (
    RBF,
    Constant,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    Wendland,
    bind,
)
from pyro_nngp.kernels.stationary import neighbor_lengthscale


def test_one_lengthscale_per_dimension_is_a_rescaling() -> None:
    x, lengthscale = normal(7, 3), tensor(0.3, 1.0, 4.0)
    for cls in STATIONARY[:-1]:
        torch.testing.assert_close(bind(cls(3, 1.0, lengthscale))(x, x), bind(cls(3))(x / lengthscale, x / lengthscale))


@pytest.mark.parametrize("cls", [RBF, Matern32, Matern52, RationalQuadratic, Periodic], ids=name_of)
def test_curvature_at_distance_zero(cls: type[Kernel]) -> None:
    """The second derivative of a smooth kernel at x = z is that of its Taylor series, not the 0 of a clamped root."""
    curvature = {RBF: -1.0, Matern32: -3.0, Matern52: -5 / 3, RationalQuadratic: -1.0, Periodic: -4 * math.pi**2}
    cov = bind(cls(1))
    z = tensor(0.3)[:, None]
    hessian = torch.autograd.functional.hessian(lambda x: cov(z, x[:, None])[0, 0], tensor(0.3))
    assert hessian.item() == pytest.approx(curvature[cls], rel=1e-6)


def test_exponential_kernel_takes_the_zero_subgradient_between_equal_points() -> None:
    x = tensor(0.0, 1.0)[:, None].requires_grad_()
    Matern12(1)(x, tensor(0.0)[:, None]).sum().backward()
    torch.testing.assert_close(x.grad, tensor(0.0, -math.exp(-1))[:, None])


@pytest.mark.parametrize("cls", STATIONARY, ids=name_of)
def test_close_points_far_from_the_origin_in_float32(cls: type[Kernel]) -> None:
    """Around 1e4, where float32 squares have a spacing of 8, blocks keep an accuracy of a few roundings."""
    offsets = torch.randint(-8, 9, (6, 2)) / 1024  # representable next to 1e4 in float32
    x = 1e4 + offsets
    kernel = cls(2, lengthscale=0.01)
    cov = bind(kernel)
    exact = cov(x.double(), x.double())
    torch.testing.assert_close(cov(x, x), exact.float(), rtol=0.0, atol=2e-6)
    assert exact.min() < 0.9
    gradient, want = (
        (torch.autograd.grad(cov(v, v[:3]).sum(), v))[0]
        for v in (x.requires_grad_(), x.detach().double().requires_grad_())
    )
    torch.testing.assert_close(gradient, want.float(), rtol=1e-3, atol=1e-3 * want.abs().max().item())


def test_neighbor_lengthscale_covers_each_column_once() -> None:
    ard = Matern52(2, lengthscale=tensor(0.5, 2.0))
    assert neighbor_lengthscale(ard * Constant(2), 2).tolist() == [0.5, 2.0]
    assert neighbor_lengthscale(Matern52(3), 3).tolist() == [1.0, 1.0, 1.0]
    separable = RBF(1, lengthscale=0.25, active_dims=[2]) * RBF(2, lengthscale=tensor(3.0, 4.0), active_dims=[1, 0])
    assert neighbor_lengthscale(separable, 3).tolist() == pytest.approx([4.0, 3.0, 0.25])
    assert not neighbor_lengthscale(separable, 3).requires_grad


@pytest.mark.parametrize(
    "kernel",
    [
        RBF(2) + Matern12(2),
        RBF(2) + Constant(2),
        RBF(1, active_dims=[0]),
        Periodic(2),
        Linear(2),
        lambda x, z: x @ z.mT,
    ],
    ids=["two lengthscales", "sum", "column without", "periodic", "no lengthscale", "callable"],
)
def test_neighbor_lengthscale_may_not_exist(kernel: Any) -> None:
    assert neighbor_lengthscale(kernel, 2) is None


def test_wendland_has_compact_support() -> None:
    r = tensor(0.0, 0.3, 0.999, 1.0, 4.0)
    k = bind(Wendland(1))(tensor(0.0)[:, None], r[:, None])[0]
    want = (1 - r).clamp(min=0).pow(6) * (35 * r.square() + 18 * r + 3) / 3
    torch.testing.assert_close(k, want)
    assert (k[3:] == 0).all()


@pytest.mark.parametrize("cls", [RBF, Matern32, RationalQuadratic])
def test_one_lengthscale_for_all_columns(cls: type[Kernel]) -> None:
    x = torch.rand(200, 3) * torch.tensor([1.0, 10.0, 50.0])
    gp = nngp.Vecchia(x, torch.sin(x.sum(-1) / 20), cls(3, isotropic=True), num_neighbors=10)  # type: ignore[call-arg]
    assert gp.kernel.lengthscale.shape == ()
    kernel = cls(3, isotropic=True)  # type: ignore[call-arg]
    del kernel.lengthscale
    kernel.lengthscale = tensor(0.5, 2.0)
    points_ = normal(4, 3)
    both = bind(kernel)(points_, points_)
    for i in range(2):
        torch.testing.assert_close(both[i], bind(cls(3, lengthscale=kernel.lengthscale[i]))(points_, points_))


def test_wendland_is_positive_definite_in_three_dimensions_only() -> None:
    with pytest.raises(ValueError, match="Wendland: expected input_dim of at most 3"):
        Wendland(4)
