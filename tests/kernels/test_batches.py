"""Kernels with batches of hyperparameters, against one kernel after the other."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import tensor
from pyro.nn import PyroParam, PyroSample
from torch.distributions import constraints

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
    VerticalScaling,
)

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X, Z = (torch.randn(4, n, 2, dtype=F64, generator=GENERATOR) for n in (3, 5))


class Cosine(Kernel):
    """A kernel of a user's, written as `forward`."""

    def __init__(self, input_dim, variance, period):
        super().__init__(input_dim)
        self.declare("variance", variance)
        self.declare("period", period, input_dim)

    def forward(self, x, z):
        shift = (x[..., :, None, :] - z[..., None, :, :]) / self.period
        return self.variance * shift.cos().mean(-1)


STATIONARY = {RBF: {}, Matern12: {}, Matern32: {}, Matern52: {}, RationalQuadratic: {"scale_mixture": 1}}
STATIONARY |= {Periodic: {"period": 2}}
SIZES = {"variance": 1, "lengthscale": 2}
KERNELS = {
    **{kind.__name__: (kind, SIZES | more) for kind, more in STATIONARY.items()},
    "Constant": (Constant, {"variance": 1}),
    "Linear": (Linear, {"variance": 1}),
    "Cosine": (Cosine, {"variance": 1, "period": 2}),
    "Sum": (lambda d, **values: Matern32(d, **values) + Linear(d, values["variance"]), SIZES),
    "Product": (lambda d, **values: Periodic(d, **values) * RBF(d, **values), SIZES),
    "VerticalScaling": (lambda d, **v: VerticalScaling(Matern52(d, **v), lambda x: 1 + x[..., 0].square()), SIZES),
}


def values_of(sizes, batch, columns=True):
    """One random value for each hyperparameter, with a gradient; scalars for all columns unless `columns`."""
    shapes = {arg: (*batch, size) if size > 1 and columns else batch for arg, size in sizes.items()}
    return {arg: (0.5 + torch.rand(shape, dtype=F64)).requires_grad_() for arg, shape in shapes.items()}


def chosen(values, sizes, batch, index):
    """The values of one set of a batch."""
    found = {}
    for arg, value in values.items():
        own = value.shape[-1:] if sizes[arg] > 1 and value.dim() > len(batch) else ()
        found[arg] = value.expand(*batch, *own)[index]
    return found


@pytest.mark.parametrize("batch", [pytest.param((3,), marks=pytest.mark.slow), (3, 1), (2, 3)])
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_a_batch_is_a_loop(name, columns, batch):
    build, sizes = KERNELS[name]
    values = values_of(sizes, batch, columns)
    kernel, every = build(2, **values).bind(), list(itertools.product(*map(range, batch)))
    assert kernel.batch_shape == batch
    for x, z in ((X, Z), (X[0], Z[0]), (X, X), (X[0], Z)):
        found, weights = kernel(x, z), torch.randn(*batch, *torch.broadcast_tensors(X, Z[:, :3])[0].shape[:1], 1, 1)
        weights = weights.double() if found.dim() == len(batch) + 3 else weights[..., 0, :, :].double()
        ones = [build(2, **chosen(values, sizes, batch, index)) for index in every]
        looped = torch.stack([one(x, z) for one in ones]).unflatten(0, batch)
        torch.testing.assert_close(found, looped, rtol=1e-12, atol=1e-13)
        variances = torch.stack([one.bind().diag(x) for one in ones]).unflatten(0, batch)
        torch.testing.assert_close(kernel.diag(x), variances, rtol=1e-12, atol=1e-13)
        used = list(values.values())
        grads = [
            torch.autograd.grad((value * weights).sum(), used, materialize_grads=True) for value in (found, looped)
        ]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_vmap_over_values_is_a_batch(name):
    build, sizes = KERNELS[name]
    values = {arg: value.detach() for arg, value in values_of(sizes, (3,)).items()}
    mapped = torch.func.vmap(lambda values: build(2, **values)(X, Z))(values)
    torch.testing.assert_close(mapped, build(2, **{a: v.requires_grad_() for a, v in values.items()}).bind()(X, Z))


def test_vmap_over_batches():
    values = {arg: value.detach() for arg, value in values_of(SIZES, (3,)).items()}
    lengthscale, variance = values["lengthscale"].requires_grad_(), values["variance"].requires_grad_()
    mapped = torch.func.vmap(lambda variance: Matern32(2, variance, lengthscale)(X, Z))(variance)
    assert mapped.shape == (3, 3, 4, 3, 5)
    torch.testing.assert_close(mapped[1, 2], Matern32(2, variance[1], lengthscale[2])(X, Z))
    inner = torch.func.vmap(lambda lengthscale: Matern32(2, variance, lengthscale)(X, Z))(lengthscale)
    torch.testing.assert_close(inner.movedim(0, 1), mapped)


