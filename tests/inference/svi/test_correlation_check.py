"""Residuals that are alike at neighboring rows are found out."""

import math
import warnings

import pytest
import torch

from pyro_nngp.inference import ConvergenceWarning, FitResult
from pyro_nngp.inference.svi.correlation_check import check_correlation, correlations_of_residuals
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.models import SVGP, VNNGP, Vecchia

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.arange(400, dtype=F64)[:, None] / 400
Y = torch.sin(2 * math.pi * 20 * X[:, 0]) + 0.2 * torch.randn(400, generator=GENERATOR, dtype=F64)


def vecchia(x, y, lengthscale, noise=0.5, **settings):
    return Vecchia(x, y, Matern52(x.shape[1], 1.0, lengthscale).double(), Gaussian(noise), num_neighbors=20, **settings)


def result(converged=True):
    return FitResult(torch.tensor([0.0]), [], 0.0, converged, None, "lbfgs", 400, 0, 0)


def test_a_series_of_cycles_is_no_noise():
    gp = vecchia(X, Y, 5.0)
    residual = Y - gp(X)[0].detach()
    (found,) = correlations_of_residuals(gp)
    assert found == pytest.approx(float(torch.corrcoef(torch.stack([residual[1:], residual[:-1]]))[0, 1]), abs=0.08)
    with pytest.warns(ConvergenceWarning, match=r"correlation of 0\.\d+ with those of the nearest row: f changes"):
        check_correlation(gp, result())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_correlation(gp, result(converged=False))
        check_correlation(vecchia(X, Y, 0.02, 0.04), result())
    assert correlations_of_residuals(vecchia(X, Y, 0.02, 0.04))[0] < 0.2


def test_a_season_that_all_places_share_is_named_by_its_column():
    x = torch.rand(600, 3, generator=GENERATOR, dtype=F64)
    x[:, 2] = torch.randint(0, 240, (600,), generator=GENERATOR) / 240
    y = torch.sin(2 * math.pi * 20 * x[:, 2]) + 0.1 * torch.randn(600, generator=GENERATOR, dtype=F64)
    gp = vecchia(x, y, 3.0)
    found = correlations_of_residuals(gp)
    assert len(found) == 4
    assert max(found[:3]) < 0.4
    assert found[3] > 0.8
    with pytest.warns(ConvergenceWarning, match=r"nearest row in column 2 of x: f changes"):
        check_correlation(gp, result())


@pytest.mark.parametrize(
    "make",
    [
        lambda: vecchia(X[:99], Y[:99], 5.0),
        lambda: vecchia(X, Y.expand(2, -1).mT, 5.0),
        lambda: vecchia(X, Y, 5.0, weights=torch.ones(400, dtype=F64)),
        lambda: vecchia(X, Y, 5.0, offset=torch.ones(400, dtype=F64)),
        lambda: VNNGP(X, (Y > 0).to(F64), Matern52(1, 1.0, 5.0).double(), Poisson(), num_neighbors=5),
    ],
)
def test_methods_without_such_residuals_are_left_alone(make):
    assert correlations_of_residuals(make()) == []


def test_too_few_inducing_points_are_found():
    gp = SVGP(X, Y, Matern52(1, 1.0, 1.0).double(), Gaussian(0.5), inducing=X[::80])
    with pytest.warns(ConvergenceWarning, match="Take VNNGP or Vecchia in place of inducing points"):
        check_correlation(gp, result())
