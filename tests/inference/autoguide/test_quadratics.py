"""Quadratic functions of observations, beside closed forms."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from oracles.observed_sites import F, Y, observed
from pyro import poutine

from pyro_nngp.inference.autoguide.observations import observed_sites
from pyro_nngp.inference.autoguide.quadratics import Marginals


@pytest.mark.parametrize(
    ("make", "gradient", "curvature"),
    [
        (lambda f: dist.Poisson(f.exp()), lambda f: Y - f.exp(), lambda f: f.exp()),
        (lambda f: dist.Normal(f, 0.5), lambda f: 4 * (Y - f), lambda f: torch.full_like(f, 4.0)),
        (
            lambda f: dist.Binomial(5, probs=f.sigmoid()),
            lambda f: Y - 5 * f.sigmoid(),
            lambda f: 5 * f.sigmoid() * (-f).sigmoid(),
        ),
    ],
)
def test_gradient_and_curvature_are_the_closed_forms(make, gradient, curvature):
    (site,) = observed(make)
    torch.testing.assert_close(site.phi.detach()[:, 0], F)
    torch.testing.assert_close(site.log_prob(site.phi.detach()), make(F).log_prob(Y))
    mean, scale = F[:, None] + 0.1, torch.full((3, 1, 1), 0.6, dtype=torch.float64)
    found = site.quadratic(Marginals(mean, scale))
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)[:, None]
    weights = (-grid.square() / 2).softmax(0)
    at = F + 0.1 + 0.6 * grid
    torch.testing.assert_close(found.gradient[:, 0], (weights * gradient(at)).sum(0), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.curvature[:, 0, 0], (weights * curvature(at)).sum(0), rtol=1e-6, atol=1e-8)
    expected = (weights * make(at).log_prob(Y)).sum(0)
    torch.testing.assert_close(site.expected_log_prob(Marginals(mean, scale)), expected, rtol=1e-6, atol=1e-8)
    replaced = (weights[..., None] * found.log_factor(0.6 * grid[..., None].expand(-1, 3, 1))[..., None]).sum(0)[:, 0]
    torch.testing.assert_close(replaced, expected, rtol=1e-6, atol=1e-8)  # its expectation is the same


def test_several_parameters_have_a_curvature_matrix():
    (site,) = observed(lambda f: dist.Normal(f, (0.5 * f).exp()))
    phi = site.phi.detach()
    torch.testing.assert_close(phi, torch.stack([F, 0.5 * F], -1))
    found = site.quadratic(Marginals(phi, torch.zeros(3, 2, 2, dtype=torch.float64)))
    residual = (Y - F) / (0.5 * F).exp()
    want = torch.stack([(-F).exp(), 2 * residual * (-0.5 * F).exp(), 2 * residual.square()], -1)
    root = found.root()
    torch.testing.assert_close(root.mT @ root, found.curvature)
    exact = torch.stack([want[:, 0], want[:, 1], want[:, 1], want[:, 2]], -1).reshape(-1, 2, 2)
    values, vectors = torch.linalg.eigh(exact)
    clamped = (vectors * values.clamp(min=1e-6)[:, None]) @ vectors.mT
    torch.testing.assert_close(found.curvature, clamped, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [2, 3, 4, 7])
def test_quadrature_has_the_moments_of_the_normal_distribution(k):
    """Expectations of squares of sums of k parameters, which depend on all entries of the covariance."""

    def program(leaf):
        phi = torch.stack([(1 + i) * leaf for i in range(k)], -1)
        pyro.sample("y", dist.Normal(phi, 1.0).to_event(1), obs=torch.zeros(3, k, dtype=torch.float64))
        pyro.sample("z", dist.MultivariateNormal(phi, torch.eye(k, dtype=torch.float64)), obs=torch.ones(3, k))

    leaf = F.clone().requires_grad_()
    _, site = observed_sites(poutine.trace(program).get_trace(leaf), [leaf], None)
    tril = torch.tril(torch.sin(torch.arange(3.0 * k * k, dtype=torch.float64)).reshape(3, k, k)) / 2
    found = site.expected_log_prob(Marginals(site.phi.detach(), tril))
    distance = (site.phi.detach() - 1).square().sum(-1) + (tril @ tril.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(found, -(distance + k * math.log(2 * math.pi)) / 2)
