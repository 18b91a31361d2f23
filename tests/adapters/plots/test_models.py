"""Plots of models: the numbers on their axes."""

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.adapters.plots import plot_band, plot_dependence, plot_relevance, plot_variogram
from pyro_nngp.kernels import Matern32, Matern52, Warped
from pyro_nngp.likelihoods import Gaussian


def test_a_band_is_sorted_and_two_sd_wide():
    axis = plot_band(torch.tensor([2.0, 1.0]), torch.tensor([5.0, 3.0]), torch.tensor([4.0, 1.0]), label="f")
    np.testing.assert_array_equal(axis.lines[0].get_xydata(), [[1, 3], [2, 5]])
    edge = axis.collections[0].get_paths()[0].vertices
    assert {tuple(each) for each in edge} >= {(1, 1), (1, 5), (2, 1), (2, 9)}
    assert plot_band(np.array([0.0]), np.array([0.0]), np.array([1.0]), axis) is axis


def test_hyperparameters_with_priors_are_at_their_medians():
    x, y = torch.rand(50, 1), torch.rand(50)
    kernel = Matern52(1, 1.0, PyroSample(dist.LogNormal(-1.0, 0.1)))
    gp = nngp.Vecchia(x, y, kernel, Gaussian(0.1), num_neighbors=5)
    fixed = gp.bound().kernel
    place, median = torch.tensor([[0.0], [0.3]]), gp.summary().loc["kernel.lengthscale", "estimate"]
    torch.testing.assert_close(fixed(place, place), Matern52(1, 1.0, median)(place, place).detach())
    assert plot_relevance(gp).patches[0].get_width() == pytest.approx(x.std().item() / median, rel=1e-5)
    plot_variogram(gp)


def test_relevance_is_the_spread_over_the_lengthscale():
    x = torch.rand(60, 2) * torch.tensor([1.0, 100.0])
    kernel = Matern32(1, 1.0, 0.5, active_dims=[0]) * Matern32(1, 1.0, 2000.0, active_dims=[1])
    gp = nngp.Vecchia(x, x[:, 0], kernel, Gaussian(0.1), num_neighbors=5)
    bars = plot_relevance(gp).patches
    expected = (x.std(0) / torch.tensor([0.5, 2000.0])).tolist()
    assert [bar.get_width() for bar in bars] == pytest.approx(expected, rel=1e-5)
    bars = plot_relevance(nngp.Vecchia(x, x[:, 0], kernel + warped(2), Gaussian(0.1), num_neighbors=5)).patches
    assert [bar.get_width() for bar in bars] == pytest.approx(expected, rel=1e-5)


def warped(num_columns):
    return Warped(Matern32(num_columns), lambda x: x[..., :1].expand(*x.shape[:-1], num_columns), 2)


@pytest.mark.parametrize("kernel", [lambda x, z: (-torch.cdist(x, z)).exp(), warped(1), warped(3)])
def test_relevance_needs_lengthscales_of_the_columns(kernel):
    x = torch.rand(30, 2)
    gp = nngp.Vecchia(x, x[:, 0], kernel, Gaussian(0.1), num_neighbors=5)
    with pytest.raises(ValueError, match="expected gp to have a kernel with lengthscales of columns"):
        plot_relevance(gp)


def test_dependence_is_the_average_over_rows_with_its_uncertainty():
    x = torch.rand(300, 2, dtype=torch.float64)
    y = torch.sin(4 * x[:, 0]) + x[:, 1]
    gp = nngp.Vecchia(x, y, Matern52(2, 1.0, 0.6), Gaussian(1e-3), num_neighbors=15)
    axis = plot_dependence(gp, 0, num_values=9, num_rows=30)
    place, curve = axis.lines[0].get_data()
    low, high = x[:, 0].quantile(torch.tensor([0.02, 0.98], dtype=torch.float64))
    assert (place[0], place[-1]) == pytest.approx((low.item(), high.item()))
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:30]
    np.testing.assert_allclose(curve, np.sin(4 * place) + x[rows, 1].mean().item(), atol=0.05)


@pytest.mark.parametrize(
    ("column", "message"),
    [(2, r"expected column to be one of 0\.\.1, got 2"), ("east", "got 'east'"), (True, "got True")],
)
def test_unknown_columns_are_refused(column, message):
    x = torch.rand(40, 2)
    gp = nngp.Vecchia(x, x[:, 0], num_neighbors=5)
    with pytest.raises(ValueError, match=message):
        plot_dependence(gp, column)
    two = nngp.Vecchia(x, x, num_neighbors=5)
    with pytest.raises(ValueError, match="expected gp to have one latent function"):
        plot_dependence(two, 0)
