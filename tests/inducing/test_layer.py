"""Layers of sparse processes against dense conditionals at given inducing values."""

import pyro
import pytest
import torch
from pyro.nn import PyroModule

from pyro_nngp.inducing.layer import SparseLayer, leading_axes, stacked_layers
from pyro_nngp.kernels import Matern52

F64 = torch.float64
JITTER = 1e-8


def kernel(dim=2):
    return Matern52(dim, variance=1.5, lengthscale=0.6).double().requires_grad_(False)


def conditional(k, x, z, u):
    """Mean and covariance of f(x) given f(z) = u."""
    cov = k.bind()
    gain = torch.linalg.solve(cov(z, z) + JITTER * cov.diag(z).diag(), cov(z, x)).mT
    return u @ gain.mT, cov(x, x) - gain @ cov(z, x)


class Joint(PyroModule):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer.joint(x, 1)[0]


@pytest.fixture
def problem():
    x, z = torch.rand(5, 2, dtype=F64), torch.rand(4, 2, dtype=F64)
    return x, z, kernel()


@pytest.mark.parametrize("outputs", [(), (3,)])
def test_moments_and_joint_draws_are_those_of_the_dense_conditional(problem, outputs):
    x, z, k = problem
    layer = SparseLayer(k, z, outputs, None, None, JITTER)
    nu = torch.randn(*outputs, 4, dtype=F64)
    given = pyro.condition(layer, {"nu": nu})
    tril = torch.linalg.cholesky(k.bind()(z, z) + JITTER * k.bind().diag(z).diag())
    mean, cov = conditional(k, x, z, nu @ tril.mT)
    loc, var = given(x)
    torch.testing.assert_close(loc, mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(var, cov.diagonal().expand(mean.shape), rtol=1e-5, atol=1e-6)


def test_joint_draws_are_correlated_as_the_process_is(problem):
    x, z, k = problem
    layer, nu = SparseLayer(k, z, (4000,), None, None, JITTER), torch.randn(4, dtype=F64).expand(4000, 4)
    draws = pyro.condition(Joint(layer), {"layer.nu": nu})(x).detach()
    tril = torch.linalg.cholesky(k.bind()(z, z) + JITTER * k.bind().diag(z).diag())
    mean, cov = conditional(k, x, z, nu[0] @ tril.mT)
    error = ((cov.diag()[:, None] * cov.diag() + cov.square()) / 4000).sqrt()
    assert ((draws.mean(0) - mean).abs() < 6 * (cov.diag() / 4000).sqrt()).all()
    assert ((torch.cov(draws.mT) - cov).abs() < 6 * error).all()


def test_hidden_layers_add_the_linear_map_and_scaled_noise(problem):
    x, z, k = problem
    skip = torch.randn(2, 3, dtype=F64)
    layer = SparseLayer(k, z, (3,), None, skip, JITTER)
    noise, nu = torch.randn(1, 5, 3, dtype=F64), torch.randn(3, 4, dtype=F64)
    given = pyro.condition(lambda: (layer.hidden(x[None], noise), *layer(x[None])), {"nu": nu})
    found, loc, var = given()
    torch.testing.assert_close(found, x @ skip + loc.mT + var.mT.sqrt() * noise)


def test_stacked_layers_start_at_the_images_of_the_inducing_inputs(problem):
    _, z, k = problem
    axes = torch.randn(2, 3, dtype=F64)
    first, second, last = stacked_layers([k, kernel(3), kernel(3)], z, axes, (2,), None, JITTER)
    assert torch.equal(first.start, z)
    assert torch.equal(second.start, z @ axes)
    assert torch.equal(last.start, z @ axes)
    assert (first.outputs, second.outputs, last.outputs) == ((3,), (3,), (2,))
    assert torch.equal(first.skip, axes)
    assert last.skip is None


def test_leading_axes_are_principal_ones_or_a_padded_identity():
    x = torch.randn(200, 3, dtype=F64) * torch.tensor([0.1, 5.0, 1.0], dtype=F64)
    axes = leading_axes(x, 2)
    torch.testing.assert_close(axes.mT @ axes, torch.eye(2, dtype=F64))
    assert axes[1, 0].abs() > 0.99
    assert axes[2, 1].abs() > 0.99
    assert torch.equal(leading_axes(x, 4), torch.eye(3, 4, dtype=F64))
