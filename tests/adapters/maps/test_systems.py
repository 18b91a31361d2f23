"""Reference systems of maps: where they come from, and that files keep them."""

import numpy as np
import pandas as pd
import pytest
import rioxarray
import xarray as xr

import pyro_nngp as nngp
from pyro_nngp.adapters.maps import predict_grid
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian


@pytest.mark.parametrize("ending", [".nc", ".zarr", ".tif"])
def test_files_keep_the_system_of_the_caller(gp, axes, tmp_path, ending):
    found = predict_grid(gp, axes, crs="EPSG:32632", path=tmp_path / f"map{ending}")
    assert found.rio.crs.to_epsg() == 32632
    assert found["east"].attrs["standard_name"] == "projection_x_coordinate"
    assert found["north"].attrs["units"] == "metre"
    found.close()
    again = rioxarray.open_rasterio(tmp_path / "map.tif") if ending == ".tif" else None
    again = xr.open_dataset(tmp_path / f"map{ending}", decode_coords="all") if again is None else again
    assert again.rio.crs.to_epsg() == 32632
    again.close()


def test_the_system_of_points_is_that_of_the_map(axes, tmp_path):
    geopandas = pytest.importorskip("geopandas")
    rng = np.random.default_rng(0)
    points = geopandas.GeoSeries.from_xy(*rng.random((2, 40)), crs="EPSG:25832")
    gp = nngp.Vecchia(points, pd.Series(rng.random(40)), Matern52(2, 1.0, 0.3), Gaussian(0.1), num_neighbors=5)
    found = predict_grid(gp, {"x": axes["east"], "y": axes["north"]}, path=tmp_path / "map.nc")
    assert found.rio.crs.to_epsg() == 25832
    found.close()
    with pytest.raises(ValueError, match="the data in the reference system EPSG:32632, as crs, got EPSG:25832"):
        predict_grid(gp, {"x": axes["east"], "y": axes["north"]}, crs="EPSG:32632")
    degrees = geopandas.GeoSeries.from_xy(*rng.random((2, 40)), crs="EPSG:4326")
    gp = nngp.Vecchia(degrees, pd.Series(rng.random(40)), Matern52(3, 1.0, 9.0), Gaussian(0.1), num_neighbors=5)
    assert predict_grid(gp, {"x": axes["east"], "y": axes["north"]}).rio.crs.to_epsg() == 4326


def test_a_system_that_is_none_is_refused(gp, axes):
    with pytest.raises(ValueError, match="crs to be a coordinate reference system, got 'EPSG:1'. Give an EPSG"):
        predict_grid(gp, axes, crs="EPSG:1")
    assert "spatial_ref" not in predict_grid(gp, axes).coords
    gp.columns = ("east (km)", "north (km)")  # a unit is no system
    kilometers = {"east (km)": axes["east"], "north (km)": axes["north"]}
    assert "spatial_ref" not in predict_grid(gp, kilometers).coords
