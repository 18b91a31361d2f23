"""The check of a constant mean after training."""

import warnings

import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_nngp import VNNGP, Vecchia
from pyro_nngp.inference.svi.exact_rows import exact_rows
from pyro_nngp.inference.svi.trend_check import check_trend, gain_of_trend
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian, StudentT
from pyro_nngp.means import LinearMean

generator = torch.Generator().manual_seed(0)
N = 120
X = torch.rand(N, 2, dtype=torch.float64, generator=generator)
Y = torch.sin(6 * X[:, 0]) + 0.3 * torch.randn(N, dtype=torch.float64, generator=generator)
TREND = Y + 6 * X[:, 1]


def build(y, method=Vecchia, likelihood=None, **settings):
    likelihood = Gaussian(0.1) if likelihood is None else likelihood
    gp = method(X[: len(y)], y, Matern32(2, 1.0, 0.2), likelihood, num_neighbors=6, **settings)
    gp.solve()
    return gp


@pytest.mark.parametrize("method", [Vecchia, VNNGP])
def test_a_trend_is_reported(method):
    with pytest.warns(UserWarning, match=r"linear one that gains [\d.]+ nats.*LinearMean\(2\)"):
        check_trend(exact_rows(build(TREND, method)))


@pytest.mark.parametrize(
    "build_it",
    [
        lambda: build(Y),
        lambda: build(TREND, mean=LinearMean(2)),
        lambda: build(TREND[:90]),
        lambda: build(TREND, VNNGP, StudentT(4.0, 0.3)),
        lambda: build(TREND, offset=6 * X[:, 1]),
        lambda: build(TREND, weights=torch.ones(N)),
    ],
    ids=["none", "linear mean", "few", "heavy tails", "offset", "weights"],
)
def test_other_data_are_not(build_it):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_trend(exact_rows(build_it()))


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_gain_is_that_of_generalized_least_squares(scale):
    """The scale of the covariance is free. A constant column, and one that repeats another, count for nothing."""
    x = torch.stack([X[:, 0], X[:, 1], 2 * X[:, 1], torch.ones(N)], 1).double()
    cov = Matern32(2, 1.0, 0.2)(X, X).detach() + 0.1 * torch.eye(N, dtype=torch.float64)
    precision = torch.linalg.inv(cov)

    def largest(columns):
        b = torch.linalg.solve(columns.T @ precision @ columns, columns.T @ precision @ TREND)
        residual = TREND - columns @ b
        return MultivariateNormal(columns @ b, cov * (residual @ precision @ residual) / N).log_prob(TREND)

    ones = torch.ones(N, 1, dtype=torch.float64)
    expected = largest(torch.cat([ones, X], 1)) - largest(ones) - 2 / 2
    found = gain_of_trend(TREND, x, torch.linalg.cholesky(scale * cov))
    assert abs(found - float(expected)) < 1e-6
