"""FITC and VFE as distributions of y: draws averaged inside and outside the logarithm."""

import pytest
import torch
from builders import tensor

from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian
from pyro_nngp.likelihoods.integrated import OBJECTIVES, Expected, fitc

Y, LOC = tensor(0.3, -1.0, 2.0), torch.stack([tensor(0.1, 0.2, 0.3), tensor(-1.0, 0.5, 1.5)])
VAR = LOC.square() + 0.2


def test_one_draw_of_fitc_is_the_marginal():
    likelihood = Gaussian(0.5).bind()
    found = fitc(likelihood, LOC[:1], VAR[:1]).log_prob(Y)
    torch.testing.assert_close(found, torch.distributions.Normal(LOC[0], (VAR[0] + 0.5).sqrt()).log_prob(Y))


def test_fitc_averages_draws_inside_the_logarithm_and_vfe_outside():
    likelihood = Gaussian(0.5).bind()
    inside = torch.distributions.Normal(LOC, (VAR + 0.5).sqrt()).log_prob(Y).exp().mean(0).log()
    torch.testing.assert_close(OBJECTIVES["fitc"](likelihood, LOC, VAR).log_prob(Y), inside)
    outside = (torch.distributions.Normal(LOC, 0.5**0.5).log_prob(Y) - VAR / (2 * 0.5)).mean(0)
    torch.testing.assert_close(OBJECTIVES["vfe"](likelihood, LOC, VAR).log_prob(Y), outside)
    assert (outside < inside).all()  # Jensen


def test_draws_and_moments_of_vfe_are_those_of_y():
    likelihood = Gaussian(0.5).bind()
    one, two = Expected(likelihood, LOC, VAR), fitc(likelihood, LOC, VAR)
    torch.testing.assert_close(one.mean, two.mean)
    torch.testing.assert_close(one.variance, two.variance)
    draws = one.sample((20_000,))
    assert ((draws.mean(0) - two.mean).abs() < 6 * (two.variance / 20_000).sqrt()).all()


@pytest.mark.parametrize(("likelihood", "latents"), [(Bernoulli(), ()), (Categorical(3), (3,))])
def test_expanding_repeats_the_expectations(likelihood, latents):
    loc = torch.randn(2, *latents, 4, dtype=torch.float64)
    one = Expected(likelihood.bind(), loc, torch.ones_like(loc))
    wide = one.expand([5, 4])
    y = tensor(0.0, 1.0, 1.0, 0.0)
    assert wide.batch_shape == (5, 4)
    torch.testing.assert_close(wide.log_prob(y.expand(5, 4)), one.log_prob(y).expand(5, 4))
