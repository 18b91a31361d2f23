"""Covariance functions: values, gradients, accuracy far from the origin, Pyro effects, and every error."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.contrib.gp.kernels as reference
import pyro.distributions as dist
import pytest
import sklearn.gaussian_process.kernels as sk
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import constraints

from pyro_nngp.kernels import (
    RBF,
    Constant,
    Covariance,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Product,
    RationalQuadratic,
    Sum,
    VerticalScaling,
    bind,
    neighbor_lengthscale,
)

STATIONARY = [RBF, Matern12, Matern32, Matern52, RationalQuadratic, Periodic]
PLAIN = [*STATIONARY, Constant, Linear]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def points(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def fresh(kernel: Kernel) -> Covariance:
    """Bind with an empty parameter store, where kernels that stand alone would find each other's values."""
    pyro.clear_param_store()
    return kernel.bind()


def every_kernel(input_dim: int) -> list[Kernel]:
    kernels = [cls(input_dim) for cls in PLAIN]
    return [
        *kernels,
        Matern52(input_dim, 0.7) + Linear(input_dim),
        RBF(input_dim) * Matern12(input_dim, lengthscale=0.4),
        VerticalScaling(Matern32(input_dim), lambda x: 1 + x[..., 0].square()),
    ]


def name_of(value: Any) -> str:
    return type(value).__name__ if isinstance(value, Kernel) else getattr(value, "__name__", str(value))


# ---------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("cls", [RBF, Matern32, Matern52, RationalQuadratic, Periodic, Constant, Linear], ids=name_of)
def test_values_equal_pyro_contrib_gp(cls: type[Kernel]) -> None:
    x, z = points(5, 2), points(4, 2)
    extra: dict[str, Tensor] = {"variance": torch.tensor(1.7, dtype=torch.float64)}
    if issubclass(cls, tuple(STATIONARY)):
        extra["lengthscale"] = tensor(0.5, 2.0)
    if cls is RationalQuadratic:
        extra["scale_mixture"] = torch.tensor(0.6, dtype=torch.float64)
    if cls is Periodic:
        extra["period"] = torch.tensor(2.3, dtype=torch.float64)
    cov = fresh(cls(2, **extra))
    pyro.clear_param_store()
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
    x, z = points(6, 2), points(5, 2)
    torch.testing.assert_close(kernel(x, z), torch.as_tensor(oracle(x.numpy(), z.numpy())), rtol=1e-12, atol=1e-14)


def test_values_by_hand() -> None:
    x, z = tensor(0.0, 0.0)[None], tensor(3.0, 4.0)[None]  # distance 5
    assert fresh(Matern12(2, 2.0, 2.5))(x, z).item() == pytest.approx(2 * math.exp(-2))
    assert fresh(RBF(2, 2.0, 2.5))(x, z).item() == pytest.approx(2 * math.exp(-2))
    assert fresh(Constant(2, 0.5))(x, z).item() == 0.5
    assert fresh(Linear(2, 2.0))(z, 2 * z).item() == pytest.approx(100.0)
    assert fresh(Periodic(2, 1.0, 2.0, tensor(6.0, 16.0)))(x, z).item() == pytest.approx(math.exp(-0.75), rel=1e-6)


