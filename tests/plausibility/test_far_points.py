"""A warning where many predictions are the mean function, and none where they are not, or all are."""

import math
import warnings

import pytest
import torch

from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LOO, VNNGP, Vecchia

methods = pytest.mark.parametrize("method", [Vecchia, LOO, VNNGP])


def series(n=96):
    """A monthly series with a trend and a season, in years."""
    t = torch.arange(n, dtype=torch.float64)[:, None] / 12
    noise = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=t.dtype)
    return t, 5 * t[:, 0] + 10 * torch.sin(2 * math.pi * t[:, 0]) + noise


def trained(method, x, y, mean=None, lengthscale=0.3, noise=1.0):
    """A model with the hyperparameters of a trained one."""
    gp = method(x, y, Matern32(1, variance=100.0, lengthscale=lengthscale), Gaussian(noise), mean=mean)
    gp.solve()
    return gp


@methods
@pytest.mark.parametrize("predict", [True, False])
def test_a_forecast_says_that_it_is_the_mean(method, predict):
    x, y = series()
    gp = trained(method, x[:72], y[:72])
    entry = "predict" if predict else "forward"
    match = rf"{entry}: \d\d% of the new points lie so far beyond .* column 0 .*LinearMean\(1, .* Periodic\(1\)"
    call = gp.predict if predict else gp
    with pytest.warns(UserWarning, match=match):
        call(x[72:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(x[72:])  # once


def test_a_gap_has_another_cure():
    x, y = series()
    rest = torch.cat([torch.arange(30), torch.arange(60, 96)])
    with pytest.warns(UserWarning, match=r"in gaps of the data .* Covariates"):
        trained(Vecchia, x[rest], y[rest])(x[30:60])


@methods
def test_held_out_rows_do_not_warn(method):
    x, y = series()
    held = torch.arange(96) % 5 == 0
    trained(method, x[~held], y[~held])(x[held])


def test_a_trend_in_the_mean_does_not_warn():
    x, y = series()
    trained(Vecchia, x[:72], y[:72], LinearMean(1))(x[72:])


def test_a_few_far_points_do_not_warn():
    x, y = series()
    trained(Vecchia, x, y)(torch.cat([x, x[-5:] + 20]))


@pytest.mark.parametrize("hidden", [{"lengthscale": 1e-4}, {"noise": 1e6}])
def test_f_that_is_known_nowhere_does_not_warn(hidden):
    x, y = series()
    trained(Vecchia, x[:72], y[:72], **hidden)(x[72:])


def test_triples_of_sites_that_know_each_other_alone_do_not_warn():
    """A nested design: all other places are as unknown as the held-out ones, which lie no farther than others."""
    centers = torch.rand(40, 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (10 * centers + torch.tensor([[0.0, 0.0], [0.05, 0.0], [0.0, 0.05]])).reshape(-1, 2)
    gp = Vecchia(x[:90], torch.sin(x[:90, 0]), Matern32(2, 1.0, 0.2), Gaussian(0.01), num_neighbors=8)
    gp(x[90:])
