"""Auxiliary variables make likelihoods Gaussian, and integrate out again."""

import math

import pyro.distributions as dist
import pytest
import torch
from builders import AUGMENTED, tensor, waves

from pyro_nngp.likelihoods import Bernoulli, Binomial, Categorical, NegativeBinomial
from pyro_nngp.likelihoods.augmentation import AugmentedMarginal, auxiliary_prior, gaussian_observations, predictive
from pyro_nngp.likelihoods.polya_gamma import even_odds

F64 = torch.float64


N = 40


def test_polya_gamma_observations_are_the_likelihood():
    """Averaged over the prior of omega, the Gaussian observation times what the square leaves over is p(y | f)."""
    f = tensor(-1.5, 0.3, 2.0)
    for likelihood, y in [(Bernoulli(), 1.0), (Binomial(4), 3.0), (NegativeBinomial(2.5), 2.0)]:
        bound, targets = likelihood.double().bind(), torch.full_like(f, y)
        prior = auxiliary_prior(bound, targets, F64)
        nodes = torch.linspace(-9, 5, 3001, dtype=F64)[:, None].exp()
        weight = prior.log_prob(nodes).exp() * nodes * (14 / 3000)
        obs, noise = gaussian_observations(bound, targets, nodes.expand(-1, 3), F64)
        logit = obs - even_odds(bound, obs)
        kernel_of_f = (dist.Normal(f, noise.sqrt()).log_prob(obs) + noise.log() / 2 + logit.square() / noise / 2).exp()
        ratio = (weight * kernel_of_f).sum(0) / bound(f).log_prob(targets).exp()
        torch.testing.assert_close(ratio, ratio[:1].expand(3), rtol=1e-8, atol=0)


@pytest.mark.parametrize(("likelihood", "make"), AUGMENTED[:-1])
def test_own_auxiliary_variables_integrate_out(likelihood, make):
    """p(y, omega) over omega is p(y), so the objective is the leave-one-out density less a divergence."""
    _, f = waves(5)
    y, bound = make(f), likelihood().double().bind()
    loc, var = f * 0.7 + 0.3, torch.rand(5, dtype=F64) + 0.5
    t = torch.linspace(-14, 6, 4001, dtype=F64)[:, None]
    omega = t.exp().expand(-1, 5)
    log_prior = auxiliary_prior(bound, y, F64).log_prob(omega) + t + math.log(20 / 4000)
    density = AugmentedMarginal(bound, loc.expand(4001, 5), var.expand(4001, 5), omega).log_prob(y)
    found = torch.logsumexp(log_prior + density, 0)
    torch.testing.assert_close(found, predictive(bound, loc, var).log_prob(y), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("coupling", ["odds", "probabilities"])
def test_own_auxiliary_variables_of_classes(coupling):
    """The label's density, and for each class what its binary set gains over having omega integrated out."""
    loc, var, omega = torch.randn(3, 5, dtype=F64), torch.rand(3, 5, dtype=F64), torch.rand(3, 5, dtype=F64)
    y = torch.tensor([0, 2, 1, 1, 0])
    want = predictive(Categorical(3), loc, var, coupling).log_prob(y)
    for c in range(3):
        is_c = (y == c).to(F64)
        want = want + AugmentedMarginal(Bernoulli(), loc[c], var[c], omega[c]).log_prob(is_c)
        want = want - Bernoulli().marginal(loc[c], var[c]).log_prob(is_c)
    density = AugmentedMarginal(Categorical(3), loc, var, omega, coupling)
    torch.testing.assert_close(density.log_prob(y), want, rtol=1e-9, atol=1e-12)
    assert density.sample((7,)).shape == (7, 5)
