"""Scores against other libraries, closed forms and integrals, and the messages for input they refuse."""

import math

import pyro.distributions as dist
import pytest
import scoringrules
import torch
from scipy import integrate, stats
from sklearn import metrics as sklearn_metrics

from pyro_nngp.data import metrics


@pytest.fixture
def gaussian() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Observations, means and standard deviations of 40 points."""
    y, loc = torch.randn(2, 40, dtype=torch.float64)
    return y, loc, 0.2 + torch.rand(40, dtype=torch.float64)


def test_rmse_is_the_root_of_sklearns_mean_squared_error(gaussian):
    y, loc, _ = gaussian
    assert float(metrics.rmse(y, loc)) == pytest.approx(sklearn_metrics.mean_squared_error(y, loc) ** 0.5, rel=1e-12)


def test_nll_is_minus_the_mean_log_density(gaussian):
    y, loc, scale = gaussian
    expected = -stats.norm.logpdf(y, loc, scale).mean()
    assert float(metrics.nll(y, dist.Normal(loc, scale))) == pytest.approx(expected, rel=1e-12)


def test_nll_counts_a_joint_distribution_as_one(gaussian):
    y, loc, scale = gaussian
    joint = metrics.nll(y, dist.Normal(loc, scale).to_event(1))
    assert float(joint) == pytest.approx(40 * float(metrics.nll(y, dist.Normal(loc, scale))), rel=1e-12)


def test_nll_of_labels_is_the_log_loss():
    prob = torch.softmax(torch.randn(30, 3, dtype=torch.float64), -1)
    y = torch.randint(3, (30,))
    expected = sklearn_metrics.log_loss(y, prob, labels=[0, 1, 2])
    assert float(metrics.nll(y, dist.Categorical(prob))) == pytest.approx(expected, rel=1e-9)


def test_crps_gaussian_agrees_with_scoringrules(gaussian):
    y, loc, scale = (t.numpy() for t in gaussian)
    expected = scoringrules.crps_normal(y, loc, scale).mean()
    assert float(metrics.crps_gaussian(*gaussian)) == pytest.approx(expected, rel=1e-12)


def test_crps_gaussian_is_the_integral_of_the_squared_distance_of_distribution_functions():
    y, loc, scale = 0.7, 0.1, 1.3
    below = integrate.quad(lambda t: stats.norm.cdf(t, loc, scale) ** 2, -12, y)[0]
    above = integrate.quad(lambda t: stats.norm.sf(t, loc, scale) ** 2, y, 12)[0]
    score = metrics.crps_gaussian(*(torch.tensor([v], dtype=torch.float64) for v in (y, loc, scale)))
    assert float(score) == pytest.approx(below + above, rel=1e-9)


def test_crps_gaussian_tends_to_the_absolute_error_far_out_in_float32():
    y, loc, scale = torch.tensor([1e4]), torch.tensor([0.0]), torch.tensor([1.0])
    assert float(metrics.crps_gaussian(y, loc, scale)) == pytest.approx(1e4 - 1 / math.sqrt(math.pi), rel=1e-6)


def test_crps_sample_agrees_with_scoringrules_fair_estimator(gaussian):
    y, loc, scale = gaussian
    draws = loc + scale * torch.randn(25, 40, dtype=torch.float64)
    draws[3] = draws[4]  # ties
    expected = scoringrules.crps_ensemble(y.numpy(), draws.T.numpy(), estimator="fair").mean()
    assert float(metrics.crps_sample(y, draws)) == pytest.approx(expected, rel=1e-10)


def test_crps_sample_is_unbiased_for_few_draws():
    num_repeats = 40_000
    y = torch.full((num_repeats,), 0.4, dtype=torch.float64)
    draws = torch.randn(3, num_repeats, dtype=torch.float64)
    expected = metrics.crps_gaussian(y[:1], torch.zeros_like(y[:1]), torch.ones_like(y[:1]))
    # The score of three normal draws has a standard deviation below 0.7.
    assert abs(float(metrics.crps_sample(y, draws) - expected)) < 6 * 0.7 / num_repeats**0.5


def test_crps_sample_keeps_its_digits_at_a_large_offset_in_float32():
    draws, y = torch.randn(50, 10), torch.randn(10)
    offset = 2.0**16  # representable together with the shifted values' own rounding, which the reference shares
    shifted, shifted_y = draws + offset, y + offset
    reference = metrics.crps_sample(shifted_y.double(), shifted.double())
    assert float(metrics.crps_sample(shifted_y, shifted)) == pytest.approx(float(reference), rel=1e-5)


def test_gaussian_interval_holds_its_probability(gaussian):
    _, loc, scale = gaussian
    lower, upper = metrics.gaussian_interval(loc, scale, alpha=0.2)
    inside = dist.Normal(loc, scale).cdf(upper) - dist.Normal(loc, scale).cdf(lower)
    torch.testing.assert_close(inside, torch.full_like(inside, 0.8), rtol=1e-12, atol=0)
    torch.testing.assert_close((lower + upper) / 2, loc, rtol=1e-12, atol=1e-12)


def test_interval_score_agrees_with_scoringrules(gaussian):
    y, loc, scale = gaussian
    lower, upper = metrics.gaussian_interval(loc, scale, alpha=0.3)  # narrow: points fall out on both sides
    assert bool((y < lower).any())
    assert bool((y > upper).any())
    expected = scoringrules.interval_score(y.numpy(), lower.numpy(), upper.numpy(), 0.3).mean()
    assert float(metrics.interval_score(y, lower, upper, alpha=0.3)) == pytest.approx(expected, rel=1e-12)


def test_coverage_counts_the_ends_of_the_interval():
    y = torch.tensor([0.0, 1.0, 0.5, 1.1, -0.1])
    assert float(metrics.coverage(y, torch.zeros(5), torch.ones(5))) == pytest.approx(3 / 5)


def test_error_rate_is_one_minus_sklearns_accuracy():
    y, label = torch.randint(3, (2, 50))
    assert float(metrics.error_rate(y, label)) == pytest.approx(1 - sklearn_metrics.accuracy_score(y, label))


@pytest.mark.parametrize("levels", [4, 10**6], ids=["ties", "no ties"])
def test_auc_agrees_with_sklearn(levels):
    y = torch.rand(200) < 0.3
    score = (torch.rand(200, dtype=torch.float64) * levels).floor() + y
    assert float(metrics.auc(y, score)) == pytest.approx(sklearn_metrics.roc_auc_score(y, score), rel=1e-12)


def test_auc_of_a_constant_score_is_exactly_one_half_in_float32_at_a_million_points():
    y = torch.arange(1_000_000) % 3 == 0
    assert float(metrics.auc(y, torch.zeros(1_000_000))) == 0.5


def test_brier_agrees_with_sklearn():
    prob, y = torch.rand(60, dtype=torch.float64), torch.rand(60) < 0.5
    expected = sklearn_metrics.brier_score_loss(y, prob)
    assert float(metrics.brier(y, prob)) == pytest.approx(expected, rel=1e-12)
    both = torch.stack([1 - prob, prob], -1)
    assert float(metrics.brier(y.long(), both)) == pytest.approx(2 * expected, rel=1e-12)


def test_scores_keep_dtype():
    y, one = torch.zeros(3), torch.ones(3)
    for score in (
        metrics.rmse(y, one),
        metrics.crps_gaussian(y, y, one),
        metrics.crps_sample(y, torch.randn(4, 3)),
        metrics.interval_score(y, y, one),
        metrics.coverage(y, y, one),
        metrics.gaussian_interval(y, one)[0],
        metrics.auc(torch.tensor([0, 1, 1]), one),
        metrics.brier(torch.tensor([0, 1, 1]), one),
    ):
        assert score.dtype == torch.float32


ONE, ROW = torch.ones(3), torch.ones(3, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.rmse(ONE, ROW), r"rmse: expected loc of the shape of y \(3,\), got \(3, 1\)"),
        (lambda: metrics.nll(ROW, dist.Normal(ONE, ONE)), r"nll: expected y of the shape of one draw \(3,\)"),
        (lambda: metrics.crps_gaussian(ONE, ONE, ROW), "crps_gaussian: expected scale of the shape of y"),
        (lambda: metrics.crps_gaussian(ONE, ONE, 0 * ONE), "crps_gaussian: expected scale to be positive, got 0.0"),
        (lambda: metrics.crps_gaussian(ONE, ONE, ONE * math.nan), "crps_gaussian: expected scale to be positive"),
        (lambda: metrics.crps_sample(ONE, torch.ones(5, 3, 1)), r"crps_sample: expected draws\[0\] of the shape of y"),
        (lambda: metrics.crps_sample(ONE, ONE[None]), "crps_sample: expected draws of shape .* with S >= 2"),
        (lambda: metrics.gaussian_interval(ONE, ROW), "gaussian_interval: expected scale of the shape of loc"),
        (lambda: metrics.gaussian_interval(ONE, ONE, 1.0), r"gaussian_interval: expected alpha in \(0, 1\), got 1.0"),
        (lambda: metrics.interval_score(ONE, ONE, ROW), "interval_score: expected upper of the shape of y"),
        (lambda: metrics.interval_score(ONE, ONE, ONE, 0.0), r"interval_score: expected alpha in \(0, 1\), got 0.0"),
        (lambda: metrics.interval_score(ONE, ONE, 0 * ONE), "interval_score: expected upper not below lower, got 3"),
        (lambda: metrics.coverage(ONE, ROW, ONE), "coverage: expected lower of the shape of y"),
        (lambda: metrics.coverage(ONE, ONE, 0 * ONE), "coverage: expected upper not below lower"),
        (lambda: metrics.error_rate(ONE, ROW), "error_rate: expected label of the shape of y"),
        (lambda: metrics.coverage(ONE * math.nan, ONE, ONE), "coverage: expected y to be known, got 3 NaN. Drop"),
        (lambda: metrics.interval_score(ONE, ONE, ONE * math.nan), "interval_score: expected upper to be known"),
        (lambda: metrics.error_rate(ONE * math.nan, ONE), "error_rate: expected y to be known, got 3 NaN"),
        (lambda: metrics.auc(ONE > 0, ONE * math.nan), "auc: expected score to be known, got 3 NaN"),
        (lambda: metrics.auc(ONE, ROW), "auc: expected score of the shape of y"),
        (lambda: metrics.auc(2 * ONE, ONE), r"auc: expected y to hold labels in 0..1, got \[2.0\]"),
        (lambda: metrics.auc(ONE, ONE), "auc: expected y to hold both labels, got 3 ones in 3"),
        (lambda: metrics.brier(ONE, torch.ones(3, 2, 1)), "brier: expected prob of the shape of y"),
        (lambda: metrics.brier(ONE / 2, ONE), "brier: expected y to hold labels in 0..1"),
        (lambda: metrics.brier(torch.ones(2), torch.ones(3, 2)), r"brier: expected prob\[:, 0\] of the shape of y"),
        (lambda: metrics.brier(torch.tensor([0, 3]), torch.ones(2, 3)), r"brier: expected y to hold labels in 0..2"),
        (lambda: metrics.rmse(ONE[:0], ONE[:0]), r"rmse: expected y to hold at least one point, got shape \(0,\)"),
    ],
)
def test_wrong_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.rmse(ONE.numpy(), ONE), "rmse: expected y to be a torch.Tensor, got ndarray"),
        (lambda: metrics.rmse(ONE, ONE.double()), "rmse: expected loc of the dtype of y"),
        (lambda: metrics.rmse(ONE.int(), ONE), "rmse: expected y of a floating-point dtype, got torch.int32"),
        (lambda: metrics.crps_sample(ONE, [1.0, 2.0]), "crps_sample: expected draws to be a torch.Tensor, got list"),
        (lambda: metrics.brier(ONE, 0.5), "brier: expected prob to be a torch.Tensor, got float"),
    ],
)
def test_wrong_kinds_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_a_predictive_distribution_is_a_distribution():
    with pytest.raises(
        TypeError, match=r"nll: expected predictive to be a Distribution, got Tensor\. Pass gp\.predict"
    ):
        metrics.nll(torch.zeros(3), torch.zeros(3))
