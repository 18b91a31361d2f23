"""The check that data show f."""

import warnings

import pytest
import torch

from pyro_nngp import LOO, NPVI, SVGP, VNNGP, Vecchia
from pyro_nngp.inference.svi.signal_check import check_latent_signal
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, Poisson

N = 60
X = torch.rand(N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = (X[:, 0] > 0.5).double()


def labels(method, variance, **settings):
    return method(X, LABELS, Matern32(2, variance, 0.3), Bernoulli(), **settings)


@pytest.mark.parametrize(
    ("method", "settings", "cure"),
    [
        (VNNGP, {}, "Set the kernel's variance"),
        (NPVI, {}, "take VNNGP, whose guide does not"),
        (LOO, {}, "take VNNGP, whose guide does not"),
        (SVGP, {"inducing": 10}, "take VNNGP, whose guide does not"),
    ],
)
def test_f_that_is_the_mean_function_is_reported(method, settings, cure):
    expected = rf"got a variance of f of 0.03, 0.007 times .* one observation .* {cure}"
    with pytest.warns(UserWarning, match=expected):
        check_latent_signal(labels(method, 0.03, **settings))


def test_a_simple_guide_is_suspected_sooner():
    with pytest.warns(UserWarning, match=r"0.01 times .* explain f away"):
        check_latent_signal(labels(NPVI, 0.05))


def counts(variance):
    return VNNGP(X, 1000.0 + LABELS, Matern32(2, variance, 0.3), Poisson())


@pytest.mark.parametrize(
    "build",
    [
        lambda: labels(VNNGP, 0.05),
        lambda: labels(NPVI, 0.3),
        lambda: labels(NPVI, 1.0),
        lambda: counts(1e-4),  # each of which tells f to .03
        lambda: Vecchia(X, LABELS, Matern32(2, 1e-6, 0.3), Gaussian()),  # another check
    ],
)
def test_others_are_not(build):
    gp = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_latent_signal(gp)


@pytest.mark.parametrize("method", [VNNGP, LOO])
def test_f_that_leaves_its_mean_function_is_not(method):
    """A label at the mean function would say nothing of f."""
    gp = labels(method, 8.0, mean=lambda x: -9.0 + 0 * x[:, 0])
    gp.solve()
    assert gp(X)[0].max() > -5.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_latent_signal(gp)


def test_classes_and_programs_without_data_pass():
    check_latent_signal(LOO(X, LABELS.long(), Matern32(2, 1e-3, 0.3), Categorical(2)))
    check_latent_signal(VNNGP(X, None, Matern32(2, 1e-3, 0.3)))
