"""Censored and interval-censored data: limits, moments, the ordinal twin, a fit that sees beyond the limit, errors."""

import math

import pytest
import torch
from builders import scalar, tensor

import pyro_nngp as nngp
from pyro_nngp.likelihoods import (
    Censored,
    Gaussian,
    IntervalCensored,
    Likelihood,
    LogNormal,
    Ordinal,
    Poisson,
)

EDGES = torch.tensor([0.5, 1.0, 3.0])


@pytest.mark.parametrize("values", [Gaussian(0.3), LogNormal(0.3)], ids=["Gaussian", "LogNormal"])
def test_limits_far_off_change_nothing(values: Likelihood) -> None:
    f, y = tensor(-1.0, 0.5, 2.0), tensor(0.1, 1.0, 4.0)
    likelihood = Censored(values, 1e-9, 1e9)
    torch.testing.assert_close(likelihood(f).log_prob(y), values(f).log_prob(y))
    torch.testing.assert_close(likelihood.expected_log_prob(y, f, y), values.expected_log_prob(y, f, y))


@pytest.mark.parametrize("values", [Gaussian(0.3), LogNormal(0.3)], ids=["Gaussian", "LogNormal"])
@pytest.mark.parametrize(("lower", "upper"), [(0.2, 1.5), (0.2, None), (None, 1.5)])
def test_moments_and_distribution_function(values: Likelihood, lower: float | None, upper: float | None) -> None:
    distribution = Censored(values, lower, upper)(tensor(-0.5, 0.3, 1.5))
    draws = distribution.sample((100_000,))
    error = (distribution.variance / len(draws)).sqrt()
    assert ((draws.mean(0) - distribution.mean).abs() < 5 * error).all()
    torch.testing.assert_close(draws.var(0), distribution.variance, rtol=0.06, atol=1e-6)
    for y in (0.1, 0.2, 0.9, 1.5):
        share = (draws <= y).double().mean(0)
        assert ((distribution.cdf(scalar(y)) - share).abs() < 0.01).all()


def test_moments_far_from_zero_in_float32() -> None:
    half_normal = 4 * (0.5 - 1 / (2 * math.pi))
    distribution = Censored(Gaussian(4.0), lower=3e5)(torch.tensor([3e5, 3.1e5]))
    torch.testing.assert_close(distribution.variance, torch.tensor([half_normal, 4.0]), rtol=1e-4, atol=0)


def test_intervals_are_ratings_with_known_cutpoints() -> None:
    f, y = tensor(-1.0, 0.3, 1.2, 4.0), tensor(0.0, 1.0, 2.0, 3.0)
    ordinal = Ordinal(EDGES, "probit")
    torch.testing.assert_close(IntervalCensored(Gaussian(1.0), EDGES)(f).log_prob(y), ordinal(f).log_prob(y))


def test_intervals_are_observed_at_their_middles() -> None:
    y = torch.arange(4)
    plain, logs = (IntervalCensored(kind(0.3), EDGES).bind().observations(y) for kind in (Gaussian, LogNormal))
    torch.testing.assert_close(plain.obs, torch.tensor([0.5, 0.75, 2.0, 3.0]))
    ends = EDGES.log()
    torch.testing.assert_close(logs.obs, torch.stack([ends[0], ends[:2].mean(), ends[1:].mean(), ends[2]]))


@pytest.mark.slow
def test_a_fit_sees_beyond_the_limit() -> None:
    x = torch.linspace(0, 10, 300)[:, None]
    f = 50 * torch.sin(x[:, 0]) + 500
    y = f + 10 * torch.randn(300)
    low = f < 480
    for likelihood, data in (
        (Censored(Gaussian(), lower=480.0), y.clamp(min=480)),
        (IntervalCensored(Gaussian(), torch.linspace(460, 540, 9)), torch.bucketize(y, torch.linspace(460, 540, 9))),
    ):
        gp = nngp.VNNGP(x, data, likelihood=likelihood, num_neighbors=10)
        gp.solve()
        mean, _ = gp(x)
        assert (mean - f)[low].abs().mean() < 12  # recorded values are 18 too high on average, below the limit
        assert 20 < likelihood.values.variance.item() < 500


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Censored(Gaussian()), "Censored: expected lower < upper with one of them at least.*got None and None"),
        (lambda: Censored(Gaussian(), 2.0, 1.0), "Censored: expected lower < upper .*got 2.0 and 1.0"),
        (lambda: Censored(LogNormal(), 0.0), "Censored: expected lower < upper .*positive for log-normal"),
        (lambda: Censored(LogNormal(), -1.0), "Censored: expected lower to be finite and >= 0"),
        (lambda: Censored(Gaussian(), 0.0).check(tensor(-1.0)), "Censored: expected y to be from 0 to inf, got 1 of 1"),
        (lambda: Censored(LogNormal(), upper=2.0).check(tensor(0.0)), "Censored: expected y to be from 0 to 2, got 1"),
        (
            lambda: IntervalCensored(Gaussian(), torch.tensor([1.0, 0.0])),
            "IntervalCensored: expected edges to be a strictly increasing vector",
        ),
        (lambda: IntervalCensored(LogNormal(), torch.tensor([0.0, 1.0])), "of finite numbers above 0"),
        (
            lambda: IntervalCensored(Gaussian(), EDGES).check(tensor(4.0)),
            r"numbers of intervals, in 0\.\.3, got 1 of 1",
        ),
    ],
)
def test_value_errors(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]


def test_type_errors() -> None:
    with pytest.raises(TypeError, match="Censored: expected values to be Gaussian or LogNormal.*Poisson"):
        Censored(Poisson(), 1.0)
    with pytest.raises(TypeError, match="Censored: expected lower to be a number, got 'zero'"):
        Censored(Gaussian(), "zero")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="IntervalCensored: expected edges to be a torch.Tensor, got list"):
        IntervalCensored(Gaussian(), [0.0, 1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [Gaussian(0.3), LogNormal(0.3)], ids=["Gaussian", "LogNormal"])
@pytest.mark.parametrize("side", ["lower", "upper"])
def test_limits_of_rows_are_those_of_each_alone(values: Likelihood, side: str) -> None:
    none = -math.inf if side == "lower" else math.inf
    limits, y = tensor(0.5, 0.8, 2.0, none), tensor(0.5, 1.0, 2.0, 1.7)
    y = y if side == "lower" else tensor(0.5, 0.3, 2.0, 1.7)
    f, var = tensor(-0.5, 0.1, 30.0, 1.0), tensor(0.2, 1.0, 4.0, 0.5)
    rows = Censored(values, **{side: "limits"}).bind().for_rows(limits=limits)
    assert isinstance(rows, Likelihood)
    for i in range(4):
        alone = values if math.isinf(limits[i]) else Censored(values, **{side: float(limits[i])})
        f1, var1, y1 = f[i], var[i], y[i]
        for found, want in (
            (rows(f).log_prob(y), alone(f1).log_prob(y1)),
            (rows.expected_log_prob(y, f, var), alone.expected_log_prob(y1, f1, var1)),
            (rows.marginal(f, var).log_prob(y), alone.marginal(f1, var1).log_prob(y1)),
            (rows.marginal(f, var).mean, alone.marginal(f1, var1).mean),
            (rows.marginal(f, var).variance, alone.marginal(f1, var1).variance),
        ):
            torch.testing.assert_close(found[i], want, rtol=1e-6, atol=1e-9)
    low = rows.marginal(torch.full((4,), -40.0), torch.ones(4)).log_prob(y.float())
    assert low.isfinite().all()
    assert low.dtype == torch.float32
