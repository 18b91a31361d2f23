"""Likelihoods of counts: masses and moments by hand, and the size that a negative binomial starts with."""

import math
from typing import Any

import pytest
import torch
from builders import tensor
from torch.distributions import Beta

from pyro_nngp.likelihoods import Bernoulli, Binomial, Gamma, Likelihood, NegativeBinomial, Ordinal, Poisson, StudentT
from pyro_nngp.likelihoods.counts import predictive_log_density

F64 = torch.float64
CUTS = torch.tensor([-1.0, 0.2, 1.5])


@pytest.mark.parametrize(
    ("likelihood", "values"),
    [
        (Gamma(2.5), torch.linspace(1e-3, 80, 20_001, dtype=F64)),
        (StudentT(5.0, 0.5), torch.linspace(-80, 80, 20_001, dtype=F64)),
        (Bernoulli(), range(2)),
        (Binomial(7), range(8)),
        (Poisson(), range(400)),
        (NegativeBinomial(1.7), range(2000)),
        (Ordinal(CUTS), range(4)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Likelihood) else "",
)
def test_marginals_sum_to_one_with_the_stated_moments(likelihood: Likelihood, values: Any) -> None:
    y = torch.as_tensor(values, dtype=torch.float64)
    marginal = likelihood.marginal(tensor(0.3), tensor(0.4))
    probabilities = marginal.log_prob(y).exp() * (y[1] - y[0])
    tolerance = 1.0 if isinstance(values, range) else 10.0
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-6 * tolerance)
    mean = (probabilities * y).sum()
    assert marginal.mean.item() == pytest.approx(mean.item(), rel=1e-5 * tolerance)
    assert marginal.variance.item() == pytest.approx(
        (probabilities * (y - mean) ** 2).sum().item(), rel=2e-5 * tolerance**2
    )


def test_negative_binomial_mean_and_variance() -> None:
    conditional = NegativeBinomial(2.5)(tensor(0.7))
    mean = math.exp(0.7)
    assert conditional.mean.item() == pytest.approx(mean)
    assert conditional.variance.item() == pytest.approx(mean + mean**2 / 2.5)


def test_many_events_at_once_are_the_poisson_limit() -> None:
    y, f = tensor(0.0, 3.0, 40.0), tensor(0.2, 1.0, 3.5)
    torch.testing.assert_close(NegativeBinomial(1e8)(f).log_prob(y), Poisson()(f).log_prob(y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0.5, 4.0])
def test_the_size_of_counts_whose_rates_span_orders_of_magnitude(size):
    """Moments, which see the few largest counts alone, are off by factors of 5 and 10 here."""
    torch.manual_seed(0)
    f = 3 + 3 * torch.randn(512, 1, dtype=F64)
    counts = NegativeBinomial(size).bind()(f.expand(512, 9)).sample()
    found = NegativeBinomial().start("total_count", counts[:, 0], counts[:, 1:])
    assert abs(math.log(found / size)) < 0.25


def test_the_predictive_density_is_the_compound_one():
    """The density of a count given two neighbors, against integration over p."""
    size, counts = 1.7, tensor(3.0, 1.0, 6.0)
    p = (torch.arange(200_000, dtype=F64) + 0.5) / 200_000
    densities = NegativeBinomial(size).bind()(torch.logit(p) + math.log(size)).log_prob(counts[:, None])
    prior = Beta(0.5, 1.0).log_prob(p)  # of the weight of a further count
    joint = (densities.sum(0) + prior).exp().mean().log()
    want = joint - (densities[1:].sum(0) + prior).exp().mean().log()
    got = predictive_log_density(counts[:1], counts[None, 1:], torch.tensor([[size]], dtype=F64))
    torch.testing.assert_close(got, want[None, None], rtol=1e-4, atol=0)


def test_empirical_logits_are_observations_where_trials_differ():
    y, trials = tensor(0.0, 2.0, 5.0), tensor(3.0, 4.0, 5.0)
    found = Binomial().bind().for_rows(None, trials, None).observations(y)
    torch.testing.assert_close(found.obs, ((y + 0.5) / (trials - y + 0.5)).log())
    torch.testing.assert_close(found.noise, 1 / (y + 0.5) + 1 / (trials - y + 0.5))
    assert Binomial(5).bind().observations(y) is None
