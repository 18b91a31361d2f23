"""Covariance functions: values, gradients, accuracy far from the origin, Pyro effects, and every error."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pyro.contrib.gp.kernels as reference
import pytest
import sklearn.gaussian_process.kernels as sk
import torch
from builders import normal, scalar, tensor
from oracles.kernels import PLAIN, STATIONARY, growing, name_of, space_time
from torch import Tensor

from pyro_nngp.kernels import (
    RBF,
    ArcCosine,
    Constant,
    Cosine,
    Gibbs,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Product,
    RationalQuadratic,
    VerticalScaling,
    Wendland,
    bind,
)


def every_kernel(input_dim: int) -> list[Kernel]:
    kernels = [cls(input_dim) for cls in PLAIN]
    return [
        *kernels,
        Matern52(input_dim, 0.7) + Linear(input_dim),
        RBF(input_dim) * Matern12(input_dim, lengthscale=0.4),
        VerticalScaling(Matern32(input_dim), lambda x: 1 + x[..., 0].square()),
    ]


@pytest.mark.parametrize("cls", [RBF, Matern32, Matern52, RationalQuadratic, Periodic, Constant, Linear], ids=name_of)
def test_values_equal_pyro_contrib_gp(cls: type[Kernel]) -> None:
    x, z = normal(5, 2), normal(4, 2)
    extra: dict[str, Tensor] = {"variance": scalar(1.7)}
    if issubclass(cls, tuple(STATIONARY)):
        extra["lengthscale"] = tensor(0.5, 2.0)
    if cls is RationalQuadratic:
        extra["scale_mixture"] = scalar(0.6)
    if cls is Periodic:
        extra["period"] = scalar(2.3)
    cov = bind(cls(2, **extra))
    oracle = getattr(reference, cls.__name__)(2, **extra)
    torch.testing.assert_close(cov(x, z), oracle(x, z), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(cov.diag(x), oracle(x, diag=True), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    ("kernel", "oracle"),
    [
        (RBF(2, 1.0, tensor(0.5, 2.0)), sk.RBF([0.5, 2.0])),
        (Matern12(2, 1.0, tensor(0.5, 2.0)), sk.Matern([0.5, 2.0], nu=0.5)),
        (Matern32(2, 1.0, tensor(0.5, 2.0)), sk.Matern([0.5, 2.0], nu=1.5)),
        (Matern52(2, 1.0, tensor(0.5, 2.0)), sk.Matern([0.5, 2.0], nu=2.5)),
        (RationalQuadratic(2, 1.0, tensor(0.5), tensor(0.6)), sk.RationalQuadratic(0.5, 0.6)),
    ],
    ids=name_of,
)
def test_values_equal_sklearn(kernel: Kernel, oracle: Any) -> None:
    x, z = normal(6, 2), normal(5, 2)
    torch.testing.assert_close(kernel(x, z), torch.as_tensor(oracle(x.numpy(), z.numpy())), rtol=1e-12, atol=1e-14)


def test_values_by_hand() -> None:
    x, z = tensor(0.0, 0.0)[None], tensor(3.0, 4.0)[None]  # distance 5
    assert bind(Matern12(2, 2.0, 2.5))(x, z).item() == pytest.approx(2 * math.exp(-2))
    assert bind(RBF(2, 2.0, 2.5))(x, z).item() == pytest.approx(2 * math.exp(-2))
    assert bind(Constant(2, 0.5))(x, z).item() == 0.5
    assert bind(Linear(2, 2.0))(z, 2 * z).item() == pytest.approx(100.0)
    assert bind(Periodic(2, 1.0, 2.0, tensor(6.0, 16.0)))(x, z).item() == pytest.approx(math.exp(-0.75), rel=1e-6)


@pytest.mark.parametrize("kernel", every_kernel(2), ids=name_of)
def test_batched_equals_looped_and_broadcasts(kernel: Kernel) -> None:
    cov = bind(kernel)
    x, z = normal(3, 1, 5, 2), normal(4, 6, 2)
    block = cov(x, z)
    assert block.shape == (3, 4, 5, 6)
    for i, j in itertools.product(range(3), range(4)):
        torch.testing.assert_close(block[i, j], cov(x[i, 0], z[j]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kernel", every_kernel(2), ids=name_of)
def test_diagonal_and_symmetry(kernel: Kernel) -> None:
    x = normal(3, 5, 2)
    block = kernel(x)
    torch.testing.assert_close(kernel(x, diag=True), block.diagonal(dim1=-2, dim2=-1), rtol=1e-14, atol=0.0)
    torch.testing.assert_close(kernel(x, x.clone()), block, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(block.mT, block, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kernel", every_kernel(3), ids=name_of)
def test_positive_semidefinite(kernel: Kernel) -> None:
    eigenvalues = torch.linalg.eigvalsh(kernel(normal(40, 3)))
    assert eigenvalues.min() > -1e-12 * eigenvalues.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", every_kernel(2), ids=name_of)
def test_gradients_are_finite_at_distance_zero(kernel: Kernel, dtype: torch.dtype) -> None:
    x = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    z = torch.ones(4, 2, dtype=dtype, requires_grad=True)
    cov = bind(kernel)
    gradients = torch.autograd.grad(
        (x.sum() * z.sum() + cov(x, z).sum() + cov(x, x).sum()).square(), (x, z), create_graph=True
    )
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, z))
    assert all(g.isfinite().all() for g in (*gradients, *second))


@pytest.mark.parametrize("kernel", every_kernel(2), ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_blocks_follow_the_dtype_of_the_inputs(kernel: Kernel, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, dtype=dtype)
    for dtype_of_kernel in (torch.float32, torch.float64):
        cov = bind(kernel.to(dtype_of_kernel))
        assert cov(x, x).dtype == cov.diag(x).dtype == dtype


BY_AUTOGRAD: list[Callable[[], Kernel]] = [
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


@pytest.mark.parametrize("make", BY_AUTOGRAD)
def test_positive_definite_with_the_stated_variances_and_finite_gradients(make: Callable[[], Kernel]) -> None:
    x = normal(60, 3)
    cov = bind(make())
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
        return bind(make())(x, z)

    assert torch.autograd.gradcheck(separate, (x[:3].requires_grad_(), x[3:6].detach().requires_grad_()))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: RBF(0), ValueError, r"RBF: expected input_dim >= 1, got 0"),
        (lambda: RBF(2, active_dims=[0]), ValueError, r"RBF: expected active_dims of length input_dim = 2, got 1"),
        (lambda: RBF(2, active_dims=[1, 1]), ValueError, r"active_dims to be distinct and >= 0, got \[1, 1\]"),
        (lambda: RBF(2, active_dims=[0, -1]), ValueError, r"active_dims to be distinct and >= 0, got \[0, -1\]"),
        (lambda: RBF(2, variance=0.0), ValueError, r"RBF: expected variance to be positive and finite.*, got 0.0"),
        (lambda: RBF(2, lengthscale=tensor(1.0, -1.0)), ValueError, r"expected lengthscale to be positive.*-1.0\]"),
        (lambda: Periodic(1, period=float("inf")), ValueError, r"Periodic: expected period to be positive and finite"),
        (
            lambda: RBF(2, variance=torch.tensor(1)),
            ValueError,
            r"variance to be positive and finite, in floating point",
        ),
        (lambda: RBF(2, lengthscale=torch.ones(3)), ValueError, r"scalar or of shape \(2,\), got shape \(3,\)"),
        (lambda: Linear(2, variance=torch.ones(2)), ValueError, r"Linear: expected variance to be a scalar, got shape"),
        (lambda: RBF(2) + RBF(3), ValueError, r"Sum: expected kern0 and kern1 to fit the same inputs, got kern0 on 2"),
        (
            lambda: RBF(2) * RBF(1, active_dims=[2]),
            ValueError,
            r"Product: expected .* got kern0 on 2 and kern1 on \[2\]",
        ),
        (lambda: RBF(2) + 1.0, TypeError, r"Sum: expected kern1 to be a Kernel, got float\. Combine kernels"),
        (lambda: Product(torch.exp, RBF(2)), TypeError, r"Product: expected kern0 to be a Kernel, got builtin"),
        (lambda: VerticalScaling(torch.exp, torch.exp), TypeError, r"VerticalScaling: expected kern to be a Kernel"),
        (lambda: VerticalScaling(RBF(2), 2.0), TypeError, r"expected vscaling_fn to be callable, got float"),
        (lambda: bind(2.0), TypeError, r"bind: expected kernel to be a Kernel or a callable, got float"),
    ],
)
def test_construction_errors(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    ("kernel", "x", "match"),
    [
        (RBF(2), torch.ones(3), r"RBF: expected inputs of shape \(..., n, D\), got \(3,\)\. Use x\[:, None\]"),
        (Linear(2), torch.ones(4, 3), r"Linear: expected inputs with input_dim = 2 columns, got \(4, 3\)"),
        (Matern12(1, active_dims=[2]), torch.ones(4, 2), r"Matern12: expected inputs with columns \[2\], got \(4, 2\)"),
    ],
    ids=["one axis", "columns", "active columns"],
)
def test_input_errors(kernel: Kernel, x: Tensor, match: str) -> None:
    for diag in (False, True):
        with pytest.raises(ValueError, match=match):
            kernel(x, diag=diag)


def test_variances_are_those_of_one_set_of_points() -> None:
    with pytest.raises(
        ValueError, match=r"RBF: expected z to be None with diag=True, got points\. Pass kernel\(x, diag"
    ):
        RBF(2)(torch.ones(3, 2), torch.ones(3, 2), diag=True)
