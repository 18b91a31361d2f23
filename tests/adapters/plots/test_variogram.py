"""Variograms: the data's and the model's semivariances, and the envelope."""

import numpy as np
import pytest
import torch

import pyro_nngp as nngp
from pyro_nngp.adapters.plots import plot_variogram
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.means import ConstantMean


@pytest.mark.parametrize("lengthscale", [0.05, [0.03, 0.08]])
def test_the_variogram_of_data_from_the_model_lies_on_its_curve(lengthscale):
    x = torch.rand(3000, 2, dtype=torch.float64)
    kernel = Matern32(2, 2.0, torch.tensor(lengthscale, dtype=torch.float64))
    f = nngp.NNGP(kernel, nngp.NeighborGraph(x, 20)).sample()
    y = 7 + f + 0.5 * torch.randn(3000, dtype=torch.float64)
    gp = nngp.Vecchia(x, y, kernel, Gaussian(0.25), mean=ConstantMean(7.0), num_neighbors=10)
    axis = plot_variogram(gp, num_lags=12, max_distance=0.08)
    seen, model, noise = (line.get_ydata() for line in axis.lines)
    assert len(seen) == len(model) == 12
    np.testing.assert_allclose(seen, model, rtol=0.25)
    np.testing.assert_allclose(seen[:4], model[:4], rtol=0.15)
    assert list(noise) == pytest.approx([0.25, 0.25])
    assert axis.lines[0].get_xdata()[-1] < 0.08
    if lengthscale == 0.05:
        lag = torch.from_numpy(axis.lines[1].get_xdata())
        r = 3**0.5 * lag / 0.05
        np.testing.assert_allclose(model, 0.25 + 2 * (1 - (1 + r) * (-r).exp()), rtol=0.02)


def test_a_variogram_is_of_residuals_with_the_noise_of_each_row():
    generator = torch.Generator().manual_seed(0)
    x, offset, white = torch.rand(60, 1, generator=generator), *(10 * torch.randn(2, 60, generator=generator))
    weights = torch.where(torch.arange(60) < 30, 1.0, 4.0)
    y = 3 + offset + 0.1 * white / weights.sqrt()
    gp = nngp.Vecchia(
        x, y, Matern32(1, 1e-6, 0.5), Gaussian(1.0), mean=ConstantMean(3.0), offset=offset, weights=weights
    )
    _, _, mean_noise = (line.get_ydata() for line in plot_variogram(gp, num_lags=5).lines)
    seen, model, _ = (line.get_ydata() for line in plot_variogram(gp, num_lags=2, max_distance=2.0).lines)
    assert mean_noise[0] == pytest.approx((1 + 1 / 4) / 2)
    np.testing.assert_allclose(seen, model, rtol=0.35)  # of 60 values
    np.testing.assert_allclose(model, mean_noise[0], rtol=0.1)


@pytest.mark.parametrize(
    "build", [lambda x, y: nngp.VNNGP(x, y, None, Poisson()), lambda x, y: nngp.Vecchia(x, torch.stack([y, y], 1))]
)
def test_variograms_are_for_one_gaussian_output(build):
    x = torch.rand(40, 2)
    with pytest.raises(ValueError, match="expected gp to have one kernel, one output and a Gaussian likelihood, got"):
        plot_variogram(build(x, torch.arange(40.0)))


def band(axis):
    """Lags, lower and upper ends of the envelope."""
    vertices = axis.collections[0].get_paths()[0].vertices
    lags = np.unique(vertices[:, 0])
    ends = [vertices[vertices[:, 0] == lag, 1] for lag in lags]
    return lags, np.array([each.min() for each in ends]), np.array([each.max() for each in ends])


def test_the_envelope_holds_data_of_the_model_and_no_others():
    x = torch.rand(400, 2, dtype=torch.float64)
    kernel = Matern32(2, 2.0, torch.tensor(0.05, dtype=torch.float64))
    torch.manual_seed(1)
    f = nngp.NNGP(kernel, nngp.NeighborGraph(x, 20)).sample()
    y = f + 0.5 * torch.randn(400, dtype=torch.float64)
    right = nngp.Vecchia(x, y, kernel, Gaussian(0.25), mean=ConstantMean(0.0), num_neighbors=10)
    axis = plot_variogram(right, num_lags=8)
    (_, low, high), seen = band(axis), axis.lines[0].get_ydata()
    assert ((low <= seen) & (seen <= high)).sum() >= 6  # of 8
    wrong = nngp.Vecchia(x, y, Matern32(2, 2.0, 1.5), Gaussian(0.25), mean=ConstantMean(0.0), num_neighbors=10)
    axis = plot_variogram(wrong, num_lags=8)
    assert (axis.lines[0].get_ydata()[:2] > band(axis)[2][:2]).all()
    assert len(plot_variogram(right, num_draws=0).collections) == 0


def test_distances_in_some_columns_are_of_pairs_near_in_the_others():
    """In the direction of the rough column semivariances rise at once, in that of the smooth one slowly."""
    x = torch.rand(2000, 2, dtype=torch.float64) * torch.tensor([1.0, 1e3], dtype=torch.float64)
    kernel = Matern32(2, 1.0, torch.tensor([0.05, 1e3], dtype=torch.float64))
    y = nngp.NNGP(kernel, nngp.NeighborGraph(x, 20, metric=kernel.lengthscale.detach())).sample()
    gp = nngp.Vecchia(x, y, kernel, Gaussian(1e-4), mean=ConstantMean(0.0), num_neighbors=10)
    gp.columns = ("depth", "day")
    rough, smooth = (plot_variogram(gp, 8, columns=[name], num_draws=0) for name in gp.columns)
    assert (rough.get_xlabel(), smooth.get_xlabel()) == ("distance in depth", "distance in day")
    assert rough.lines[0].get_xdata()[-1] < 0.6
    assert smooth.lines[0].get_xdata()[-1] > 300
    for axis in (rough, smooth):
        seen, model = (line.get_ydata() for line in axis.lines[:2])
        np.testing.assert_allclose(seen, model, rtol=0.5, atol=0.1)
    r = 3**0.5 * rough.lines[0].get_xdata()[1] / 0.05
    assert rough.lines[1].get_ydata()[1] > 0.9 * (1 - (1 + r) * np.exp(-r))  # the others add to it


@pytest.mark.parametrize("columns", [["hour"], [2], [], [-1], True])
def test_columns_that_x_does_not_have(columns):
    x = torch.rand(20, 2)
    gp = nngp.Vecchia(x, x[:, 0], Matern52(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=5)
    with pytest.raises(ValueError, match="columns to be among 0..1"):
        plot_variogram(gp, columns=columns)
    with pytest.raises(ValueError, match="max_distance to have pairs within it, got 1e-12"):
        plot_variogram(gp, max_distance=1e-12)
    with pytest.raises(ValueError, match="num_lags <= 200000, the number of pairs, got 1180591620717411303424"):
        plot_variogram(gp, num_lags=2**70)
