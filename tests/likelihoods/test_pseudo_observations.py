"""Gaussian observations that replace data, against bisection."""

import pytest
import torch
from builders import scalar, tensor

from pyro_nngp.likelihoods import (
    Bernoulli,
    Categorical,
    Gamma,
    Gaussian,
    HeteroskedasticGaussian,
    LogNormal,
    Poisson,
    StudentT,
)
from pyro_nngp.likelihoods.pseudo_observations import pseudo_observations

Y = tensor(0.5, 3.0, 1.0, 8.0)


@pytest.mark.parametrize("likelihood", [Gaussian(), StudentT()])
def test_targets_with_an_identity_link_observe_themselves(likelihood):
    found = pseudo_observations(likelihood.bind(), Y)
    assert found.noise is None
    assert torch.equal(found.obs, Y)
    assert found.level == Y.median()


def test_logarithms_of_log_normal_targets_are_observations():
    found = pseudo_observations(LogNormal().bind(), Y)
    torch.testing.assert_close(found.obs, Y.log())
    assert found.level == Y.log().median()


def test_noise_of_the_heteroskedastic_normal_starts_at_its_robust_level():
    y = 3 + 0.2 * torch.randn(20_000, dtype=torch.float64)
    level = pseudo_observations(HeteroskedasticGaussian().bind(), y).level
    torch.testing.assert_close((level[1] / 2).exp(), scalar(0.2), rtol=0.03, atol=0)


def test_counts_are_observed_by_their_laplace_approximation():
    y = tensor(0, 1, 1, 4, 30)
    found = pseudo_observations(Poisson().bind(), y)
    torch.testing.assert_close(found.level, y.mean().log(), rtol=0, atol=1e-3)  # the best constant
    low, high = torch.full_like(y, -20.0), torch.full_like(y, 20.0)
    for _ in range(80):  # y - exp(f) = (f - level) / 4 falls in f
        middle = (low + high) / 2
        above = y - middle.exp() > (middle - found.level) / 4
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    precision = torch.maximum(low.exp(), (y - low.exp()).abs() / 6)
    torch.testing.assert_close(found.noise, 1 / precision, rtol=1e-3, atol=0)
    torch.testing.assert_close(found.obs, low + (y - low.exp()) / precision, rtol=1e-3, atol=1e-3)


def test_classes_start_at_their_log_frequencies():
    y = torch.tensor([0, 0, 0, 1, 2, 2])
    found = pseudo_observations(Categorical(3).bind(), y)
    want = (y.bincount().double() + 0.5).log()
    torch.testing.assert_close(found.level, want - want.mean())
    assert found.obs.shape == found.noise.shape == (3, 6)
    assert (found.obs.argmax(0) == y).all()


def test_the_level_of_many_values_is_found_from_some_of_them():
    y = torch.linspace(-1, 1, 3001, dtype=torch.float64).exp()
    found = pseudo_observations(Gamma(2.0).bind(), y)
    torch.testing.assert_close(found.level, y.mean().log(), rtol=0, atol=1e-3)
    assert found.obs.shape == y.shape


def test_data_that_no_finite_level_fits_best_start_at_one_that_fits_them_to_half_a_nat():
    y = torch.zeros(2, 1000, dtype=torch.float64)
    y[1] = 1.0
    low, high = pseudo_observations(Bernoulli().bind(), y).level
    assert low == pytest.approx(-high.item(), abs=1e-9)
    assert 1000 * low.exp().log1p() == pytest.approx(0.5, rel=0.1)
    level = pseudo_observations(Poisson().bind(), y[:1]).level
    assert 1000 * level.exp() == pytest.approx(0.5, rel=0.1)
