"""The protocol of kernels: hyperparameters, binding, names, columns, sums and products, what a user writes."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import normal, tensor
from oracles.kernels import PLAIN, name_of
from pyro import poutine
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from pyro_nngp.kernels import (
    RBF,
    Constant,
    Kernel,
    Linear,
    Matern32,
    Matern52,
    Periodic,
    Product,
    RationalQuadratic,
    Sum,
    bind,
)


@pytest.mark.parametrize("cls", PLAIN, ids=name_of)
def test_active_dims_pick_columns(cls: type[Kernel]) -> None:
    x, z = normal(5, 4), normal(6, 4)
    block = bind(cls(2, active_dims=[3, 1]))(x, z)
    torch.testing.assert_close(block, bind(cls(2))(x[:, [3, 1]], z[:, [3, 1]]), rtol=1e-14, atol=0.0)


def test_sum_and_product_of_kernels_on_different_columns() -> None:
    x, z = normal(4, 3), normal(5, 3)
    space, time = Matern32(2, 0.8, active_dims=[0, 1]), RBF(1, lengthscale=0.3, active_dims=[2])
    cov_space, cov_time = bind(space), bind(time)
    total, product = space + time, space * time
    assert isinstance(total, Sum)
    assert isinstance(product, Product)
    assert (total.input_dim, total.active_dims) == (3, [0, 1, 2])
    torch.testing.assert_close(bind(total)(x, z), cov_space(x, z) + cov_time(x, z))
    torch.testing.assert_close(bind(product)(x, z), cov_space(x, z) * cov_time(x, z))
    torch.testing.assert_close(bind(total).diag(x), cov_space.diag(x) + cov_time.diag(x))
    torch.testing.assert_close(bind(product).diag(x), cov_space.diag(x) * cov_time.diag(x))


def test_whole_and_partial_inputs_combine() -> None:
    mixed = Linear(3) + RBF(1, active_dims=[2])
    assert (mixed.input_dim, mixed.active_dims) == (3, None)
    assert mixed(normal(4, 3)).shape == (4, 4)


def test_parameters_default_to_one_and_are_pyro_params() -> None:
    kernel = RationalQuadratic(2)
    trace = poutine.trace(kernel).get_trace(normal(3, 2))
    assert {n for n, s in trace.nodes.items() if s["type"] == "param"} == {"variance", "lengthscale", "scale_mixture"}
    assert kernel.variance == kernel.lengthscale == kernel.scale_mixture == 1
    assert Periodic(2).period == 1
    assert set(kernel.state_dict()) == {f"{n}_unconstrained" for n in ("variance", "lengthscale", "scale_mixture")}


def test_attributes_take_priors_parameters_and_tensors() -> None:
    x = normal(3, 2)
    kernel = Matern52(2, variance=PyroParam(torch.tensor(0.2), constraints.unit_interval))
    kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    trace = poutine.trace(kernel).get_trace(x)
    assert trace.nodes["lengthscale"]["type"] == "sample"
    assert trace.nodes["variance"]["value"].item() == pytest.approx(0.2)
    drawn = trace.nodes["lengthscale"]["value"]
    torch.testing.assert_close(
        trace.nodes["_RETURN"]["value"], bind(Matern52(2, 0.2, drawn))(x, x), rtol=1e-6, atol=0.0
    )
    kernel = Matern52(2)
    kernel.lengthscale = tensor(0.5, 0.6)
    torch.testing.assert_close(bind(kernel)(x, x), bind(Matern52(2, 1.0, tensor(0.5, 0.6)))(x, x))
    prior = RBF(2, lengthscale=PyroSample(dist.LogNormal(0.0, 1.0)))
    assert "lengthscale" in poutine.trace(prior).get_trace(x).stochastic_nodes


def test_bind_has_the_effects_and_the_covariance_none() -> None:
    kernel = RBF(2, lengthscale=PyroSample(dist.LogNormal(0.0, 1.0))) + Linear(2)
    with poutine.trace() as trace:
        cov = bind(kernel)
    assert {"kern0.lengthscale", "kern0.variance", "kern1.variance"} == set(trace.trace.nodes)
    x = normal(3, 2)
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

    trace = poutine.trace(Model()).get_trace(normal(3, 1))
    assert trace.stochastic_nodes == ["kernel.lengthscale"]


def test_any_callable_is_a_kernel() -> None:
    def cosine(x: Tensor, z: Tensor) -> Tensor:
        return (1 + x.square().sum(-1))[..., :, None] * (x[..., :, None, 0] - z[..., None, :, 0]).cos()

    cov = bind(cosine)
    x = normal(2, 5, 2)
    torch.testing.assert_close(cov(x, x), cosine(x, x))
    torch.testing.assert_close(cov.diag(x), cosine(x, x).diagonal(dim1=-2, dim2=-1))
    assert bind(cov) is cov


def test_a_prior_of_the_wrong_shape_is_an_error() -> None:
    kernel = RBF(2, lengthscale=PyroSample(dist.LogNormal(0.0, 1.0).expand([3]).to_event(1)))
    with pytest.raises(ValueError, match=r"RBF: expected lengthscale .* of shape \(2,\), got shape \(3,\)"):
        kernel(normal(3, 2))


def test_callables_that_return_something_else_are_errors() -> None:
    x = normal(3, 2)
    with pytest.raises(TypeError, match=r"bind: expected kernel\(x, z\) to be a torch.Tensor, got list"):
        bind(lambda x, z: [1.0])(x, x)
    with pytest.raises(ValueError, match=r"\(n, m\) = \(3, 3\), got \(3, 2\)"):
        bind(lambda x, z: x)(x, x)


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(NotImplementedError, match="Kernel: expected the kernel to define forward or bind, got neither"):
        Kernel(1)(normal(3, 1))


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


@pytest.mark.parametrize("kernel", [RBF, Matern52, Periodic, Constant])
def test_unknown_keywords_are_named_beside_the_known_ones(kernel: type[Kernel]) -> None:
    expected = (
        rf"^{kernel.__name__}: expected keywords among input_dim, .*active_dims.*, got length_scale\. .*lengthscale"
    )
    with pytest.raises(TypeError, match=expected):
        kernel(2, length_scale=1.0)


def test_constructors_with_free_keywords_take_them() -> None:
    class Own(RBF):
        def __init__(self, input_dim: int, **settings: float) -> None:
            super().__init__(input_dim, lengthscale=settings["reach"])

    assert float(copy.deepcopy(Own(2, reach=3.0)).lengthscale.detach()) == 3.0
