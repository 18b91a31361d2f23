"""Varying lengthscales, space-time interaction, compact support, waves, wide layers: definitions and validity."""

import math
from collections.abc import Callable

import pytest
import torch
from oracles.kernels import fresh, points, tensor
from torch import Tensor

import pyro_nngp as nngp
from pyro_nngp.kernels import (
    RBF,
    ArcCosine,
    Cosine,
    Gibbs,
    Gneiting,
    Kernel,
    KernelMetric,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
    Wendland,
    neighbor_metric,
)


def growing(x: Tensor) -> Tensor:
    return (0.8 * x[..., 0]).exp()


def space_time(cls: type[Kernel] = Matern32) -> Gneiting:
    kern = cls(2, 1.5, tensor(0.5, 2.0), active_dims=[0, 2])
    return Gneiting(kern, 1, timescale=0.7, interaction=0.8, exponent=0.6, decay=0.4)


MAKE: list[Callable[[], Kernel]] = [
    lambda: Gibbs(RBF(3, 1.5, 0.6), growing),
    lambda: Gibbs(Matern12(3, 1.5, 0.6), growing),
    lambda: Gibbs(Matern52(3, 1.5, 0.6), growing),
    space_time,
    lambda: space_time(Matern12),
    lambda: space_time(RBF),
    lambda: Wendland(3, 1.5, 2.0),
    lambda: Cosine(3, 1.5, tensor(1.0, 2.0, 3.0)),
    lambda: RBF(3) * Cosine(3) + RBF(3, lengthscale=2.0) * Cosine(3, period=0.5),
    lambda: ArcCosine(3, 0.7, 0.3),
]


@pytest.mark.parametrize("make", MAKE)
def test_positive_definite_with_the_stated_variances_and_finite_gradients(make: Callable[[], Kernel]) -> None:
    x = points(60, 3)
    cov = fresh(make())
    block = cov(x, x)
    torch.testing.assert_close(block, block.mT)
    torch.testing.assert_close(block.diagonal(), cov.diag(x))
    assert torch.linalg.eigvalsh(block).min() > -1e-9
    with torch.no_grad():
        torch.testing.assert_close(cov(x, x), block)
    kernel = make().double()
    leaves = [x[:4].clone().requires_grad_(), *kernel.parameters()]
    gradients = torch.autograd.grad(kernel(leaves[0], leaves[0]).square().sum(), leaves)
    assert all(g.isfinite().all() for g in gradients)

    def separate(x: Tensor, z: Tensor) -> Tensor:
        return fresh(make())(x, z)

    assert torch.autograd.gradcheck(separate, (x[:3].requires_grad_(), x[3:6].detach().requires_grad_()))


def test_gibbs_by_its_formula() -> None:
    x = points(5, 1)
    a = growing(x)
    mean = (a[:, None].square() + a.square()) / 2
    want = (a[:, None] * a / mean).sqrt() * torch.exp(-(x - x.mT).square() / (2 * 0.36 * mean))
    torch.testing.assert_close(fresh(Gibbs(RBF(1, 1.0, tensor(0.6)), growing))(x, x), want)


@pytest.mark.parametrize("cls", [RBF, Matern12, Matern32, Matern52])
def test_gibbs_with_a_constant_factor_is_stationary(cls: type[Kernel]) -> None:
    x, z = points(5, 2), points(4, 2)
    ours = fresh(Gibbs(cls(2, 1.5, tensor(0.6)), lambda x: torch.full_like(x[..., 0], 3.0)))
    torch.testing.assert_close(ours(x, z), fresh(cls(2, 1.5, tensor(1.8)))(x, z))


def test_gneiting_by_its_formula() -> None:
    x, z = points(5, 3), points(4, 3)
    psi = 1 + ((x[:, None, 1] - z[None, :, 1]).abs() / 0.7).pow(1.2)
    h = ((x[:, None, [0, 2]] - z[None, :, [0, 2]]) / tensor(0.5, 2.0)).square().sum(-1).sqrt()
    s = math.sqrt(3) * h * psi.pow(-0.4)
    want = 1.5 * psi.pow(-(0.4 + 0.8)) * (1 + s) * torch.exp(-s)
    torch.testing.assert_close(fresh(space_time())(x, z), want, rtol=1e-6, atol=1e-7)


