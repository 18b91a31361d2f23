"""N(0, K) of a few values: its divergence and gradients beside torch's normal distribution."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_nngp.distributions.zero_mean_normal import ZeroMeanNormal

F64 = torch.float64


def problem(batch=(3,), size=4, latents=()):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(*batch, size, size + 2, generator=generator, dtype=F64)
    loc = torch.randn(*latents, *batch, size, generator=generator, dtype=F64)
    scale = torch.rand(*latents, *batch, size, generator=generator, dtype=F64) + 0.2
    return root @ root.mT, loc, scale


def dense(cov, jitter):
    system = cov + jitter * torch.diag_embed(cov.diagonal(dim1=-2, dim2=-1))
    return dist.MultivariateNormal(torch.zeros_like(cov[..., 0]), system)


@pytest.mark.parametrize("latents", [(), (2,)])
def test_divergences_and_densities_are_those_of_the_dense_distribution(latents):
    cov, loc, scale = problem(latents=latents)
    p, want = ZeroMeanNormal(cov, 0.1), dense(cov, 0.1)
    q = dist.Normal(loc, scale).to_event(1)
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(q, want), rtol=1e-10, atol=0)
    full = dist.MultivariateNormal(loc, scale_tril=torch.diag_embed(scale))
    torch.testing.assert_close(kl_divergence(full, p), kl_divergence(full, want), rtol=1e-10, atol=0)
    torch.testing.assert_close(p.log_prob(loc), want.log_prob(loc), rtol=1e-10, atol=0)
    torch.testing.assert_close(p.variance, want.variance)
    assert torch.equal(p.mean, torch.zeros(3, 4, dtype=F64))
    wider = p.expand([2, 3])
    assert wider.sample((5,)).shape == (5, 2, 3, 4)
    assert wider.log_prob(torch.zeros(4, dtype=F64)).shape == (2, 3)


@pytest.mark.parametrize("latents", [(), (2,)])
def test_gradients_of_both_orders(latents):
    cov, loc, scale = problem((2,), 3, latents)
    given = [value.requires_grad_() for value in (cov, loc, scale)]

    def divergence(cov, loc, scale):
        symmetric = (cov + cov.mT) / 2
        return kl_divergence(dist.Normal(loc, scale).to_event(1), ZeroMeanNormal(symmetric, 0.1))

    torch.autograd.gradcheck(divergence, given)
    torch.autograd.gradgradcheck(divergence, given)


def test_a_density_after_a_draw_keeps_its_gradient():
    cov, loc, _ = problem()
    cov.requires_grad_()
    (want,) = torch.autograd.grad(ZeroMeanNormal(cov, 0.1).log_prob(loc).sum(), cov)
    p = ZeroMeanNormal(cov, 0.1)
    p.sample()
    torch.testing.assert_close(torch.autograd.grad(p.log_prob(loc).sum(), cov)[0], want)


def test_divergence_from_other_distributions_is_left_to_draws():
    q = dist.Laplace(torch.zeros(4), torch.ones(4)).to_event(1)
    with pytest.raises(NotImplementedError, match=r"known for Normal\(...\).to_event\(1\) only"):
        kl_divergence(q, ZeroMeanNormal(torch.eye(4)))


def test_draws_have_the_covariance_and_malformed_values_are_refused():
    torch.manual_seed(0)
    cov = problem((), 3)[0]
    p = ZeroMeanNormal(cov, 0.5, validate_args=True)
    draws = p.sample((20_000,))
    wanted = dense(cov, 0.5).covariance_matrix
    deviation = (wanted.diagonal()[:, None] * wanted.diagonal() + wanted.square()).sqrt() / 20_000**0.5
    assert ((draws.T @ draws / 20_000 - wanted).abs() < 6 * deviation).all()
    with pytest.raises(ValueError, match=r"(?s)within the support"):
        p.log_prob(torch.full((3,), torch.nan, dtype=F64))
