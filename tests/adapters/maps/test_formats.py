"""Maps in files come back as they were."""

import sys

import numpy as np
import pandas as pd
import pytest
import rioxarray
import xarray as xr

import pyro_nngp as nngp
from pyro_nngp.adapters.maps import predict_grid


@pytest.mark.parametrize("ending", [".nc", ".zarr"])
def test_files_hold_the_map(gp, axes, tmp_path, ending):
    settings = {"quantile_levels": [0.1, 0.9], "num_draws": 2}
    for _ in range(2):  # the second replaces the first
        found = predict_grid(gp, axes, path=tmp_path / f"map{ending}", **settings)
    xr.testing.assert_equal(found.load(), predict_grid(gp, axes, **settings))
    assert [each.name for each in tmp_path.iterdir()] == [f"map{ending}"]
    found.close()


def test_rasters_have_a_band_for_each_variable_and_their_reference_system(gp, axes, tmp_path):
    raster = xr.DataArray(
        np.zeros((5, 7)), dims=("y", "x"), coords={"y": axes["north"][::-1], "x": axes["east"]}
    ).rio.write_crs("EPSG:32632")
    found = predict_grid(gp, raster, columns=["x", "y"], quantile_levels=[0.1, 0.9], path=tmp_path / "map.tif")
    assert found.rio.crs.to_epsg() == 32632
    expected = predict_grid(gp, raster, columns=["x", "y"], quantile_levels=[0.1, 0.9])
    xr.testing.assert_identical(found.load(), expected)
    with rioxarray.open_rasterio(tmp_path / "map.tif") as file:
        assert file.attrs["long_name"] == ("mean", "sd", "quantiles quantile=0.1", "quantiles quantile=0.9")
        assert file.rio.crs.to_epsg() == 32632
        np.testing.assert_array_equal(file[3], expected["quantiles"].sel(quantile=0.9))


def test_a_raster_of_several_outputs_comes_back_with_its_dimensions(axes, tmp_path):
    frame = pd.DataFrame(np.random.default_rng(0).random((40, 2)), columns=["east", "north"])
    gp = nngp.Vecchia(frame, frame.rename(columns={"east": "a", "north": "b"}), num_neighbors=5)
    settings = {"quantile_levels": [0.1, 0.9], "crs": "EPSG:32632"}
    xr.testing.assert_identical(
        predict_grid(gp, axes, path=tmp_path / "map.tif", **settings).load(), predict_grid(gp, axes, **settings)
    )


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("map.txt", ValueError, r"expected path to end in .nc, .zarr, .tif, .tiff, got 'map.txt'"),
        (3, TypeError, "expected path to be a path, got int"),
    ],
)
def test_other_files_are_refused(gp, axes, path, error, message):
    with pytest.raises(error, match=message):
        predict_grid(gp, axes, path=path)


def test_formats_that_need_a_package_say_so(gp, axes, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rioxarray", None)
    with pytest.raises(ImportError, match=r"expected rioxarray to be installed, .*\[maps\]"):
        predict_grid(gp, axes, path=tmp_path / "map.tif")
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"predict_grid: expected xarray to be installed, .*\[maps\]"):
        predict_grid(gp, axes)


def test_a_grid_that_is_no_raster_has_no_geotiff(gp, axes, tmp_path):
    three = {**axes, "t": np.zeros(2)}
    with pytest.raises(ValueError, match="to end in .nc or .zarr for a grid that is no raster, got map.tif"):
        predict_grid(gp, three, path=tmp_path / "map.tif")
