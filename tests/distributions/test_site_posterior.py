"""A nearest-neighbor prior times Gaussian sites against dense matrices."""

import pytest
import torch
from builders import matern
from oracles.dense import dense_covariance, gaussian_kl
from torch.distributions import kl_divergence

from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.site_posterior import SitePosterior
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64


N, NOISE = 40, 0.1


@torch.no_grad()
def dense_posterior(seed=0):
    """A SitePosterior over all points at all neighbors, with its dense mean, covariance and prior precision."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(N, 2, dtype=F64, generator=generator)
    prior = NNGP(matern().requires_grad_(False), NeighborGraph(x, N - 1))
    target, precision = torch.randn(2, N, dtype=F64, generator=generator)
    precision = precision.exp()
    root = torch.linalg.cholesky(dense_covariance(matern(), x))
    inverse = torch.cholesky_inverse(root)
    cov = torch.linalg.inv(inverse + torch.diag(precision))
    mean = cov @ (precision * target)
    return SitePosterior(prior, target, precision, mean, cov.diagonal()), prior, mean, cov, inverse


@torch.no_grad()
def test_divergence_is_the_dense_one():
    q, prior, mean, cov, inverse = dense_posterior()
    torch.testing.assert_close(kl_divergence(q, prior), gaussian_kl(mean, cov, inverse), rtol=1e-9, atol=0)


@torch.no_grad()
def test_density_and_draws_are_the_dense_ones():
    q, _, mean, cov, _ = dense_posterior()
    dense = torch.distributions.MultivariateNormal(mean, (cov + cov.mT) / 2)
    values = dense.sample((5,))
    got = torch.stack([q.log_prob(value) for value in values])
    torch.testing.assert_close(got, dense.log_prob(values), rtol=1e-8, atol=0)
    count = 1000
    draws = q.sample((count,)) - mean
    assert ((draws.mean(0) / (cov.diagonal() / count).sqrt()).abs() < 6).all()
    error = ((cov**2 + cov.diagonal()[:, None] * cov.diagonal()) / count).sqrt()
    assert ((draws.mT @ draws / count - cov).abs() < 6 * error).all()


def test_draws_that_carry_gradients_are_of_the_marginals():
    q, *_ = dense_posterior()
    draws = q.rsample((2000,))
    assert ((draws.mean(0) - q.mean).abs() < 6 * (q.variance / 2000).sqrt()).all()
    assert ((draws.var(0) / q.variance - 1).abs() < 6 * (2 / 2000) ** 0.5).all()


def test_wrong_sites_are_refused():
    q, prior, *_ = dense_posterior()
    with pytest.raises(ValueError, match=r"SitePosterior: expected target, precision, loc, variance of one shape"):
        SitePosterior(prior, q.target, q.precision, q.loc[:-1], q.variance)
    part = NNGP(matern(), prior.graph, prior.graph.batch(torch.arange(4)))
    with pytest.raises(ValueError, match=r"kl_divergence: expected q and p on the same rows"):
        kl_divergence(q, NNGP(matern(), NeighborGraph(torch.rand(9, 2, dtype=F64), 3)))
    assert not part.is_whole
