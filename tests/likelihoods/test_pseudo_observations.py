"""Shapes that counts start with, against the truth."""

import math

import pytest
import torch
from torch.distributions import Beta

from pyro_nngp.likelihoods import NegativeBinomial
from pyro_nngp.likelihoods.pseudo_observations import predictive_log_density, start_shape

F64 = torch.float64


@pytest.mark.parametrize("size", [0.5, 4.0])
def test_the_size_of_counts_whose_rates_span_orders_of_magnitude(size):
    """Moments, which see the few largest counts alone, are off by factors of 5 and 10 here."""
    torch.manual_seed(0)
    f = 3 + 3 * torch.randn(512, 1, dtype=F64)
    counts = NegativeBinomial(size).bind()(f.expand(512, 9)).sample()
    found = start_shape(NegativeBinomial(), "total_count", counts[:, 0], counts[:, 1:])
    assert abs(math.log(found / size)) < 0.25


def test_the_predictive_density_is_the_compound_one():
    """The density of a count given two neighbors, against integration over p."""
    size, counts = 1.7, torch.tensor([3.0, 1.0, 6.0], dtype=F64)
    p = (torch.arange(200_000, dtype=F64) + 0.5) / 200_000
    densities = NegativeBinomial(size).bind()(torch.logit(p)).log_prob(counts[:, None])
    prior = Beta(0.5, 1.0).log_prob(p)  # of the weight of a further count
    joint = (densities.sum(0) + prior).exp().mean().log()
    want = joint - (densities[1:].sum(0) + prior).exp().mean().log()
    got = predictive_log_density(counts[:1], counts[None, 1:], torch.tensor([[size]], dtype=F64))
    torch.testing.assert_close(got, want[None, None], rtol=1e-4, atol=0)
