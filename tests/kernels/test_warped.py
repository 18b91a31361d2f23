"""Kernels of mapped inputs: by definition, in compiled code, starts from data, rotation, errors."""

import math

import pyro.distributions as dist
import pytest
import torch
from builders import normal, tensor
from pyro import poutine
from pyro.nn import PyroSample
from torch import nn

import pyro_nngp as nngp
from pyro_nngp.conditionals import nn_conditional
from pyro_nngp.kernels import Kernel, KernelMetric, Matern32, Rotation, Warped, bind, neighbor_metric
from pyro_nngp.kernels.binding import bind_double


def net(rows: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, rows)).double()


def test_definition_and_conditional_in_compiled_code() -> None:
    kernel, x, z = Matern32(3, 1.5, tensor(0.5, 1.0, 2.0)), normal(6, 2), normal(6, 4, 2)
    warp = net()
    warped = Warped(kernel, warp, 2)
    cov = bind(warped)
    torch.testing.assert_close(cov(x, x), bind(kernel)(warp(x), warp(x)))
    torch.testing.assert_close(cov.diag(x), torch.full((6,), 1.5, dtype=torch.float64))
    assert cov.radial is not None
    fused = nn_conditional(warped, x, z)
    plain = nn_conditional(lambda a, b: bind(kernel)(warp(a), warp(b)), x, z)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    weights = list(warp.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(fused[1].sum(), weights, retain_graph=True),
        torch.autograd.grad(plain[1].sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_weights_follow_the_dtype_of_the_inputs() -> None:
    warped = Warped(Matern32(3), net().float(), 2)
    x = normal(5, 2)
    assert bind_double(warped, torch.float32)(x, x).dtype == torch.float64
    torch.testing.assert_close(bind(warped)(x, x).float(), bind(warped)(x.float(), x.float()), rtol=1e-4, atol=1e-5)


def test_rotated_anisotropy_is_learned() -> None:
    """Stripes at 30 degrees: the long range lies along them."""
    angle = math.radians(30)
    x = torch.rand(150, 2) * 100
    across = -math.sin(angle) * x[:, 0] + math.cos(angle) * x[:, 1]
    y = torch.sin(across / 10) + 0.1 * torch.randn(150)
    gp = nngp.Vecchia(x, y, Warped(Matern32(2), Rotation(), 2), num_neighbors=10)
    nngp.fit(gp, 25, progress=False)
    along, over = gp.kernel.kern.lengthscale.tolist()
    found = gp.kernel.warp.angle.item() + (0 if along > over else math.pi / 2)
    assert abs(math.sin(found - angle)) < 0.15
    assert max(along, over) > 3 * min(along, over)


def test_rotation() -> None:
    x = normal(5, 2)
    turned = Rotation(math.pi / 2)(x)
    torch.testing.assert_close(turned, torch.stack([x[:, 1], -x[:, 0]], -1), rtol=1e-6, atol=1e-6)
    kernel = Warped(Matern32(2), Rotation(PyroSample(dist.Normal(0.0, 1.0))), 2)
    assert "warp.angle" in poutine.trace(kernel).get_trace(x).stochastic_nodes


def test_neighbors_are_searched_among_mapped_inputs() -> None:
    stretch = nn.Linear(2, 2, bias=False).double()
    stretch.weight.data = torch.diag(tensor(1.0, 100.0))
    metric = neighbor_metric(Warped(Matern32(2), stretch, 2), normal(50, 2))
    assert isinstance(metric, KernelMetric)
    x = normal(7, 2)
    torch.testing.assert_close(metric.features(x)[0], x * tensor(1.0, 100.0))


def test_starts_are_in_the_units_of_the_mapped_inputs() -> None:
    x, y = torch.rand(300, 2), torch.randn(300)
    kernel = Warped(Matern32(2), lambda x: 1e4 * x, 2)
    gp = nngp.Vecchia(x, y, kernel, num_neighbors=10)
    assert (gp.kernel.kern.lengthscale > 100).all()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Warped(lambda x, z: x @ z.mT, nn.Identity(), 2), TypeError, "Warped: expected kern to be a Kernel"),
        (lambda: Warped(Matern32(2), 3, 2), TypeError, "Warped: expected warp"),
        (
            lambda: Warped(Matern32(2), lambda x: x.sum(-1), 2)(normal(4, 2)),
            ValueError,
            r"Warped: expected warp to map \(4, 2\) to columns \(..., n, F\), got \(4,\)",
        ),
        (lambda: Warped(Matern32(2), lambda x: None, 2)(normal(4, 2)), ValueError, "to map .* got NoneType"),
        (lambda: Rotation()(normal(4, 3)), ValueError, "Rotation: expected x with 2 columns"),
        (lambda: Rotation(torch.zeros(3))(normal(4, 2)), ValueError, "Rotation: expected angle to be a scalar"),
    ],
)
def test_errors(make: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()  # type: ignore[operator]


def test_saved_and_loaded_with_the_model(tmp_path: object) -> None:
    x, y = torch.rand(40, 2), torch.randn(40)
    gp = nngp.Vecchia(x, y, Warped(Matern32(2), Rotation(0.7), 2), num_neighbors=5)
    gp.save(tmp_path / "gp")  # type: ignore[operator]
    again = nngp.load(tmp_path / "gp")  # type: ignore[operator]
    assert isinstance(again.kernel, Kernel)
    for ours, theirs in zip(again(x[:3]), gp(x[:3]), strict=True):
        torch.testing.assert_close(ours, theirs)
