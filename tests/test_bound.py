"""Hyperparameters as values: read once, and kept until anything that they depend on has changed."""

import copy

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian


def small(kernel=None):
    x = torch.rand(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return nngp.VNNGP(x, x.sum(-1).sin(), kernel or Matern32(2).double(), num_neighbors=4)


@torch.no_grad()
def test_values_are_read_again_when_anything_has_changed():
    gp = small()
    before = gp.bound()
    assert gp.bound() is before
    gp.likelihood.num_quadrature = 7  # no tensor
    assert gp.bound() is not before
    gp.kernel.variance = 2.0
    assert gp.bound().kernel.variance.item() == pytest.approx(2.0)
    gp.mean.assign(torch.full((1, 1), 3.0, dtype=torch.float64))
    assert gp.bound().mean(gp.x)[0].item() == 3.0
    gp.jitter = 1e-3
    assert gp.bound().jitter == 1e-3
    gp.kernel = Matern32(2, variance=5.0).double()
    assert gp.bound().kernel.variance.item() == pytest.approx(5.0)
    assert copy.deepcopy(gp).bound() is not gp.bound()


def test_values_with_gradients_are_those_of_each_call():
    gp = small()
    with torch.no_grad():
        gp.bound()
    assert gp.bound().kernel.variance.requires_grad
    assert gp.bound() is not gp.bound()


@torch.no_grad()
def test_predictions_at_draws_use_nothing_that_is_kept_for_the_medians():
    x = torch.rand(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = Matern32(2, 1.0, PyroSample(dist.LogNormal(torch.zeros((), dtype=torch.float64), 1.0)))
    gp = nngp.Vecchia(x, x.sum(-1).sin(), kernel.double(), Gaussian(0.1), num_neighbors=4, inducing=6)
    samples = {"kernel.lengthscale": torch.tensor([0.2, 2.0], dtype=torch.float64)}
    first = copy.deepcopy(gp)(x[:3] + 0.01, samples=samples)
    gp(x[:3] + 0.01)
    for one, other in zip(gp(x[:3] + 0.01, samples=samples), first, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_a_kernel_that_is_a_function_is_known_by_its_values():
    scale = torch.tensor(1.0, dtype=torch.float64)

    def cov(a, b):
        return (-(a[..., :, None, :] - b[..., None, :, :]).square().sum(-1) / scale).exp()

    gp = small(cov)
    before = gp.bound()
    assert gp.bound() is before
    scale.fill_(0.5)
    assert gp.bound() is not before
    point = gp.x[:1] + 0.01
    first = gp(point)[0]
    scale.fill_(0.05)
    assert not torch.equal(gp(point)[0], first)
