"""Inputs of the cells of a grid: coordinates, covariates, masks, places on the globe."""

import geopandas
import numpy as np
import pytest
import rioxarray  # noqa: F401 - rasters know their reference system
import torch
import xarray as xr

import pyro_nngp as nngp
from pyro_nngp.adapters.maps import predict_grid
from pyro_nngp.adapters.maps.cells import Cells
from pyro_nngp.data import lon_lat
from pyro_nngp.kernels import Matern52

X = torch.zeros(1, 2, dtype=torch.float64)


def test_tiles_cover_each_cell_once_with_its_inputs():
    cells = Cells({"a": np.arange(300.0), "b": np.arange(150.0)}, ["b", "a"], None, None, X)
    assert (cells.dims, cells.shape) == (("b", "a"), (150, 300))
    seen = np.zeros(cells.shape, int)
    for tile in cells.tiles:
        seen[tile] += 1
        inside, inputs = cells.at(tile)
        assert inside.all()
        assert inside.size <= 128**2
        b, a = np.meshgrid(np.arange(150.0)[tile[0]], np.arange(300.0)[tile[1]], indexing="ij")
        np.testing.assert_array_equal(inputs, np.stack([b.ravel(), a.ravel()], 1))
    assert (seen == 1).all()


def test_covariates_and_masks_leave_cells_out():
    height = xr.DataArray(np.arange(12.0).reshape(3, 4), dims=("y", "x"), coords={"y": [3, 2, 1], "x": range(4)})
    height[0, 1] = np.nan
    mask = xr.DataArray([True, True, True, False], dims="x")
    cells = Cells(xr.Dataset({"height": height}), ["x", "height"], None, mask, X)
    inside, inputs = cells.at(cells.everything)
    expected = np.ones((3, 4), bool)
    expected[0, 1] = expected[:, 3] = False
    np.testing.assert_array_equal(inside, expected)
    assert inputs.tolist() == [[0, 0], [2, 2], [0, 4], [1, 5], [2, 6], [0, 8], [1, 9], [2, 10]]


def test_fill_values_and_masked_axes_are_no_inputs():
    raster = xr.DataArray(
        np.array([[0, -99], [1, 2]], np.int16), {"y": [0, 1], "x": [0, 1]}, ("y", "x"), "height", {"_FillValue": -99}
    )
    inside, inputs = Cells(raster, ["x", "height"], None, raster.notnull(), X).at((slice(0, 2), slice(0, 2)))
    np.testing.assert_array_equal(inside, [[True, False], [True, True]])
    assert inputs.tolist() == [[0, 0], [0, 1], [1, 2]]
    axis = np.ma.array([0.0, 1.0, 1e20], mask=[False, False, True])
    with pytest.raises(
        ValueError, match=r"expected template\['x'\] to be finite, got 1 masked, NaN or infinite entries"
    ):
        Cells({"x": axis, "y": axis[:2]}, ["x", "y"], None, None, X)


def test_names_of_columns_may_come_as_an_array():
    template = {"a": [0.0, 1.0], "b": [2.0, 3.0]}
    cells = Cells(template, np.array(["b", "a"]), None, None, X)
    assert (
        cells.at(cells.everything)[1].tolist()
        == Cells(template, ["b", "a"], None, None, X).at(cells.everything)[1].tolist()
    )


def test_masked_cells_of_a_map_are_nan(gp, axes):
    grid = xr.Dataset(coords=axes)
    mask = (grid.east + grid.north) < 1.2
    found = predict_grid(gp, grid, mask=mask)
    np.testing.assert_array_equal(found["mean"].notnull(), mask.transpose(*found["mean"].dims))
    nowhere = predict_grid(gp, grid, mask=mask & False, quantile_levels=[0.5], num_draws=2)
    somewhere = predict_grid(gp, grid, mask=mask, quantile_levels=[0.5], num_draws=2)
    assert nowhere.sizes == somewhere.sizes
    for name, array in somewhere.data_vars.items():
        assert nowhere[name].dims == array.dims
        assert nowhere[name].isnull().all()


def test_a_band_of_size_one_is_left_out(gp, axes):
    raster = xr.DataArray(np.zeros((1, 5, 7)), dims=("band", "north", "east"), coords={"band": [1], **axes})
    assert predict_grid(gp, raster)["mean"].dims == ("north", "east")


@pytest.mark.slow
def test_places_on_the_globe_and_their_reference_system():
    places = geopandas.GeoSeries.from_xy(10 + torch.rand(40).numpy(), 45 + torch.rand(40).numpy(), crs="EPSG:4326")
    gp = nngp.Vecchia(places, torch.rand(40).double().numpy(), Matern52(3, 1.0, 50.0), num_neighbors=6)
    raster = xr.DataArray(np.zeros((3, 2)), dims=("y", "x"), coords={"y": [45.1, 45.2, 45.3], "x": [10.1, 10.2]})
    found = predict_grid(gp, raster.rio.write_crs("EPSG:4326"))["mean"]
    expected = gp(lon_lat(torch.tensor([[10.2, 45.3]], dtype=torch.float64)))[0]
    assert float(found[2, 1]) == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(
        ValueError, match="expected the template in the reference system EPSG:4326, as the data, got EPSG:32632"
    ):
        predict_grid(gp, raster.rio.write_crs("EPSG:32632"))
    flat = nngp.Vecchia(places.to_crs("EPSG:32632"), torch.rand(40).double().numpy(), num_neighbors=6)
    assert predict_grid(flat, raster * 0)["sd"].shape == (3, 2)


@pytest.mark.parametrize(
    ("template", "columns", "error", "message"),
    [
        (
            np.zeros((3, 3)),
            None,
            TypeError,
            "expected template to be an xarray DataArray or Dataset or a mapping, got n",
        ),
        ({"a": np.zeros((2, 2))}, ["a", "b"], ValueError, r"expected template\['a'\] of one dimension, got \(2, 2\)"),
        ({"a": [], "b": [0.0]}, ["a", "b"], ValueError, "expected template to have cells"),
        ({"a": [0.0], "b": [0.0]}, None, ValueError, "expected columns to name the 2 inputs, got None"),
        ({"a": [0.0], "b": [0.0]}, ["a"], ValueError, r"expected columns to name the 2 inputs, got \['a'\]"),
        (
            {"a": [0.0], "b": [0.0]},
            ["a", "c"],
            ValueError,
            r"to have the variable 'c', got \['a', 'b'\]",
        ),
        ({"a": ["low"], "b": [0.0]}, ["a", "b"], TypeError, r"expected template\['a'\] to hold numbers"),
    ],
)
def test_malformed_templates_are_refused(template, columns, error, message):
    with pytest.raises(error, match=message):
        Cells(template, columns, None, None, X)


@pytest.mark.parametrize(
    "mask", [np.ones((5, 7), bool), xr.DataArray([1.0], dims="east"), xr.DataArray([True], dims="z")]
)
def test_masks_are_booleans_on_the_grid(gp, axes, mask):
    with pytest.raises(TypeError, match="expected mask to be a DataArray of booleans on north, east, got"):
        predict_grid(gp, axes, mask=mask)
