"""Cross-validation against dense exact processes, leave-one-out densities, and sums by hand."""

import math

import pandas
import pytest
import torch
from builders import F64, matern, scalar, uniform, waves, zero
from torch.distributions import Normal
from torch.testing import assert_close

from pyro_nngp import cross_validate
from pyro_nngp.inference import CrossValidation
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, Multinomial, Poisson
from pyro_nngp.models import BSGP, LOO, SWSGP, VNNGP, CoregionalizedLOO, Vecchia

N = 40


def vecchia(**options):
    x, y = waves(N)
    return Vecchia(x, y, matern(), Gaussian(scalar(0.04)), mean=zero, num_neighbors=N - 1, jitter=1e-12, **options)


def test_blocks_of_the_exact_process():
    """Moments and scores of each block given the others, from the dense covariance."""
    gp = vecchia(offset=0.3 * torch.ones(N, dtype=F64))
    cv = cross_validate(gp, 4, num_blocks=8, num_neighbors=30)
    cov = matern()(gp.x, gp.x).detach() + 0.04 * torch.eye(N, dtype=F64)
    mean, var = torch.empty(2, N, dtype=F64)
    for k in range(4):
        held, rest = cv.fold == k, cv.fold != k
        gain = torch.linalg.solve(cov[rest][:, rest], cov[rest][:, held]).mT
        mean[held] = 0.3 + gain @ (gp.y - 0.3)[rest]
        var[held] = (cov[held][:, held] - gain @ cov[rest][:, held]).diagonal()
    assert_close(cv.mean, mean, rtol=0, atol=1e-9)
    assert_close(cv.sd, var.sqrt(), rtol=1e-8, atol=0)
    want, z = Normal(mean, var.sqrt()), (gp.y - mean) / var.sqrt()
    assert_close(cv.by_row["nll"], -want.log_prob(gp.y), rtol=1e-7, atol=1e-9)
    assert torch.equal(cv.by_row["covered"], (z.abs() <= 1.959963984540054).double())
    grid = torch.linspace(-6, 6, 6001, dtype=F64)
    steps = (Normal(0.0, 1.0).cdf(grid)[:, None] - (grid[:, None] >= z).double()).square()
    assert_close(cv.by_row["crps"], var.sqrt() * torch.trapezoid(steps, grid, dim=0), rtol=2e-3, atol=0)


def test_folds_of_one_row_are_leave_one_out():
    gp = vecchia()
    cv = cross_validate(gp, N, num_neighbors=N - 1)
    assert_close(-cv.by_row["nll"], gp.loo(num_neighbors=N - 1), rtol=0, atol=1e-9)


def test_scores_and_their_standard_errors_by_hand():
    gp = vecchia(weights=torch.arange(1.0, N + 1, dtype=F64))
    cv = cross_validate(gp, 5, blocks=0.3)
    w, error = cv.weights, cv.by_row["squared_error"]
    rmse = float(((w * error).sum() / w.sum()).sqrt())
    sums = [float((w * (error - rmse**2))[cv.fold == k].sum()) for k in range(5)]
    want = math.sqrt(5 / 4 * sum(each**2 for each in sums)) / float(w.sum()) / (2 * rmse)
    value, standard_error = cv.scores["rmse"]
    assert_close((float(value), float(standard_error)), (rmse, want))
    frame = cv.to_frame()
    assert list(frame.index) == ["nll", "crps", "rmse", "coverage"]
    assert frame.loc["rmse", "standard_error"] == pytest.approx(want)
    folds = cv.by_fold()
    assert folds["rows"].sum() == N
    held = cv.fold == 2
    assert folds.loc[2, "nll"] == pytest.approx(float((w * cv.by_row["nll"])[held].sum() / w[held].sum()))
    assert "5 folds, hyperparameters kept" in str(cv)
    assert "rmse" in repr(cv)


def test_differences_are_paired():
    gp, other = vecchia(), vecchia()
    other.likelihood = Gaussian(0.5)
    one, two = (cross_validate(each, 8) for each in (gp, other))
    value, error = one.difference(two)["nll"]
    assert_close(value, one.scores["nll"].value - two.scores["nll"].value)
    parts = one.by_row["nll"] - two.by_row["nll"] - value
    sums = torch.stack([parts[one.fold == k].sum() for k in range(8)])
    assert_close(error, (8 / 7 * sums.square().sum()).sqrt() / N)
    with pytest.raises(ValueError, match="folds of this one"):
        one.difference(cross_validate(gp, 7))
    with pytest.raises(TypeError, match="to be a CrossValidation, got float"):
        one.difference(0.3)
    labels = CrossValidation(one.fold, {"brier": one.by_row["nll"]}, None, None, gp.x, gp.y, one.weights)
    with pytest.raises(ValueError, match="with the scores nll, crps, rmse, coverage, got brier"):
        one.difference(labels)


