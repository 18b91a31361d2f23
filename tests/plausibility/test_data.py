"""Warnings of data that a model takes, but that are hardly meant; warnings are errors where none is expected."""

from pathlib import Path

import pytest
import torch
from builders import METHODS

import pyro_nngp
from pyro_nngp import models
from pyro_nngp.hyperparameters import lognormal_priors
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import (
    Bernoulli,
    Gaussian,
    HeteroskedasticGaussian,
    LogNormal,
    Poisson,
    StudentT,
    ZeroInflated,
)
from pyro_nngp.models import LMC, LOO, VNNGP, CoregionalizedLOO, Vecchia

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
N = 30
X = torch.rand(N, 2, generator=GENERATOR, dtype=F64)
Y = torch.sin(5 * X[:, 0]) + 0.1 * torch.randn(N, generator=GENERATOR, dtype=F64)
COUNTS = torch.poisson((1 + Y).exp(), generator=GENERATOR)
HOURS = 1 + 600 * torch.rand(N, generator=GENERATOR, dtype=F64)
KERNEL = Matern52(2, 1.0, 0.5).double()  # set, so that nothing has to be started
APART = torch.stack([Y, 50 + 7 * Y.flip(0), -35 * Y], 1)


def build(method, y, likelihood=None, **by_row):
    return method(X, y, KERNEL, likelihood, num_neighbors=4, **by_row)


@pytest.mark.parametrize("name", ["Vecchia", "MLLk", "LOO", "VNNGP", "NPVI", "SVGP", "SWSGP"])
def test_outputs_of_other_units_that_share_a_noise_are_reported(name):
    method, settings = METHODS[name]
    with pytest.warns(
        UserWarning, match=rf"{name}: outputs have spreads of .* Take LMC, or one {name} per output"
    ) as found:
        method(X, APART, KERNEL, Gaussian(0.1), **settings)
    package = [Path(part.__file__).parent for part in (pyro_nngp, models)]
    assert not any(Path(each.filename).is_relative_to(folder) for each in found for folder in package)


@pytest.mark.parametrize("likelihood", [Gaussian(torch.ones(3, 1)), StudentT()], ids=["noise of each", "outliers"])
def test_outputs_share_the_kernel_under_other_noise_too(likelihood):
    with pytest.warns(UserWarning, match="share the variance of one kernel"):
        build(VNNGP, APART, likelihood)


def test_outputs_with_scales_of_their_own_are_not_reported():
    build(Vecchia, APART / APART.std(0))
    build(Vecchia, torch.stack([Y, 1e5 + 2 * Y], 1))  # only levels differ
    build(VNNGP, torch.stack([COUNTS, 5 * COUNTS], 1), Poisson())  # a factor is a level
    build(VNNGP, 100 * Y, HeteroskedasticGaussian())
    CoregionalizedLOO(X, APART, [KERNEL], num_neighbors=4)
    LMC(X, APART, [KERNEL], num_neighbors=4)


@pytest.mark.parametrize(
    ("y", "likelihood"),
    [(COUNTS, Poisson()), (COUNTS, ZeroInflated(Poisson())), ((Y > 0).to(F64), Bernoulli()), (Y.exp(), LogNormal())],
    ids=lambda value: type(value).__name__,
)
def test_an_exposure_in_place_of_its_logarithm_is_reported(y, likelihood):
    with pytest.warns(
        UserWarning, match=r"VNNGP: offset has values of .* to 59\d\. .* did you mean .*exposure\.log\(\)"
    ):
        build(VNNGP, y, likelihood, offset=HOURS)


def test_an_exposure_of_one_of_the_outputs_is_reported():
    offset = torch.stack([HOURS, HOURS], 1)
    with pytest.warns(UserWarning, match="LMC: offset has values"):
        LMC(X, torch.stack([COUNTS, Y], 1), [KERNEL], [Poisson(), Gaussian()], offset=offset, num_neighbors=4)
    LMC(
        X,
        torch.stack([COUNTS, Y], 1),
        [KERNEL],
        [Poisson(), Gaussian()],
        offset=offset * torch.tensor([0, 1]),
        num_neighbors=4,
    )


def test_offsets_on_the_scale_of_the_link_are_not_reported():
    build(VNNGP, COUNTS, Poisson(), offset=HOURS.log())
    guarded = HOURS.log()
    guarded[0] = -30.0  # the logarithm of almost no exposure
    build(VNNGP, COUNTS, Poisson(), offset=guarded)
    build(VNNGP, COUNTS, Poisson("softplus"), offset=HOURS)
    build(VNNGP, Y + HOURS, None, offset=HOURS)


