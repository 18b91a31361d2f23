"""The checks of counts after training."""

import re
import warnings

import pytest
import torch

from pyro_nngp import LOO, VNNGP
from pyro_nngp.inference.svi.dispersion_check import check_augmentation, check_dispersion
from pyro_nngp.kernels import Matern, Matern32
from pyro_nngp.likelihoods import NegativeBinomial, Poisson

generator = torch.Generator().manual_seed(0)
N = 150
X = torch.rand(N, 2, dtype=torch.float64, generator=generator)
RATE = torch.exp(1 + torch.sin(6 * X[:, 0]))
COUNTS = torch.poisson(RATE, generator=generator)
with torch.random.fork_rng():
    torch.manual_seed(0)
    VARYING = torch.poisson(RATE * torch.distributions.Gamma(1.0, 1.0).sample((N,)))  # negative binomial, r = 1


def build(y, kernel=None, likelihood=None, **settings):
    kernel = Matern32(2, 1.0, 0.3) if kernel is None else kernel
    return VNNGP(X[: len(y)], y, kernel, likelihood or Poisson(), num_neighbors=6, **settings)


def rough(smoothness):
    kernel = Matern(2, 1.0, 0.3)
    gp = build(VARYING, kernel)
    with torch.no_grad():
        gp.kernel.smoothness = torch.tensor(smoothness, dtype=torch.float64)
    return gp


@pytest.mark.parametrize("build_it", [lambda: build(VARYING), lambda: rough(0.12)])
def test_counts_that_vary_more_are_reported(build_it):
    expected = r"as Poisson counts do, got [\d.]+ nats .* size [\d.]+: .*NegativeBinomial\(\)"
    with pytest.warns(UserWarning, match=expected):
        check_dispersion(build_it())


@pytest.mark.parametrize(
    "build_it",
    [
        lambda: build(COUNTS),
        lambda: build(VARYING, likelihood=NegativeBinomial()),
        lambda: build(VARYING[:90]),
        lambda: build(VARYING, offset=torch.zeros(N, dtype=torch.float64)),
        lambda: build(torch.stack([VARYING, VARYING], 1)),
        lambda: rough(1.5),
    ],
    ids=["Poisson", "negative binomial", "few", "offset", "outputs", "smooth"],
)
def test_other_counts_are_not(build_it):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_dispersion(build_it())


@pytest.mark.parametrize(("size", "excess"), [(60.0, 3.5), (0.3, 1.9)])
def test_variables_that_know_more_than_counts_tell_are_reported(size, excess):
    gp = LOO(X, COUNTS, Matern32(2, 1.0, 0.3), NegativeBinomial(size), num_neighbors=6)
    gp.solve()
    with pytest.warns(UserWarning, match=r"got ([\d.]+) times as much at total_count=.*VNNGP") as caught:
        check_augmentation(gp)
    found = float(re.search(r"got ([\d.]+) times", str(caught[0].message))[1])
    assert found == pytest.approx(excess, rel=0.3)


def test_sizes_near_the_mean_count_and_other_methods_are_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gp = LOO(X, VARYING, Matern32(2, 1.0, 0.3), NegativeBinomial(2.0), num_neighbors=6)
        gp.solve()
        check_augmentation(gp)
        check_augmentation(build(COUNTS, likelihood=NegativeBinomial(60.0)))
