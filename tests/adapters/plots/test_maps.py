"""Plots of maps: what is on their axes."""

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
import xarray as xr

import pyro_nngp as nngp
from pyro_nngp.adapters.maps import predict_grid
from pyro_nngp.adapters.plots import plot_map
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian


@pytest.fixture
def axes():
    return {"east": np.linspace(0, 1, 7), "north": np.linspace(0, 1, 5)}


@pytest.fixture
def gp():
    x = torch.rand(80, 2, dtype=torch.float64)
    gp = nngp.Vecchia(x, torch.sin(6 * x[:, 0]), Matern52(2, 1.0, 0.3), Gaussian(0.01), num_neighbors=8)
    gp.columns = ("east", "north")
    return gp


def test_mean_and_sd_side_by_side_with_the_places(gp, axes):
    found = predict_grid(gp, axes)
    left, right = plot_map(found, gp.x.numpy())
    np.testing.assert_array_equal(left.collections[0].get_array().reshape(5, 7), found["mean"])
    np.testing.assert_array_equal(right.collections[0].get_array().reshape(5, 7), found["sd"])
    assert (left.get_xlabel(), left.get_ylabel()) == ("east", "north")
    np.testing.assert_array_equal(right.lines[0].get_xydata(), gp.x)
    left.figure.canvas.draw()
    assert np.asarray(left.figure.canvas.buffer_rgba())[..., :3].std() > 10


def grid_of(**coords):
    (dim, up), (other, across) = coords.items()
    values = (dim, other), np.arange(len(up) * len(across), dtype=float).reshape(len(up), -1)
    return xr.Dataset({"mean": values, "sd": values}, coords)


def test_axes_have_one_scale_for_lengths_and_the_limits_of_the_grid():
    places = np.array([[410_000.0, 5_210_000.0], [300_000.0, 5_210_000.0], [410_000.0, 5_290_000.0]])
    grid = grid_of(north=np.linspace(5_200_000, 5_230_000, 7), east=np.linspace(400_000, 450_000, 11))
    left, right = plot_map(grid, places)
    for axis in (left, right):
        assert axis.get_aspect() == 1
        assert axis.get_xlim() == (397_500, 452_500)
        assert axis.get_ylim() == (5_197_500, 5_232_500)
    np.testing.assert_array_equal(right.lines[0].get_xydata(), places[:1])  # the others are outside
    left.figure.canvas.draw()
    ticks = [label.get_text() for label in left.get_xticklabels() if label.get_text()]
    assert "400 000" in ticks
    assert len(ticks) <= 6
    boxes = [label.get_window_extent() for label in left.get_xticklabels() if label.get_text()]
    assert all(one.x1 < two.x0 for one, two in pairwise(boxes))
    assert plot_map(grid_of(depth=np.arange(4.0), day=np.arange(90.0)))[0].get_aspect() == "auto"
    assert plot_map(grid_of(lat=np.linspace(59, 61, 4), lon=np.arange(5.0)))[0].get_aspect() == pytest.approx(
        2, rel=1e-3
    )
    projected = grid_of(b=np.arange(4.0), a=np.arange(5.0)).assign_coords(spatial_ref=0)
    projected["spatial_ref"].attrs["crs_wkt"] = "PROJCRS"
    assert plot_map(projected)[0].get_aspect() == 1


def test_a_curve_with_its_band_and_a_panel_for_each_class():
    t = np.linspace(0, 1, 4)
    curve = xr.Dataset({"mean": ("t", t), "sd": ("t", t + 1)}, {"t": t})
    axis = plot_map(curve)
    np.testing.assert_array_equal(axis.lines[0].get_ydata(), t)
    assert axis.get_xlabel() == "t"
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (-3, 5)
    classes = xr.Dataset(
        {"probability": (("category", "y", "x"), np.full((3, 2, 2), 1 / 3))}, {"x": [0, 1], "y": [0, 1]}
    )
    assert len(plot_map(classes)) == 3


def test_other_grids_are_refused(gp, axes, monkeypatch):
    found = predict_grid(gp, axes).expand_dims(time=2)
    with pytest.raises(ValueError, match="expected grid to have one or two dimensions, got"):
        plot_map(found)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="expected matplotlib to be installed"):
        plot_map(found)