@pytest.mark.parametrize(
    ("method", "y", "likelihood", "match"),
    [
        (LOO, torch.ones(N, dtype=F64), Bernoulli(), "LOO: y is 1 in all rows. Nothing can be learned"),
        (VNNGP, torch.ones(N, dtype=torch.int64), Bernoulli(), "VNNGP: y is 1 in all rows"),
        (Vecchia, torch.full((N,), -3.5, dtype=F64), None, "Vecchia: y is -3.5 in all rows"),
        (Vecchia, torch.stack([100 * Y, 0 * Y], 1), None, r"y is 0 in all rows of columns \[1\]"),
    ],
)
def test_targets_that_are_all_the_same_are_reported(method, y, likelihood, match):
    with pytest.warns(UserWarning, match=match) as found:
        build(method, y, likelihood)
    assert len(found) == 1


def test_targets_of_few_rows_or_of_known_exposure_may_be_the_same():
    Vecchia(X[:5], torch.ones(5, dtype=F64))
    build(VNNGP, torch.ones(N, dtype=F64), Poisson(), offset=HOURS.log())


def test_a_missing_value_does_not_hide_that_the_rest_is_the_same():
    y = torch.stack([Y, torch.full_like(Y, 2.0)], 1)
    y[3, 1] = torch.nan
    with pytest.warns(UserWarning, match=r"y is 2 in all rows of columns \[1\]"):
        LMC(X, y, [KERNEL], num_neighbors=4)


@pytest.mark.parametrize("method", [Vecchia, models.BSGP])
def test_a_prior_of_the_variance_for_other_units_is_reported(method):
    def build(y, variance):
        return method(X, y, lognormal_priors(Matern52(2).double(), {"lengthscale": 1.0, "variance": variance}, like=X))

    with pytest.warns(UserWarning, match=rf"{method.__name__}: the prior .* median of about 0.05, .*Standardize y"):
        build(100 * Y, 0.05)
    build(100 * Y, 5000.0)
    build(Y / Y.std(), 0.05)  # the choice for standardized data
    priors = {"lengthscale": 1.0, "variance": 0.05}
    first, second = (
        lognormal_priors(Matern52(2).double(), priors | {"variance": variance}, like=X) for variance in (0.05, 5000.0)
    )
    method(X, 100 * Y, first + second)  # the kernel with the largest prior counts


@pytest.mark.parametrize("name", ["Vecchia", "VNNGP", "SVGP"])
def test_copies_of_rows_are_reported(name):
    method, settings = METHODS[name]
    rows = torch.cat([torch.arange(N), torch.arange(N // 2)])
    with pytest.warns(UserWarning, match=rf"{name}: 33% of the rows are exact copies of others, in x and y, "):
        method(X[rows], Y[rows], KERNEL, Gaussian(0.1), **settings)


def test_repeated_places_and_labels_are_no_copies():
    rows = torch.cat([torch.arange(N), torch.arange(N // 2)])
    changed = Y[rows] + torch.arange(len(rows)) * 1e-9
    Vecchia(X[rows], changed, KERNEL, num_neighbors=4)
    VNNGP(X[rows], (Y[rows] > 0).to(F64), KERNEL, Bernoulli(), num_neighbors=4)


@pytest.mark.parametrize("times", [[N // 6], [N // 3, N // 3]])
def test_few_copies_and_rows_that_come_very_often_are_not_reported(times):
    rows = torch.cat([torch.arange(N), torch.arange(N // 6), *(torch.full((each,), 3) for each in times[1:])])
    Vecchia(X[rows], Y[rows], KERNEL, num_neighbors=4)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_codes_of_missing_values_are_reported(scale):
    y = Y.clone()
    y[4] = -9999.0
    with pytest.warns(UserWarning, match=r"Vecchia: 1 of 30 values of y are -\S+, \S+ standard deviations away"):
        build(Vecchia, scale * y)
    build(VNNGP, scale * y, StudentT())
    build(Vecchia, scale * (3 * Y).exp())  # skewed
    build(Vecchia, scale * torch.where(Y.median() < Y, Y, Y + 1e3))  # two groups


def test_a_level_that_float32_does_not_resolve_is_reported():
    x, kernel = X.float(), Matern52(2, 1.0, 0.5)
    with pytest.warns(
        UserWarning, match=r"Vecchia: y is 1e\+06 \+- \S+, of which torch\.float32 keeps steps of 0\.12: .* float64"
    ):
        Vecchia(x, (Y + 1e6).float(), kernel, num_neighbors=4)
    Vecchia(x, (Y + 1e3).float(), kernel, num_neighbors=4)
    build(Vecchia, Y + 1e6)