@pytest.mark.parametrize("kernel", every_kernel(2), ids=name_of)
def test_batched_equals_looped_and_broadcasts(kernel: Kernel) -> None:
    cov = fresh(kernel)
    x, z = points(3, 1, 5, 2), points(4, 6, 2)
    block = cov(x, z)
    assert block.shape == (3, 4, 5, 6)
    for i, j in itertools.product(range(3), range(4)):
        torch.testing.assert_close(block[i, j], cov(x[i, 0], z[j]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kernel", every_kernel(2), ids=name_of)
def test_diagonal_and_symmetry(kernel: Kernel) -> None:
    x = points(3, 5, 2)
    block = kernel(x)
    torch.testing.assert_close(kernel(x, diag=True), block.diagonal(dim1=-2, dim2=-1), rtol=1e-14, atol=0.0)
    torch.testing.assert_close(kernel(x, x.clone()), block, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(block.mT, block, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kernel", every_kernel(3), ids=name_of)
def test_positive_semidefinite(kernel: Kernel) -> None:
    eigenvalues = torch.linalg.eigvalsh(kernel(points(40, 3)))
    assert eigenvalues.min() > -1e-12 * eigenvalues.max()


@pytest.mark.parametrize("cls", PLAIN, ids=name_of)
def test_active_dims_pick_columns(cls: type[Kernel]) -> None:
    x, z = points(5, 4), points(6, 4)
    block = fresh(cls(2, active_dims=[3, 1]))(x, z)
    torch.testing.assert_close(block, fresh(cls(2))(x[:, [3, 1]], z[:, [3, 1]]), rtol=1e-14, atol=0.0)


def test_one_lengthscale_per_dimension_is_a_rescaling() -> None:
    x, lengthscale = points(7, 3), tensor(0.3, 1.0, 4.0)
    for cls in STATIONARY[:-1]:
        torch.testing.assert_close(
            fresh(cls(3, 1.0, lengthscale))(x, x), fresh(cls(3))(x / lengthscale, x / lengthscale)
        )


def test_sum_and_product_of_kernels_on_different_columns() -> None:
    x, z = points(4, 3), points(5, 3)
    space, time = Matern32(2, 0.8, active_dims=[0, 1]), RBF(1, lengthscale=0.3, active_dims=[2])
    cov_space, cov_time = fresh(space), fresh(time)
    total, product = space + time, space * time
    assert isinstance(total, Sum)
    assert isinstance(product, Product)
    assert (total.input_dim, total.active_dims) == (3, [0, 1, 2])
    torch.testing.assert_close(fresh(total)(x, z), cov_space(x, z) + cov_time(x, z))
    torch.testing.assert_close(fresh(product)(x, z), cov_space(x, z) * cov_time(x, z))
    torch.testing.assert_close(fresh(total).diag(x), cov_space.diag(x) + cov_time.diag(x))
    torch.testing.assert_close(fresh(product).diag(x), cov_space.diag(x) * cov_time.diag(x))


def test_whole_and_partial_inputs_combine() -> None:
    mixed = Linear(3) + RBF(1, active_dims=[2])
    assert (mixed.input_dim, mixed.active_dims) == (3, None)
    assert mixed(points(4, 3)).shape == (4, 4)


def test_vertical_scaling() -> None:
    x, z = points(2, 4, 1), points(2, 5, 1)
    inner = Matern52(1)
    want = x.exp() * fresh(inner)(x, z) * z.mT.exp()
    torch.testing.assert_close(fresh(VerticalScaling(inner, lambda x: x[..., 0].exp()))(x, z), want)


# ------------------------------------------------------------------------------------------------------- gradients


def smooth_kernels() -> list[Kernel]:
    ard = tensor(0.7, 1.4)
    one = torch.tensor(0.9, dtype=torch.float64)
    return [
        RBF(2, one, ard),
        Matern12(2, one, ard),
        Matern32(2, one, ard),
        Matern52(2, one, ard),
        RationalQuadratic(2, one, ard, one),
        Periodic(2, one, ard, 2 * ard),
        Constant(2, one),
        Linear(2, one),
        Matern52(2, one, ard) * Linear(2, one) + RBF(1, one, one, active_dims=[1]),
    ]


def leaves_of(kernel: Kernel) -> list[Tensor]:
    return [p.detach().clone().requires_grad_() for p in kernel.parameters()]


def with_leaves(kernel: Kernel, leaves: tuple[Tensor, ...]) -> Covariance:
    """Bind the kernel with its unconstrained parameters replaced by tensors that record gradients."""
    names = [name.replace("_unconstrained", "") for name, _ in kernel.named_parameters()]
    with poutine.substitute(data={name: leaf.exp() for name, leaf in zip(names, leaves, strict=True)}):
        return fresh(kernel)


@pytest.mark.parametrize("kernel", smooth_kernels(), ids=name_of)
def test_first_and_second_derivatives(kernel: Kernel) -> None:
    x, z = points(2, 2).requires_grad_(), points(2, 3, 2).requires_grad_()  # x broadcasts over the batch of z

    def block(x: Tensor, z: Tensor, *leaves: Tensor) -> Tensor:
        return with_leaves(kernel, leaves)(x, z)

    inputs = (x, z, *leaves_of(kernel))
    assert gradcheck(block, inputs)
    assert gradgradcheck(block, inputs)


@pytest.mark.parametrize("kernel", smooth_kernels(), ids=name_of)
def test_derivatives_of_a_block_with_itself(kernel: Kernel) -> None:
    def block(x: Tensor, *leaves: Tensor) -> Tensor:
        return with_leaves(kernel, leaves)(x, x)

    inputs = (points(3, 2).requires_grad_(), *leaves_of(kernel))
    assert gradcheck(block, inputs)
    assert gradgradcheck(block, inputs)


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 1, None), (None, None, 0), (0, 1, 0)])
@pytest.mark.parametrize("kernel", [k for k in smooth_kernels() if not isinstance(k, Constant)], ids=name_of)
def test_blocks_under_vmap(kernel: Kernel, mapped: tuple[int | None, ...]) -> None:
    """Values and gradients are those of one call after the other, whichever of x, z and parameters are mapped over."""
    x, z = points(3, 4, 2), points(5, 3, 6, 2)
    x, z = x if mapped[0] == 0 else x[0], z if mapped[1] == 1 else z[:, 0]  # (4, 2) and (5, 6, 2) each
    leaves = [torch.stack([leaf, leaf + 0.1, leaf - 0.2]) for leaf in leaves_of(kernel)]
    leaves = leaves if mapped[2] == 0 else [leaf[0] for leaf in leaves]
    inputs = [tensor.requires_grad_() for tensor in (x, z, *leaves)]
    in_dims = (*mapped[:2], *[mapped[2]] * len(leaves))

    def block(x: Tensor, z: Tensor, *leaves: Tensor) -> Tensor:
        return with_leaves(kernel, leaves)(x, z)

    def one(c: int) -> Tensor:
        pairs = zip(inputs, in_dims, strict=True)
        return block(*[y if dim is None else y.select(dim, c) for y, dim in pairs])

    weights = points(3, 5, 4, 6)
    together, apart = torch.func.vmap(block, in_dims)(*inputs), torch.stack([one(c) for c in range(3)])
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)
    pair = (torch.autograd.grad((weights * values).sum(), inputs) for values in (together, apart))
    for gradient, expected in zip(*pair, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cls", [RBF, Matern32, Matern52, RationalQuadratic, Periodic], ids=name_of)
def test_curvature_at_distance_zero(cls: type[Kernel]) -> None:
    """The second derivative of a smooth kernel at x = z is that of its Taylor series, not the 0 of a clamped root."""
    curvature = {RBF: -1.0, Matern32: -3.0, Matern52: -5 / 3, RationalQuadratic: -1.0, Periodic: -4 * math.pi**2}
    cov = fresh(cls(1))
    z = tensor(0.3)[:, None]
    hessian = torch.autograd.functional.hessian(lambda x: cov(z, x[:, None])[0, 0], tensor(0.3))
    assert hessian.item() == pytest.approx(curvature[cls], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", every_kernel(2), ids=name_of)
def test_gradients_are_finite_at_distance_zero(kernel: Kernel, dtype: torch.dtype) -> None:
    x = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    z = torch.ones(4, 2, dtype=dtype, requires_grad=True)
    cov = fresh(kernel)
    gradients = torch.autograd.grad(
        (x.sum() * z.sum() + cov(x, z).sum() + cov(x, x).sum()).square(), (x, z), create_graph=True
    )
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, z))
    assert all(g.isfinite().all() for g in (*gradients, *second))