def test_gneiting_follows_time_and_space_in_neighbors_and_starts() -> None:
    x = torch.rand(300, 3, dtype=torch.float64) * tensor(1000.0, 10.0, 1.0)
    metric = neighbor_metric(space_time(), x)
    assert isinstance(metric, KernelMetric)
    torch.testing.assert_close(metric.features(x)[0], x[:, [0, 2, 1]] / tensor(0.5, 2.0, 0.7), rtol=1e-6, atol=1e-6)
    kernel = Gneiting(Matern32(2, active_dims=[0, 1]), 2)
    y = torch.sin(x[:, 0] / 200) + torch.sin(3 * x[:, 2]) + 0.1 * torch.randn(300, dtype=torch.float64)
    gp = nngp.Vecchia(x, y, kernel, num_neighbors=10)
    assert 0.02 < gp.kernel.timescale.item() < 50
    assert 0 < gp.kernel.interaction.item() < 1
    assert gp.kernel.kern.lengthscale[0] > 10


def test_wendland_has_compact_support() -> None:
    r = tensor(0.0, 0.3, 0.999, 1.0, 4.0)
    k = fresh(Wendland(1))(tensor(0.0)[:, None], r[:, None])[0]
    want = (1 - r).clamp(min=0).pow(6) * (35 * r.square() + 18 * r + 3) / 3
    torch.testing.assert_close(k, want)
    assert (k[3:] == 0).all()


def test_wave_and_wide_layer_by_their_formulas() -> None:
    x, z = points(5, 2), points(4, 2)
    phase = 2 * math.pi * ((x[:, None] - z) / tensor(1.0, 3.0)).sum(-1)
    torch.testing.assert_close(fresh(Cosine(2, 1.5, tensor(1.0, 3.0)))(x, z), 1.5 * phase.cos())
    weights, biases = torch.randn(200_000, 2, dtype=torch.float64) * 0.7**0.5, torch.randn(200_000).double() * 0.3**0.5
    left, right = ((weights @ p.mT + biases[:, None]).clamp(min=0) for p in (x, z))
    sampled = 2 * left.mT @ right / len(weights)
    torch.testing.assert_close(fresh(ArcCosine(2, 0.7, 0.3))(x, z), sampled, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("cls", [RBF, Matern32, RationalQuadratic])
def test_one_lengthscale_for_all_columns(cls: type[Kernel]) -> None:
    x = torch.rand(200, 3) * torch.tensor([1.0, 10.0, 100.0])
    gp = nngp.Vecchia(x, torch.sin(x.sum(-1) / 20), cls(3, isotropic=True), num_neighbors=10)  # type: ignore[call-arg]
    assert gp.kernel.lengthscale.shape == ()
    kernel = cls(3, isotropic=True)  # type: ignore[call-arg]
    del kernel.lengthscale
    kernel.lengthscale = tensor(0.5, 2.0)
    points_ = points(4, 3)
    both = fresh(kernel)(points_, points_)
    for i in range(2):
        torch.testing.assert_close(both[i], fresh(cls(3, lengthscale=kernel.lengthscale[i]))(points_, points_))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Gibbs(RationalQuadratic(2), growing), TypeError, "Gibbs: expected kern to be RBF, Matern12"),
        (lambda: Gibbs(RBF(2), 2.0), TypeError, "Gibbs: expected factor"),
        (lambda: Gibbs(RBF(2), lambda x: x)(points(4, 2)), ValueError, r"Gibbs: expected factor of shape \(4,\)"),
        (lambda: Gneiting(Wendland(2, active_dims=[0, 1]), 2), TypeError, "Gneiting: expected kern to be RBF"),
        (lambda: Gneiting(RBF(2), 2), ValueError, "Gneiting: expected kern with active_dims without the column 2"),
        (lambda: Gneiting(RBF(1, active_dims=[0]), 0), ValueError, "without the column 0 of time"),
        (lambda: Gneiting(RBF(1, active_dims=[0]), -1), ValueError, "Gneiting: expected time_dim >= 0"),
        (
            lambda: Gneiting(RBF(1, active_dims=[0]), 1, interaction=1.0),
            ValueError,
            "interaction to lie between 0 and 1",
        ),
        (lambda: Wendland(4), ValueError, "Wendland: expected input_dim of at most 3"),
    ],
)
def test_errors(make: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()  # type: ignore[operator]
