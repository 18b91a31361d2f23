"""Zero-inflated, zero-truncated and hurdle counts: against their definitions, exact draws, starts, errors."""

import math

import pyro.distributions as dist
import pytest
import torch
from builders import scalar, tensor
from oracles.likelihoods import dense_expected

from pyro_nngp.likelihoods import (
    BetaBinomial,
    Binomial,
    Gamma,
    Hurdle,
    Likelihood,
    Marginal,
    NegativeBinomial,
    Poisson,
    ZeroInflated,
    ZeroTruncated,
)

COUNTS = [Poisson(), Poisson("softplus"), NegativeBinomial(1.7), NegativeBinomial(0.05)]


@pytest.mark.parametrize("counts", [*COUNTS, Binomial(7), BetaBinomial(7, 2.0)])
def test_zero_inflation_by_definition(counts: Likelihood) -> None:
    f, y = scalar(0.4), torch.arange(8.0, dtype=torch.float64)
    p = counts(f).log_prob(y).exp()
    ours = ZeroInflated(counts, 0.3)(f)
    torch.testing.assert_close(ours.log_prob(y).exp(), 0.3 * (y == 0) + 0.7 * p, rtol=1e-6, atol=1e-7)
    numerical = Marginal(ZeroInflated(counts, 0.3).bind(), f, scalar(0.8)).log_prob(y)
    torch.testing.assert_close(ZeroInflated(counts, 0.3).marginal(f, scalar(0.8)).log_prob(y), numerical)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("f", [-6.0, 0.4, 3.0])
def test_truncation_and_hurdle_by_definition(counts: Likelihood, f: float) -> None:
    y = torch.arange(400.0, dtype=torch.float64)
    p = counts(scalar(f)).log_prob(y).exp()
    p[0] = 0
    p = p / -torch.expm1(counts(scalar(f)).log_prob(y[0]))
    positive, hurdle = ZeroTruncated(counts)(scalar(f)), Hurdle(counts, 0.3)(scalar(f))
    torch.testing.assert_close(positive.log_prob(y[1:]).exp(), p[1:])
    torch.testing.assert_close(hurdle.log_prob(y).exp(), 0.3 * (y == 0) + 0.7 * p, rtol=1e-6, atol=1e-7)
    if p.sum() > 1 - 1e-9:  # otherwise the tail is longer than the table
        for distribution, table in ((positive, p), (hurdle, 0.3 * (y == 0) + 0.7 * p)):
            mean = (table * y).sum()
            variance = (table * (y - mean).square()).sum()
            torch.testing.assert_close(distribution.mean.double(), mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(distribution.variance.double(), variance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("f", [-12.0, 0.4, 6.0])
def test_draws_of_truncated_counts(counts: Likelihood, f: float) -> None:
    """Shares of 1, 2, 3 - 5, .. against the probabilities, also where all but one count in 10^5 would be zero."""
    positive = ZeroTruncated(counts)(torch.full((20_000,), f, dtype=torch.float64))
    draws = positive.sample()
    assert draws.min() >= 1
    table = ZeroTruncated(counts)(scalar(f)).log_prob(torch.arange(1.0, 3000.0, dtype=torch.float64)).exp()
    for low, high in ((1, 1), (2, 2), (3, 5), (6, 30), (31, 400)):
        p = table[low - 1 : high].sum().item()
        share = ((draws >= low) & (draws <= high)).double().mean().item()
        assert abs(share - p) < 6 * math.sqrt(p * (1 - p) / len(draws)) + 1e-4


def test_expectations_of_small_gates() -> None:
    """The log density of a zero bends where the gate takes over."""
    for gate in (1e-6, 0.5):
        likelihood = ZeroInflated(Poisson(), gate)
        got = likelihood.expected_log_prob(scalar(0.0), scalar(1.0), scalar(2.0))
        assert got.item() == pytest.approx(dense_expected(likelihood, 0.0, 1.0, 2.0), rel=1e-4)


def test_starts_of_gates() -> None:
    zeros = dist.Bernoulli(0.4).sample((600, 9))
    counts = torch.poisson(torch.full_like(zeros, 2.0)) * (1 - zeros)
    start = ZeroInflated(Poisson()).start("gate", counts[:, 0], counts[:, 1:])
    assert start is not None
    assert 0.3 < start.item() < 0.55
    start = Hurdle(Poisson()).start("gate", counts[:, 0], counts[:, 1:])
    assert start is not None
    assert start.item() == pytest.approx((counts[:, 0] == 0).float().mean().item(), abs=0.01)
    assert ZeroInflated(NegativeBinomial()).start("other", counts[:, 0], counts[:, 1:]) is None


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ZeroInflated(Poisson(), 1.0), "ZeroInflated: expected gate to lie between 0 and 1"),
        (lambda: Hurdle(Poisson(), 0.0), "Hurdle: expected gate to lie between 0 and 1"),
        (
            lambda: ZeroTruncated(Poisson()).check(tensor(0.0)),
            r"ZeroTruncated: expected y to be counts 1, 2.*Hurdle\(\)",
        ),
        (lambda: Hurdle(Poisson()).check(tensor(-1.0)), "Hurdle: expected y to be counts 0, 1"),
    ],
)
def test_value_errors(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("wrapper", [ZeroInflated, ZeroTruncated, Hurdle])
def test_other_likelihoods_are_refused(wrapper: type[Likelihood]) -> None:
    with pytest.raises(
        TypeError, match=rf"{wrapper.__name__}: expected counts to be NegativeBinomial or Poisson.*Gamma"
    ):
        wrapper(Gamma())  # type: ignore[arg-type]


def test_zeros_are_observed_with_more_noise_than_the_counts_alone_have():
    y = tensor(0.0, 2.0, 5.0, 0.0)
    trials, each = torch.full_like(y, 5.0), (Binomial(), ZeroInflated(Binomial(), 0.3))
    counted, found = (part.bind().for_rows(trials=trials).observations(y) for part in each)
    assert torch.equal(found.obs, counted.obs)
    ratio = found.noise / counted.noise
    assert ratio[0] == ratio[3] > 1
    assert (ratio[1:3] == 1).all()
    assert ZeroInflated(Poisson(), 0.3).bind().observations(y) is None


def test_the_gate_starts_at_the_share_of_zeros_that_counts_do_not_explain():
    """Of eight rows five are zero, where counts of mean one are with probability 1 / e."""
    y, near = tensor(0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 3.0), torch.ones(8, 4, dtype=torch.float64)
    near[:, 0] = 0.0  # zeros among neighbors do not count
    chance = math.exp(-1)
    start = ZeroInflated(Poisson()).start("gate", y, near)
    torch.testing.assert_close(start, tensor((5 / 8 - chance) / (1 - chance))[0])