def test_counts_have_scores_from_draws():
    """Far from the others, predictions are the prior's: scores of a Poisson distribution with a known mean."""
    x = torch.arange(30, dtype=F64)[:, None] * 1e3
    y = torch.poisson(torch.full((30,), 4.0, dtype=F64))
    offset = math.log(4.0) * torch.ones(30, dtype=F64)
    kernel = Matern52(1, scalar(1e-12), scalar(1.0))
    gp = VNNGP(x, y, kernel, Poisson(), mean=zero, num_neighbors=5, offset=offset)
    cv = cross_validate(gp, 3)
    poisson = torch.distributions.Poisson(torch.tensor(4.0, dtype=F64))
    assert_close(cv.by_row["nll"], -poisson.log_prob(y), rtol=1e-4, atol=1e-4)
    assert_close(cv.mean, torch.full_like(y, 4.0), rtol=1e-4, atol=0)
    counts = torch.arange(60, dtype=F64)
    cdf = poisson.log_prob(counts).exp().cumsum(0)
    want = (cdf[:, None] - (counts[:, None] >= y).double()).square().sum(0)
    assert_close(cv.by_row["crps"], want, rtol=0, atol=6 * 2 / 2_000**0.5)
    assert torch.equal(cv.by_row["covered"], ((y >= 1) & (y <= 8)).double())  # P(y = 0) = .018, P(y > 8) = .021


def test_labels_have_brier_scores_and_errors():
    x, f = waves(N)
    gp = LOO(x, f > 0, matern(), Bernoulli(), num_neighbors=N - 1)
    cv = cross_validate(gp, 4)
    probability = (-cv.by_row["nll"]).exp()  # of the observed label
    assert_close(cv.by_row["brier"], (1 - probability).square())
    assert torch.equal(cv.by_row["error"], (probability < 0.5).double())
    assert cv.mean is None
    classes = torch.bucketize(f, torch.tensor([-0.4, 0.4], dtype=F64))
    cv = cross_validate(LOO(x, classes, matern(), Categorical(3), num_neighbors=9), 4)
    assert list(cv.scores) == ["nll", "brier", "error"]
    assert (cv.by_row["brier"] >= (1 - (-cv.by_row["nll"]).exp()).square()).all()


def test_missing_outputs_do_not_count():
    x, f = waves(N)
    y = torch.stack([f, torch.where(torch.arange(N) % 3 == 0, torch.nan, f)], 1)
    frame = pandas.DataFrame(y.numpy(), columns=["copper", "zinc"])
    gp = CoregionalizedLOO(pandas.DataFrame(x.numpy()), frame, 1, num_neighbors=9)
    cv = cross_validate(gp, 5)
    assert cv.by_row["nll"].shape == (N,)
    missing = y.isnan()
    assert torch.equal(cv.by_row["crps"].isnan(), missing)
    assert not cv.by_row["nll"].isnan().any()
    seen = cv.by_row["squared_error"][:, 1][~missing[:, 1]]
    assert_close(cv.scores["rmse"].value[1], seen.mean().sqrt())
    assert "rmse[zinc]" in cv.to_frame().index


def test_the_density_of_several_counts_is_that_of_a_row():
    x, f = waves(30)
    counts = torch.stack([(2 + f).round(), (2 - f).round()], 1).clamp(min=0)
    gp = VNNGP(x, counts, matern(), Multinomial(), num_neighbors=5, trials=counts.sum(1).clamp(min=1))
    cv = cross_validate(gp, 2)
    assert cv.by_row["nll"].shape == (30,)
    assert cv.by_row["crps"].shape == (30, 2)


def test_refits_train_on_the_other_rows_only():
    gp = vecchia()
    cv = cross_validate(gp, 2, refit=True, num_steps=3, lr=0.3)
    assert cv.refitted
    assert "refitted" in str(cv)
    assert (cv.by_row["nll"] - cross_validate(gp, 2).by_row["nll"]).abs().max() > 1e-3
    assert_close(gp.likelihood.variance.detach(), torch.tensor(0.04, dtype=F64))
    x, y = waves(30)
    sparse = SWSGP(x, y, matern(), Gaussian(0.04), num_neighbors=4, inducing=8)
    assert cross_validate(sparse, 2, refit=True, num_steps=2).by_row["nll"].isfinite().all()


def test_refusals():
    x, y = waves(30)
    with pytest.raises(ValueError, match=r"q\(u\) that has an optimum in closed form.*refit=True"):
        cross_validate(SWSGP(x, y, matern(), Gaussian(0.04), num_neighbors=4, inducing=8))
    with pytest.raises(TypeError, match="with a guide, got BSGP"):
        cross_validate(BSGP(x, y, None, inducing=8))
    with pytest.raises(TypeError, match="method with a likelihood, got float"):
        cross_validate(0.5)
    with pytest.raises(TypeError, match="expected num_steps, lr to be left out without refit"):
        cross_validate(vecchia(), num_steps=3, lr=0.1)
    with pytest.raises(ValueError, match="leave two rows or more, got 1"):
        cross_validate(Vecchia(uniform(3), y[:3], matern(), Gaussian(0.04)), [0, 0, 1])