def test_batches_of_parts_broadcast_from_the_right():
    short, long = torch.tensor([[0.3], [0.5]], dtype=F64), tensor(1.0, 2.0, 3.0)
    kernel = Matern32(2, variance=PyroParam(long, constraints.positive), lengthscale=PyroParam(short))
    block = kernel(X, Z)
    assert block.shape == (2, 3, 4, 3, 5)
    assert kernel.bind().batch_shape == (2, 3)
    torch.testing.assert_close(block[1, 2], Matern32(2, long[2], short[1, 0])(X, Z))
    both = kernel + Constant(2, PyroParam(torch.rand(4, 1, 1, dtype=F64)))
    assert both.bind().batch_shape == (4, 2, 3)
    assert both(X, Z).shape == (4, 2, 3, 4, 3, 5)


def test_second_derivatives_of_a_batch():
    def block(lengthscale, variance):
        return Matern52(2, variance, lengthscale)(X[0, :2], Z[0, :2])

    lengthscale, variance = values_of({"lengthscale": 2, "variance": 1}, (2,)).values()
    assert torch.autograd.gradcheck(block, (lengthscale, variance))
    assert torch.autograd.gradgradcheck(block, (lengthscale, variance))


def test_the_value_of_a_site_keeps_its_gradient():
    """It used to become a parameter's start, which silently cut the gradient."""
    value = torch.tensor(0.4, dtype=F64, requires_grad=True)
    kernel = Matern32(2, lengthscale=value * 1)
    assert not list(kernel.named_parameters())[1:]
    (grad,) = torch.autograd.grad(kernel(X, Z).sum(), value)
    assert grad.abs() > 0.1


def prior(*shape):
    return PyroSample(dist.LogNormal(torch.zeros(shape, dtype=F64), 1.0).to_event(len(shape)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("nesting", [0, 1, 2])
@pytest.mark.parametrize("own", [(), (1,), (2,)])
def test_priors_in_vectorized_plates(size, nesting, own):
    """As many draws as columns are draws all the same, since the prior's own shape is known."""

    def program():
        return Matern32(2, variance=prior(), lengthscale=prior(*own)).bind()

    with pyro.plate("particles", size, dim=-nesting - 1):
        trace = pyro.poutine.trace(program).get_trace()
    cov = trace.nodes["_RETURN"]["value"]
    assert cov.batch_shape == (size, *[1] * nesting)
    block = cov(X, Z)
    variance, lengthscale = (
        trace.nodes[name]["value"].reshape(size, *own) for name, own in (("variance", ()), ("lengthscale", own))
    )
    want = torch.stack([Matern32(2, v, s)(X, Z) for v, s in zip(variance, lengthscale, strict=True)])
    torch.testing.assert_close(block, want.reshape(size, *[1] * nesting, *want.shape[1:]).detach())


def test_draws_of_a_vector_in_front_of_a_plate():
    """Predictive(parallel=True) leaves out the dimensions of the plates in between."""
    draws = torch.rand(3, 2, dtype=F64)
    with pyro.plate("draws", 3, dim=-2), pyro.condition(data={"lengthscale": draws, "variance": draws[:, :1]}):
        cov = Matern32(2, variance=prior(), lengthscale=prior(2)).bind()
    assert cov.batch_shape == (3, 1)
    torch.testing.assert_close(cov(X, Z)[1, 0], Matern32(2, draws[1, 0], draws[1])(X, Z).detach())


def test_leading_dimensions_of_one_are_none():
    kernel = Matern32(2, lengthscale=PyroParam(torch.tensor([[[0.3, 0.4]]], dtype=F64)))
    assert kernel.bind().batch_shape == ()
    assert torch.equal(kernel(X, Z), Matern32(2, lengthscale=tensor(0.3, 0.4))(X, Z))


def test_initial_values_of_parameters_have_no_batch_dimensions():
    for shape in ((3,), (4, 2)):
        with pytest.raises(ValueError, match=r"expected lengthscale to be a scalar or of shape \(2,\), got shape"):
            Matern32(2, lengthscale=torch.ones(shape))
    with pytest.raises(ValueError, match=r"Matern32: expected variance to be a scalar, got shape \(3,\)\. Batch dim"):
        Matern32(2, variance=torch.ones(3))
