"""Training that ends where it should not is found out: a mean away from the data, impossible data, leaks, copies."""

import math
import warnings

import pyro.distributions as dist
import pytest
import torch
from builders import slow_except

from pyro_nngp.inference import ConvergenceWarning, FitResult, fit
from pyro_nngp.inference.svi.outcome_check import check_leak, check_outcome, duplicate_dependence, mean_departure
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LMC, LOO, SVGP, VNNGP, Vecchia

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(60, 2, generator=GENERATOR, dtype=F64)
Y = torch.sin(6 * X[:, 0]) + 0.1 * torch.randn(60, generator=GENERATOR, dtype=F64)


def vecchia(y, level, lengthscale=0.1, variance=1.0, **settings):
    kernel = Matern52(2, variance, lengthscale).double()
    return Vecchia(X, y, kernel, Gaussian(0.01), num_neighbors=5, mean=lambda x: level + 0 * x[:, 0], **settings)


def result(loss, converged=True):
    return FitResult(torch.tensor([loss]), [], 0.0, converged, None, "lbfgs", 60, 0, 0)


def accept(gp, loss=0.0):
    """Check an outcome that warrants no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_outcome(gp, result(loss))


def test_a_mean_function_away_from_the_data_is_reported():
    gp = vecchia(Y, 5.0)
    residual = Y - 5
    deviation = (gp.kernel(X, X).mean() + 0.01 / 60).sqrt()
    want = residual.mean(), -residual.mean() / Y.std(), -residual.mean() / deviation
    torch.testing.assert_close(torch.tensor(mean_departure(gp), dtype=F64), torch.stack(want).detach())
    with pytest.warns(ConvergenceWarning, match=r"residuals that average -5, 6\.9 standard .* LinearMean"):
        fit(gp, 1, lr=1e-6, progress=False)


def test_coefficients_with_a_prior_that_lie_away_have_another_cure():
    gp = Vecchia(X, Y, Matern52(2, 1.0, 0.1).double(), Gaussian(0.01), mean=LinearMean(2, prior=dist.Normal(5.0, 0.01)))
    gp.solve()
    with pytest.warns(ConvergenceWarning, match="residuals that average .* Leave prior out"):
        check_outcome(gp, result(0.0))


def test_a_mean_function_that_the_data_or_the_kernel_allow_is_not_reported():
    accept(vecchia(Y, 0.5))
    smooth = vecchia(Y, 5.0, 10.0, 100.0)
    assert mean_departure(smooth).spreads > 5  # but such a function may lie that far from its mean everywhere
    accept(smooth)
    shifted = vecchia(Y + 100 + X[:, 0], 0.0, offset=100 + X[:, 0])
    assert mean_departure(shifted).residual == pytest.approx(float(Y.mean()))
    accept(shifted)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_a_constant_has_no_standard_deviations(value):
    with pytest.warns(UserWarning, match="in all rows"):
        gp = vecchia(torch.full_like(Y, value), 5.0)
    found = mean_departure(gp)
    assert found.residual == pytest.approx(value - 5)
    assert found.spreads == 0


def test_the_worst_of_several_outputs_counts():
    found = mean_departure(vecchia(torch.stack([Y, Y - 7], 1), 0.0))
    assert found.residual == pytest.approx(float(Y.mean()) - 7)


@pytest.mark.parametrize(
    "make",
    [
        lambda kernel: VNNGP(X, (Y > 0).to(F64), kernel, Poisson(), num_neighbors=5),
        lambda kernel: LMC(X, Y[:, None], [kernel], num_neighbors=5),
    ],
    ids=["counts", "several kernels"],
)
def test_other_models_have_no_mean_to_judge(make):
    assert mean_departure(make(Matern52(2, 1.0, 0.1).double())) is None


def test_a_loss_that_no_data_have_is_reported():
    gp = SVGP(X, torch.stack([Y, Y], 1), Matern52(2, 1.0, 0.5), Gaussian(0.1), inducing=5, weights=torch.full((60,), 3))
    with pytest.warns(
        ConvergenceWarning, match=r"less than 1000 nats per value, got 1e\+03: the model all but excludes"
    ):
        check_outcome(gp, result(6001.0))
    check_outcome(gp, result(5999.0))
    light = vecchia(Y, float(Y.mean()), weights=torch.full((60,), 0.1, dtype=F64))  # whose loss is a tenth as large
    accept(light, 999.0)
    check_outcome(gp, result(5e34, None))  # few steps from a bad start


def test_labels_that_neighbors_have_seen_are_reported(recwarn):
    """A variance far above what labels can tell lets each label speak through the variables of its neighbors."""
    torch.manual_seed(0)
    x = torch.rand(60, 2, dtype=F64)
    f = torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1]) + 0.1 * torch.randn(60, dtype=F64)
    labels = (f + 0.3 * torch.randn(60) > 0).double()
    for variance in (1.0, 3000.0):
        gp = LOO(x, labels, Matern52(2, variance, torch.full((2,), 0.3)), Bernoulli(), num_neighbors=10)
        gp.solve(10)
        check_leak(gp)
        assert len(recwarn) == (variance > 1)
    assert "nats per label" in str(recwarn.pop(ConvergenceWarning).message)


def doubled(scale):
    """Every row once more, with noise of this standard deviation."""
    generator = torch.Generator().manual_seed(1)
    return [torch.cat([v, v + scale * torch.randn(v.shape, generator=generator, dtype=F64)]) for v in (X, Y)]


@pytest.mark.parametrize("scale", slow_except([1e-9, 1e-3], 1e-9))
def test_rows_that_come_twice_are_reported(scale):
    with pytest.warns(ConvergenceWarning, match=r"near copies .* times the predictive variance.* Drop copies of rows"):
        fit(LOO(*doubled(scale), num_neighbors=10), progress=False)


@pytest.mark.slow
def test_labels_that_come_twice_are_reported():
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(100, 2, generator=generator, dtype=F64)
    labels = (x[:, 0] + 0.3 * torch.randn(100, generator=generator, dtype=F64) > 0.5).double()
    with pytest.warns(ConvergenceWarning, match=r"copies of 100% .* a label costs .* VNNGP suffers less"):
        fit(LOO(x.repeat(2, 1), labels.repeat(2), Matern52(2), Bernoulli(), num_neighbors=10), progress=False)


def test_a_label_owes_to_its_copy_what_it_loses_without():
    """Of one pair far from all others: without the copy a label is as likely as under the prior."""
    x = torch.cat([X[:58], X.new_tensor([[50.0, 50.0], [50.0, 50.0 + 1e-4]])])
    labels = torch.cat([(Y[:58] > 0).double(), Y.new_ones(2)])
    gp = LOO(x, labels, Matern52(2, 4.0, 0.3).double(), Bernoulli(), num_neighbors=20, mean=lambda x: 0 * x[:, 0])
    gp.solve(20)
    found = duplicate_dependence(gp, torch.tensor([58, 59]))
    assert found.square is None
    assert found.loss + found.fall == pytest.approx(math.log(2), rel=1e-6)
    assert found.loss == pytest.approx(-gp.loo(torch.tensor([58, 59])).mean().item(), rel=0.3)


def test_replicates_with_noise_of_their_own_are_not_reported():
    x = X.repeat(2, 1)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(120, generator=torch.Generator().manual_seed(1), dtype=F64)
    gp = LOO(x, y, num_neighbors=10)
    fit(gp, progress=False)
    found = duplicate_dependence(gp, torch.arange(120))
    assert found.share == 1.0
    assert found.fall < 0.5
    assert found.square < 1.5


def test_labels_of_several_visits_are_not_reported(recwarn):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(60, 2, generator=generator, dtype=F64).repeat(4, 1)
    labels = (torch.sin(6 * x[:, 0]) + torch.randn(240, generator=generator, dtype=F64) > 0).double()
    gp = LOO(x, labels, Matern52(2), Bernoulli(), num_neighbors=10)
    fit(gp, progress=False)
    assert duplicate_dependence(gp, torch.arange(200)).share == 1.0
    assert not [w for w in recwarn if "copies" in str(w.message)]


@pytest.mark.parametrize("method", [LOO, Vecchia])
def test_duplicate_dependence_is_that_of_the_exact_process_given_all_but_the_duplicate(method):
    x, y = doubled(1e-5)
    y = torch.stack([y, y.sin()], 1)
    kernel = Matern52(2, 1.0, 0.3).double()
    gp = method(x, y, kernel, Gaussian(0.01), num_neighbors=119, mean=lambda x: 0 * x[:, 0])
    cov = kernel(x, x).detach() + 0.01 * torch.eye(120, dtype=F64)
    scores = {1: [], 2: []}  # rows that are left out
    for i, out in ((i, out) for i in range(120) for out in scores):
        rest = torch.ones(120, dtype=torch.bool)
        rest[[i, (i + 60) % 120][:out]] = False
        w = torch.linalg.solve(cov[rest][:, rest], cov[rest, i])
        var = cov[i, i] - w @ cov[rest, i]
        square = (y[i] - w @ y[rest]).square() / var
        scores[out].append((float((square + var.log()).mean()) / 2, float(square.mean())))
    before, after = (torch.tensor(scores[out], dtype=F64).mean(0) for out in (1, 2))
    found = duplicate_dependence(gp, torch.arange(120))
    want = 1.0, float(after[0] - before[0]), float(before[0]) + math.log(2 * math.pi) / 2, float(after[1])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-4, atol=1e-4)
    # of a graph without gaps
    assert duplicate_dependence(method(X, Y, kernel, num_neighbors=1), torch.arange(60)) is None
