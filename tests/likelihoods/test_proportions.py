"""Likelihoods of shares: moments, the binomial limit, starts from data, errors."""

import pytest
import torch
from builders import tensor

from pyro_nngp.likelihoods import Beta, BetaBinomial, Binomial


def test_moments() -> None:
    f = tensor(-2.0, 0.0, 1.0)
    mean = f.sigmoid()
    torch.testing.assert_close(Beta(4.0)(f).mean, mean)
    torch.testing.assert_close(Beta(4.0)(f).variance, mean * (1 - mean) / 5)
    counts = BetaBinomial(7, 4.0)(f)
    torch.testing.assert_close(counts.mean, 7 * mean)
    torch.testing.assert_close(counts.variance, 7 * mean * (1 - mean) * (1 + 6 / 5))


def test_empirical_logits_are_as_noisy_as_the_counts() -> None:
    y, trials = tensor(0.0, 2.0, 5.0), tensor(3.0, 4.0, 5.0)
    more, plain = (
        kind.bind().for_rows(trials=trials).observations(y) for kind in (BetaBinomial(None, 4.0), Binomial())
    )
    torch.testing.assert_close(more.noise / plain.noise, 1 + (trials - 1) / 5)
    assert torch.equal(more.obs, plain.obs)


def test_binomial_is_the_limit() -> None:
    loc, var, y = tensor(-2.0, 0.0, 1.0), tensor(0.5, 1.0, 2.0), tensor(0.0, 3.0, 7.0)
    for ours, theirs in (
        (BetaBinomial(7, 1e7).marginal(loc, var), Binomial(7).marginal(loc, var)),
        (BetaBinomial(7, 1e7)(loc), Binomial(7)(loc)),
    ):
        torch.testing.assert_close(ours.log_prob(y), theirs.log_prob(y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("likelihood", [Beta(6.0), BetaBinomial(10, 6.0), BetaBinomial(3, 6.0)], ids=repr)
def test_starts_are_near_the_truth(likelihood: Beta | BetaBinomial) -> None:
    draws = likelihood(torch.zeros(20_000, 9, dtype=torch.float64)).sample()
    start = likelihood.start("concentration", draws[:, 0], draws[:, 1:])
    assert 3.5 < start.item() < 7.5


@pytest.mark.parametrize("neighbors", [1, 4])
def test_starts_invert_the_variance_of_residuals(neighbors: int) -> None:
    """Residuals are of a share and the mean of K neighbors, of the same variance."""
    mean, concentration, n = 0.4, 7.0, 10
    for likelihood, scale, variance in (
        (Beta(1.0), 1, 1 / (1 + concentration)),
        (BetaBinomial(n, 1.0), n, (1 + (n - 1) / (1 + concentration)) / n),
    ):
        residual = (variance * mean * (1 - mean) * (1 + 1 / neighbors)) ** 0.5
        share, near = tensor(mean - residual, mean + residual), torch.full((2, neighbors), mean, dtype=torch.float64)
        start = likelihood.start("concentration", scale * share, scale * near)
        assert start.item() == pytest.approx(concentration, rel=1e-9)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Beta(0.0), "Beta: expected concentration to be positive"),
        (lambda: BetaBinomial(0), "BetaBinomial: expected total_count >= 1, got 0"),
        (lambda: BetaBinomial(3, -1.0), "BetaBinomial: expected concentration to be positive"),
        (
            lambda: Beta().check(tensor(0.0, 0.5)),
            "Beta: expected y to lie strictly between 0 and 1, got 1 of 2.*Squeeze",
        ),
        (lambda: BetaBinomial(3).check(tensor(4.0)), "BetaBinomial: expected y to be counts in 0..3, got 1 of 1"),
    ],
)
def test_errors(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]