def test_exponential_kernel_takes_the_zero_subgradient_between_equal_points() -> None:
    x = tensor(0.0, 1.0)[:, None].requires_grad_()
    Matern12(1)(x, tensor(0.0)[:, None]).sum().backward()
    torch.testing.assert_close(x.grad, tensor(0.0, -math.exp(-1))[:, None])


def test_only_the_wanted_gradients_are_computed() -> None:
    x, z = points(3, 2), points(4, 2).requires_grad_()
    variance, lengthscale = torch.tensor(2.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    kernel = RBF(2)
    del kernel.variance, kernel.lengthscale
    kernel.variance, kernel.lengthscale = variance, lengthscale
    calls: list[tuple[Tensor | None, ...]] = []
    block = kernel(x, z)
    block.grad_fn.register_hook(lambda grad_inputs, _: calls.append(grad_inputs))
    block.sum().backward()
    assert [g is not None for g in calls[0][:3]] == [False, True, False]


# -------------------------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("cls", STATIONARY, ids=name_of)
def test_close_points_far_from_the_origin_in_float32(cls: type[Kernel]) -> None:
    """Around 1e4, where float32 squares have a spacing of 8, blocks keep an accuracy of a few roundings."""
    offsets = torch.randint(-8, 9, (6, 2)) / 1024  # representable next to 1e4 in float32
    x = 1e4 + offsets
    kernel = cls(2, lengthscale=0.01)
    cov = fresh(kernel)
    exact = cov(x.double(), x.double())
    torch.testing.assert_close(cov(x, x), exact.float(), rtol=0.0, atol=2e-6)
    assert exact.min() < 0.9
    gradient, want = (
        (torch.autograd.grad(cov(v, v[:3]).sum(), v))[0]
        for v in (x.requires_grad_(), x.detach().double().requires_grad_())
    )
    torch.testing.assert_close(gradient, want.float(), rtol=1e-3, atol=1e-3 * want.abs().max().item())


@pytest.mark.parametrize("kernel", every_kernel(2), ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_blocks_follow_the_dtype_of_the_inputs(kernel: Kernel, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, dtype=dtype)
    for dtype_of_kernel in (torch.float32, torch.float64):
        cov = fresh(kernel.to(dtype_of_kernel))
        assert cov(x, x).dtype == cov.diag(x).dtype == dtype


# ---------------------------------------------------------------------------------------------------- Pyro effects


def test_parameters_default_to_one_and_are_pyro_params() -> None:
    kernel = RationalQuadratic(2)
    trace = poutine.trace(kernel).get_trace(points(3, 2))
    assert {n for n, s in trace.nodes.items() if s["type"] == "param"} == {"variance", "lengthscale", "scale_mixture"}
    assert kernel.variance == kernel.lengthscale == kernel.scale_mixture == 1
    assert Periodic(2).period == 1
    assert set(kernel.state_dict()) == {f"{n}_unconstrained" for n in ("variance", "lengthscale", "scale_mixture")}


def test_attributes_take_priors_parameters_and_tensors() -> None:
    x = points(3, 2)
    kernel = Matern52(2, variance=PyroParam(torch.tensor(0.2), constraints.unit_interval))
    kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    trace = poutine.trace(kernel).get_trace(x)
    assert trace.nodes["lengthscale"]["type"] == "sample"
    assert trace.nodes["variance"]["value"].item() == pytest.approx(0.2)
    drawn = trace.nodes["lengthscale"]["value"]
    torch.testing.assert_close(
        trace.nodes["_RETURN"]["value"], fresh(Matern52(2, 0.2, drawn))(x, x), rtol=1e-6, atol=0.0
    )
    kernel = Matern52(2)
    kernel.lengthscale = tensor(0.5, 0.6)
    torch.testing.assert_close(fresh(kernel)(x, x), fresh(Matern52(2, 1.0, tensor(0.5, 0.6)))(x, x))
    prior = RBF(2, lengthscale=PyroSample(dist.LogNormal(0.0, 1.0)))
    assert "lengthscale" in poutine.trace(prior).get_trace(x).stochastic_nodes


def test_bind_has_the_effects_and_the_covariance_none() -> None:
    kernel = RBF(2, lengthscale=PyroSample(dist.LogNormal(0.0, 1.0))) + Linear(2)
    with poutine.trace() as trace:
        cov = bind(kernel)
    assert {"kern0.lengthscale", "kern0.variance", "kern1.variance"} == set(trace.trace.nodes)
    x = points(3, 2)
    with poutine.trace() as trace:
        first, again = cov(x, x), cov(x, x)
        cov.diag(x)
    assert not trace.trace.nodes
    assert torch.equal(first, again)


def test_names_follow_the_owning_module() -> None:
    class Model(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = RBF(1, lengthscale=PyroSample(dist.LogNormal(0.0, 1.0)))

        def forward(self, x: Tensor) -> Tensor:
            return self.kernel(x) + self.kernel(x)  # one draw in one call

    trace = poutine.trace(Model()).get_trace(points(3, 1))
    assert trace.stochastic_nodes == ["kernel.lengthscale"]


def test_amplitude_networks_are_trained_along() -> None:
    kernel = VerticalScaling(RBF(2), torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(-2)))
    trace = poutine.trace(kernel).get_trace(torch.randn(3, 2))
    assert "vscaling_fn$$$0.weight" in trace.param_nodes


# ------------------------------------------------------------------------------------------- any callable, metrics


def test_any_callable_is_a_kernel() -> None:
    def cosine(x: Tensor, z: Tensor) -> Tensor:
        return (1 + x.square().sum(-1))[..., :, None] * (x[..., :, None, 0] - z[..., None, :, 0]).cos()

    cov = bind(cosine)
    x = points(2, 5, 2)
    torch.testing.assert_close(cov(x, x), cosine(x, x))
    torch.testing.assert_close(cov.diag(x), cosine(x, x).diagonal(dim1=-2, dim2=-1))
    assert bind(cov) is cov


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


# ---------------------------------------------------------------------------------------------------------- errors


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
        (lambda: RBF(2, lenghtscale=1.0), TypeError, r"unexpected keyword argument 'lenghtscale'"),
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


def test_a_prior_of_the_wrong_shape_is_an_error() -> None:
    kernel = RBF(2, lengthscale=PyroSample(dist.LogNormal(0.0, 1.0).expand([3]).to_event(1)))
    with pytest.raises(ValueError, match=r"RBF: expected lengthscale .* of shape \(2,\), got shape \(3,\)"):
        kernel(points(3, 2))


def test_callables_that_return_something_else_are_errors() -> None:
    x = points(3, 2)
    with pytest.raises(TypeError, match=r"bind: expected kernel\(x, z\) to be a torch.Tensor, got list"):
        bind(lambda x, z: [1.0])(x, x)
    with pytest.raises(ValueError, match=r"\(n, m\) = \(3, 3\), got \(3, 2\)"):
        bind(lambda x, z: x)(x, x)


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(NotImplementedError, match="Kernel: expected the kernel to define forward or bind"):
        Kernel(1)(points(3, 1))


def test_a_changed_block_is_noticed_by_autograd() -> None:
    block = RBF(1)(points(3, 1))
    with pytest.raises(RuntimeError, match="inplace operation"):
        block.diagonal().add_(1.0).sum().backward()


class Boxcar(Kernel):
    """A kernel that defines forward alone."""

    def __init__(self, variance=None, width=None):
        super().__init__(1)
        self.declare("variance", variance)
        self.declare("width", width)

    def forward(self, x, z):
        return self.variance * (1 - (x - z.mT).abs() / self.width).clamp(min=0)


def test_a_kernel_needs_forward_alone():
    kernel, x = Boxcar(2.0, torch.tensor(0.5)), torch.rand(6, 1)
    want = 2 * (1 - (x - x.mT).abs() / 0.5).clamp(min=0)
    torch.testing.assert_close(kernel(x, x), want)
    cov = (kernel + Matern52(1)).bind()
    torch.testing.assert_close(cov(x, x), want + Matern52(1)(x))
    torch.testing.assert_close(cov.diag(x), torch.full((6,), 3.0))
    cov(x, x).sum().backward()
    assert kernel.width_unconstrained.grad.abs() > 0


def test_a_bound_kernel_keeps_one_draw_of_its_priors():
    kernel, x = Boxcar(width=PyroSample(dist.LogNormal(0.0, 1.0))), torch.rand(6, 1)
    trace = pyro.poutine.trace(kernel.bind).get_trace()
    assert list(trace.stochastic_nodes) == ["width"]
    cov = trace.nodes["_RETURN"]["value"]
    torch.testing.assert_close(cov(x, x), (1 - (x - x.mT).abs() / trace.nodes["width"]["value"]).clamp(min=0))
    assert torch.equal(cov(x, x), cov(x, x))


def test_a_kernel_without_a_formula_says_so():
    with pytest.raises(NotImplementedError, match="expected the kernel to define forward or bind, got neither"):
        Kernel(1)(torch.rand(3, 1))
