"""Intervals of parameters without priors: ends, and what they say of themselves."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from builders import uniform

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern, Matern32
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.means import LinearMean
from pyro_nngp.models.base.information import of_conditionals


def data(n=60):
    x = uniform(n, seed=1)
    generator = torch.Generator().manual_seed(0)
    return x, torch.sin(6 * x[:, 0]) + 0.3 * torch.randn(n, dtype=x.dtype, generator=generator)


def test_intervals_are_normal_on_the_logarithmic_scale_and_named_by_columns():
    x, y = data()
    frame = pd.DataFrame(x.numpy(), columns=["easting", "northing"])
    kernel = Matern32(2, 1.0, torch.tensor([0.3, 0.5])).double()
    gp = nngp.Vecchia(frame, pd.Series(y.numpy()), kernel, Gaussian(0.1), num_neighbors=10, mean=LinearMean(2))
    gp.solve()
    table = gp.summary(0.8)
    assert list(table.index) == [
        "kernel.variance",
        "kernel.lengthscale[easting]",
        "kernel.lengthscale[northing]",
        "likelihood.variance",
        "mean.value",
        "mean.slope[easting]",
        "mean.slope[northing]",
    ]
    found = of_conditionals(gp)
    wide, shift = 1.2815516 * found.cov.diagonal().sqrt()[1].item(), found.shift[1].item()
    row = table.loc["kernel.lengthscale[easting]"]
    ends = [0.3 * math.exp(shift - wide), 0.3 * math.exp(shift + wide)]
    assert [row["lower"], row["upper"]] == pytest.approx(ends, rel=1e-5)
    assert (row["unit"], row["note"]) == ("easting", "")
    assert table.loc["kernel.variance", "unit"] == "y squared"
    level = table.loc["mean.value"]
    assert level["note"] == "level by generalized least squares"
    far = gp(x[:1] * 0 + gp.mean.center)[1]  # at the center f has at least the uncertainty that is left there
    assert far > 0
    assert level["upper"] - level["estimate"] == pytest.approx(level["estimate"] - level["lower"])
    assert not table[["lower", "upper"]].isna().any(axis=None)


def test_slopes_have_the_errors_of_generalized_least_squares_averaged_over_hyperparameters():
    x, y = data()
    gp = nngp.LOO(x, y, Matern32(2, 0.5, 0.3).double(), Gaussian(0.1), num_neighbors=59, mean=LinearMean(2))
    gp.solve()
    averaged = gp.summary()
    gp.kernel.requires_grad_(False)
    gp.likelihood.requires_grad_(False)
    basis, cov = gp.mean.basis(x), gp.kernel(x, x).detach() + 0.1 * torch.eye(60)
    spread = torch.linalg.inv(basis.T @ torch.cholesky_solve(basis, torch.linalg.cholesky(cov))).diagonal().sqrt()
    table = gp.summary()
    for name, want in zip(("mean.value", "mean.slope[0]", "mean.slope[1]"), spread, strict=True):
        assert table.loc[name, "upper"] - table.loc[name, "estimate"] == pytest.approx(1.959964 * float(want), rel=1e-4)
        assert averaged.loc[name, "upper"] > table.loc[name, "upper"]
        assert averaged.loc[name, "upper"] - averaged.loc[name, "estimate"] < 4 * 1.959964 * float(want)
    assert set(table["note"][:3]) == {"fixed"}


def test_values_that_data_do_not_narrow_say_so():
    """A second column without effect, and a smoothness beyond what noisy data can tell."""
    x, y = data()
    kernel = Matern(2, 1.0, torch.tensor([0.3, 1e4]).double(), smoothness=4.999).double()
    table = nngp.Vecchia(x, y, kernel, Gaussian(0.1), num_neighbors=10).summary()
    for name in ("kernel.lengthscale[1]", "kernel.smoothness"):
        assert table.loc[name, ["lower", "upper", "note"]].tolist() == [0.0, math.inf, "not identified"]
    assert table.loc["kernel.lengthscale[0]", "note"] == ""
    assert not table[["lower", "upper"]].isna().any(axis=None)


def test_what_has_no_interval_says_why():
    x, y = data(40)
    frozen = Matern32(2, 1.0, 0.3).double()
    frozen.variance_unconstrained.requires_grad_(False)
    gp = nngp.Vecchia(x, y, frozen, Gaussian(0.1), num_neighbors=10)
    gp.mean.requires_grad_(False)
    notes = gp.summary()["note"]
    assert notes["kernel.variance"] == "fixed"
    assert notes["mean.value"] == "taken as it is in predictions"
    labels = nngp.LOO(x, (y > 0).to(y), Matern32(2, 1.0, 0.3).double(), Bernoulli(), num_neighbors=10)
    assert labels.summary()["note"]["kernel.variance"].startswith("no interval: LOO has none")
    assert np.isnan(labels.summary()["lower"]["kernel.variance"])
