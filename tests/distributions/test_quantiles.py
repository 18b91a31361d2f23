"""Quantiles and tail probabilities by formula and from draws."""

import pytest
import torch
from builders import tensor
from scipy import stats
from torch.distributions import Normal, Poisson

from pyro_nngp.distributions import Mixture
from pyro_nngp.distributions.quantiles import NUM_DRAWS, exceedance, quantiles

LEVELS = tensor(0.05, 0.5, 0.9)


def test_those_of_a_normal_distribution_are_exact():
    loc, scale = torch.randn(2, 4, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64) + 0.5
    found = quantiles(Normal(loc, scale), LEVELS)
    assert found.shape == (3, 2, 4)
    torch.testing.assert_close(found, torch.from_numpy(stats.norm.ppf(LEVELS[:, None, None], loc, scale)))
    above = exceedance(Normal(loc, scale), tensor(0.3, 2.0))
    torch.testing.assert_close(above[1], torch.from_numpy(stats.norm.sf(2.0, loc, scale)))


def test_the_tail_of_a_mixture_is_that_of_its_components():
    parts = [Normal(torch.tensor([0.0, 1.0]), 1.0), Normal(torch.tensor([2.0, 1.0]), 0.5)]
    expected = stats.norm.sf(1.5, [0, 1], 1) / 2 + stats.norm.sf(1.5, [2, 1], 0.5) / 2
    torch.testing.assert_close(exceedance(Mixture(parts), torch.tensor([1.5]))[0], torch.tensor(expected).float())


@pytest.mark.parametrize("rate", [0.7, 40.0])
def test_without_a_formula_they_come_from_draws(rate):
    counts = Poisson(torch.full((50,), rate, dtype=torch.float64))
    oracle = stats.poisson(rate)
    found = quantiles(counts, LEVELS)
    assert found.shape == (3, 50)
    for level, values in zip(LEVELS.tolist(), found, strict=True):
        error = 5 * (level * (1 - level) / NUM_DRAWS) ** 0.5
        assert oracle.ppf(level - error) <= values.min()
        assert values.max() <= oracle.ppf(level + error)
    above = exceedance(counts, tensor(1.0, 43.0))
    for threshold, shares in zip((1.0, 43.0), above, strict=True):
        assert shares.mean().item() == pytest.approx(oracle.sf(threshold), abs=4 * 0.5 / (NUM_DRAWS * 50) ** 0.5)


def test_no_levels_and_no_thresholds_give_none():
    counts, none = Poisson(torch.ones(4)), torch.empty(0)
    assert quantiles(counts, none).shape == exceedance(counts, none).shape == (0, 4)
