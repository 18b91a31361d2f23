"""Distributions of positive values against SciPy, against sums over a Poisson number, and against their draws."""

import math

import pytest
import scipy.stats
import torch
from builders import scalar, tensor
from torch import Tensor

from pyro_nngp.distributions import GeneralizedPareto, InverseGaussian, Tweedie

VALUES = tensor(1e-3, 0.2, 1.0, 5.0, 60.0)


def test_inverse_gaussian_equals_scipy() -> None:
    ours = InverseGaussian(scalar(2.5).log(), scalar(1.7))
    theirs = scipy.stats.invgauss(2.5 / 1.7, scale=1.7)
    torch.testing.assert_close(ours.log_prob(VALUES), torch.as_tensor(theirs.logpdf(VALUES.numpy())))
    assert (ours.mean.item(), ours.variance.item()) == pytest.approx((theirs.mean(), theirs.var()))


@pytest.mark.parametrize("concentration", [0.2, 0.7, 1.5])
def test_generalized_pareto_equals_scipy(concentration: float) -> None:
    ours = GeneralizedPareto(scalar(2.5).log(), scalar(concentration))
    theirs = scipy.stats.genpareto(concentration, scale=2.5)
    torch.testing.assert_close(ours.log_prob(VALUES), torch.as_tensor(theirs.logpdf(VALUES.numpy())))
    torch.testing.assert_close(ours.cdf(VALUES), torch.as_tensor(theirs.cdf(VALUES.numpy())))
    torch.testing.assert_close(ours.icdf(ours.cdf(VALUES)), VALUES)
    assert ours.mean.item() == pytest.approx(theirs.mean())
    assert ours.variance.item() == pytest.approx(theirs.var() if concentration < 0.5 else math.inf)


@pytest.mark.parametrize(
    ("mean", "dispersion", "power"),
    [(2.0, 0.8, 1.4), (0.05, 3.0, 1.6), (40.0, 0.5, 1.05), (1.0, 2.0, 1.95), (300.0, 0.3, 1.5)],
)
def test_tweedie_is_a_poisson_sum_of_gamma_variables(mean: float, dispersion: float, power: float) -> None:
    ours = Tweedie(scalar(mean).log(), scalar(dispersion), scalar(power))
    rate = mean ** (2 - power) / (dispersion * (2 - power))
    shape, scale = (2 - power) / (power - 1), dispersion * (power - 1) * mean ** (power - 1)
    number = torch.arange(1.0, 40 + 80 * rate, dtype=torch.float64)
    values = mean * VALUES
    parts = torch.distributions.Poisson(scalar(rate)).log_prob(number)
    parts = parts + torch.distributions.Gamma(number * shape, 1 / scale).log_prob(values[:, None])
    torch.testing.assert_close(ours.log_prob(values), parts.logsumexp(-1), rtol=1e-9, atol=1e-9)
    assert ours.log_prob(scalar(0.0)).item() == pytest.approx(-rate)
    assert ours.mean.item() == pytest.approx(rate * shape * scale)
    assert ours.variance.item() == pytest.approx(rate * shape * (1 + shape) * scale**2)


def test_tweedie_with_a_million_parts_is_all_but_normal() -> None:
    """More terms than the series sums one by one."""
    mean, dispersion = 1e3, 1e-3
    ours = Tweedie(scalar(mean).log(), scalar(dispersion), scalar(1.5))
    sd = ours.variance.sqrt()
    z = torch.linspace(-2, 2, 9, dtype=torch.float64)
    skew = dispersion**2 * 1.5 * mean**2 / sd.pow(3)  # the third cumulant is phi^2 p mu^(2p - 1)
    edgeworth = -z.square() / 2 - math.log(2 * math.pi) / 2 - sd.log() + torch.log1p(skew / 6 * (z**3 - 3 * z))
    torch.testing.assert_close(ours.log_prob(mean + sd * z), edgeworth, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    "distribution",
    [
        InverseGaussian(tensor(0.5, -8.0, 8.0), scalar(2.0)),
        GeneralizedPareto(tensor(0.5, -8.0, 8.0), scalar(0.2)),
        Tweedie(tensor(0.5, -1.0, 4.0), scalar(0.7), scalar(1.3)),
    ],
    ids=lambda d: type(d).__name__,
)
def test_draws_have_the_moments(distribution: torch.distributions.Distribution) -> None:
    draws = distribution.sample((40_000,))
    error = (distribution.variance / len(draws)).sqrt()
    assert ((draws.mean(0) - distribution.mean).abs() < 5 * error).all()
    clipped = draws.clamp(max=distribution.mean + 3 * distribution.variance.sqrt())
    assert (clipped.var(0) < 1.2 * distribution.variance).all()
    wide = distribution.expand((2, 3))
    torch.testing.assert_close(wide.log_prob(draws[:2]), distribution.log_prob(draws[:2]))
    assert wide.sample((4,)).shape == (4, 2, 3)


@pytest.mark.parametrize("power", [1.2, 1.8])
def test_gradients_of_the_tweedie_density(power: float) -> None:
    def log_prob(*arguments: Tensor) -> Tensor:
        return Tweedie(*arguments).log_prob(tensor(0.0, 0.3, 9.0))

    assert torch.autograd.gradcheck(log_prob, [t.requires_grad_() for t in tensor(0.4, 0.9, power).unbind()])


@pytest.mark.parametrize("make", [InverseGaussian, GeneralizedPareto], ids=lambda c: c.__name__)
def test_values_outside_the_support(make: type) -> None:
    with pytest.raises(ValueError, match="within the support"):
        make(scalar(0.0), scalar(1.0), validate_args=True).log_prob(scalar(-1.0))
    with pytest.raises(ValueError, match="concentration"):
        make(scalar(0.0), scalar(-1.0), validate_args=True)
