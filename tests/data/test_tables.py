"""Arrays and frames in place of tensors: the same numbers, in the caller's kind."""

import geopandas
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
import xarray as xr

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, Poisson

NUM = 60


@pytest.fixture(scope="module")
def stations():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"east": rng.random(NUM), "north": rng.random(NUM)}, index=np.arange(NUM) + 100)
    return frame.assign(height=np.sin(6 * frame.east), birds=rng.poisson(3, NUM))


def process(x, y, likelihood=None):
    likelihood = Gaussian(0.1) if likelihood is None else likelihood
    return nngp.Vecchia(x, y, Matern52(2, 1.0, 0.4), likelihood, num_neighbors=8)


def kinds(frame):
    """Data and new inputs as each kind of table, with the class of the moments."""
    x, y = frame[["east", "north"]], frame["height"]
    coords = {"station": frame.index}
    array = xr.DataArray(x.to_numpy(), dims=("station", "axis"), coords=coords)
    polars = pl.from_pandas(frame)
    points = geopandas.GeoSeries.from_xy(x.east, x.north, index=frame.index)
    return {
        "numpy": (x.to_numpy(), y.to_numpy(), x.to_numpy()[::-1][:5], np.ndarray),
        "pandas": (x, y, x[::-1][:5], pd.Series),
        "polars": (polars[["east", "north"]], polars["height"], polars[["east", "north"]][::-1][:5], pl.Series),
        "xarray": (array, xr.DataArray(y.to_numpy(), dims="station"), array[::-1][:5], xr.DataArray),
        "geopandas": (points, y, points[::-1][:5], pd.Series),
    }


@pytest.mark.parametrize("kind", ["numpy", "pandas", "polars", "xarray", "geopandas"])
def test_tables_give_what_tensors_give_in_their_own_kind(stations, kind):
    x, y, x_new, moments = kinds(stations)[kind]
    inputs = torch.tensor(stations[["east", "north"]].to_numpy())
    expected = process(inputs, torch.tensor(stations["height"].to_numpy()))(inputs.flip(0)[:5])
    gp = process(x, y)
    found = gp(x_new)
    assert all(isinstance(values, moments) for values in found)
    for values, tensor in zip(found, expected, strict=True):
        np.testing.assert_array_equal(values, tensor.detach())
    if moments is pd.Series:
        assert list(found[0].index) == list(stations.index[::-1][:5])
    if moments is xr.DataArray:
        assert list(found[0].station) == list(stations.index[::-1][:5])
    torch.testing.assert_close(gp.predict(x_new).mean, expected[0])
    draws = gp.sample(x_new, 3, seed=0)
    assert isinstance(draws, np.ndarray)
    assert draws.shape == (3, 5)


def test_several_outputs_come_as_a_frame_with_their_names(stations):
    x, y = stations[["east", "north"]], stations[["height", "birds"]]
    gp = process(x, y)
    mean, variance = gp(x[:4])
    assert list(mean.columns) == list(variance.columns) == ["height", "birds"]
    assert list(mean.index) == list(x.index[:4])
    np.testing.assert_array_equal(mean.to_numpy().T, gp(torch.tensor(x.to_numpy()[:4]))[0].detach())
    assert (gp.columns, gp.outputs) == (("east", "north"), ("height", "birds"))


def test_integers_booleans_and_missing_values(stations):
    x = pd.DataFrame({"year": range(NUM), "wet": [True, False] * (NUM // 2)}, index=stations.index)
    gp = nngp.VNNGP(x, stations["birds"], None, Poisson(), num_neighbors=5)
    assert gp.x.dtype == gp.y.dtype == torch.float64
    assert gp.x[:3].tolist() == [[0, 1], [1, 0], [2, 1]]
    holes = pd.DataFrame({"year": pd.array([1, None, 3], dtype="Int64")}, index=stations.index[:3])
    with pytest.raises(ValueError, match="expected x with finite values in column 'year', got 1"):
        process(holes, stations["height"][:3])


def missing_values(y, gone):
    """Targets of which some are missing, as each library marks them; -9999 is below the marks."""
    codes, nulls = (
        np.where(gone, -9999.0, y),
        [None if off else float(value) for value, off in zip(y, gone, strict=True)],
    )
    return {
        "NumPy": np.ma.array(codes, mask=gone),
        "NumPy, integers": np.ma.array(np.where(gone, -9999, 3 * y).astype(int), mask=gone),
        "NumPy, float32": np.ma.array(codes.astype(np.float32), mask=gone),
        "pandas": pd.Series(pd.array(nulls, dtype="Float64")),
        "pandas, booleans": pd.Series(pd.array([v if v is None else v > 0 for v in nulls], dtype="boolean")),
        "polars": pl.Series(nulls),
        "polars, integers": pl.Series([v if v is None else int(3 * v) for v in nulls]),
        "xarray, masked": xr.DataArray(np.ma.array(codes, mask=gone), dims="station"),
        "xarray, _FillValue": xr.DataArray(codes, dims="station", attrs={"_FillValue": -9999.0}),
        "xarray, missing_value": xr.DataArray(
            (3 * codes).astype(np.int16), dims="station", attrs={"missing_value": [3 * -9999]}
        ),
    }


@pytest.mark.parametrize("kind", missing_values(np.ones(1), np.zeros(1, bool)))
def test_missing_values_of_each_library_are_missing(stations, kind):
    x, gone = stations[["east", "north"]].to_numpy(), np.arange(NUM) % 20 == 3
    y = missing_values(stations["height"].to_numpy(), gone)[kind]
    with pytest.warns(UserWarning, match="Vecchia: y is missing in 3 of 60 rows, which are left out"):
        gp = process(x, y)
    np.testing.assert_array_equal(gp.x, x[~gone])
    assert float(gp.y.min()) >= -3
    with pytest.raises(ValueError, match="Vecchia: expected offset to be finite, got 3 NaN or infinite entries"):
        nngp.Vecchia(x, stations["height"].to_numpy(), offset=y)
    with pytest.raises(ValueError, match="expected x_new to be finite, got 3 NaN or infinite entries in 3 of 60 rows"):
        gp(np.ma.array(np.where(gone[:, None], 1e20, x), mask=np.stack([gone, gone & False], 1)))


def test_arrays_that_were_not_decoded_are_unpacked(stations):
    x, y = stations[["east", "north"]].to_numpy(), stations["height"].to_numpy().round(2)
    packed = {"_FillValue": -9999, "scale_factor": 0.01, "add_offset": 5.0}
    codes = np.where(np.arange(NUM) == 3, -9999, (100 * (y - 5)).round()).astype(np.int16)
    with pytest.warns(UserWarning, match="y is missing in 1 of 60 rows"):
        gp = process(x, xr.DataArray(codes, dims="station", attrs=packed))
    np.testing.assert_allclose(gp.y, np.delete(y, 3), atol=1e-9)
    gp = process(x, xr.DataArray((100 * y).round(), dims="station", attrs={"scale_factor": 0.01}))
    np.testing.assert_allclose(gp.y, y, atol=1e-9)


def test_a_dataset_is_no_argument(stations):
    data = xr.Dataset({"height": ("station", stations["height"].to_numpy())})
    x = stations[["east", "north"]].to_numpy()
    match = (
        r"Vecchia: expected y to be an array or a frame, got a Dataset of \['height'\]. Take a variable, as y\[name\]"
    )
    with pytest.raises(TypeError, match=match):
        process(x, data)
    process(x, data["height"])


def test_nulls_of_arrow_are_missing(stations):
    pyarrow = pytest.importorskip("pyarrow")
    x, y = stations[["east", "north"]].to_numpy(), [None, *stations["birds"][1:].tolist()]
    for column in (pyarrow.array(y), pyarrow.chunked_array([pyarrow.array(y)])):
        with pytest.warns(UserWarning, match="y is missing in 1 of 60 rows"):
            gp = process(x, column)
        np.testing.assert_array_equal(gp.y, stations["birds"][1:])


def test_a_mask_that_hides_nothing_changes_nothing(stations):
    x = np.ma.array(stations[["east", "north"]].to_numpy(np.float32), mask=False)
    gp = process(x, stations["height"].to_numpy(np.float32))
    assert gp.x.dtype == torch.float32
    assert isinstance(gp(x[:3])[0], np.ndarray)


def test_new_inputs_take_the_dtype_of_the_data_and_float32_stays(stations):
    gp = process(stations[["east", "north"]].to_numpy(np.float32), stations["height"].to_numpy())
    assert gp.x.dtype == gp.y.dtype == torch.float32
    assert gp(stations[["east", "north"]][:2])[0].dtype == np.float32


def test_one_series_is_one_column(stations):
    gp = nngp.Vecchia(stations["east"], stations["height"], Matern52(1), num_neighbors=4)
    assert gp.x.shape == (NUM, 1)
    assert gp(stations["east"][:3])[0].shape == (3,)


def test_geographic_points_go_to_the_globe(stations):
    points = geopandas.GeoSeries.from_xy(10 + stations.east, 45 + stations.north, crs="EPSG:4326")
    gp = nngp.Vecchia(points, stations["height"], Matern52(3, 1.0, 30.0), num_neighbors=8)
    assert gp.columns == ("x (EPSG:4326)", "y (EPSG:4326)", "z (EPSG:4326)")
    torch.testing.assert_close(gp.x, nngp.data.lon_lat(torch.tensor(np.stack([points.x, points.y], 1))))
    projected = points.to_crs("EPSG:32632")
    flat = process(projected, stations["height"])
    assert flat.columns == ("x (EPSG:32632)", "y (EPSG:32632)")
    with pytest.raises(ValueError, match=r"expected x_new with the columns \['x \(EPSG:32632\)'"):
        flat(projected.to_crs("EPSG:32633"))


def test_other_columns_of_a_geodataframe_follow_the_coordinates(stations):
    frame = geopandas.GeoDataFrame(
        stations[["height"]], geometry=geopandas.points_from_xy(stations.east, stations.north)
    )
    gp = nngp.Vecchia(frame, stations["birds"], Matern52(3), num_neighbors=4)
    assert gp.columns == ("x", "y", "height")
    np.testing.assert_array_equal(gp.x, stations[["east", "north", "height"]])
    areas = frame.set_geometry(frame.buffer(1.0))
    with pytest.raises(TypeError, match=r"expected x to hold points, got \['Polygon'\]. Take centroids first"):
        nngp.Vecchia(areas, stations["birds"])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pd.Timestamp("2020-01-01"), r"expected x\['new'\] to hold numbers, got Datetime.* Give the time since a date"),
        ("low", r"expected x\['new'\] to hold numbers, got String. Leave it out, or encode it"),
    ],
)
def test_a_column_without_numbers_is_named(stations, column, message):
    with pytest.raises(TypeError, match=message):
        process(stations[["east"]].assign(new=column), stations["height"])


def test_strings_and_columns_in_another_order_are_refused(stations):
    x, y = stations[["east", "north"]], stations["height"]
    with pytest.raises(TypeError, match="expected y to hold numbers, got <U3"):
        process(x, np.array(["low"] * NUM))
    with pytest.raises(TypeError, match="expected x to be a torch.Tensor, got list. Convert it with torch.as_tensor"):
        process([[0.0, 1.0]] * NUM, y)
    with pytest.raises(
        ValueError, match=r"expected x_new with the columns \['east', 'north'\], got \['north', 'east'\]"
    ):
        process(x, y)(x[["north", "east"]])
    with pytest.raises(
        TypeError, match=r"expected x to be a torch.Tensor, got DataFrame. .*as_tensor\(x.to_numpy\(\)\)"
    ):
        nngp.NeighborGraph(x, 3)


def test_rows_of_another_index_are_refused(stations):
    x, y = stations[["east", "north"]], stations["height"]
    message = r"expected y with the index of x, got it in another order. Take y.loc\[x.index\], or y.to_numpy\(\)"
    with pytest.raises(ValueError, match=message):
        process(x, y[::-1])
    with pytest.raises(ValueError, match="Vecchia: expected y with the index of x, got another one"):
        process(geopandas.GeoSeries.from_xy(x.east, x.north).reset_index(drop=True), y)
    with pytest.raises(ValueError, match="Vecchia: expected offset with the index of y, got it in another order"):
        nngp.Vecchia(x.to_numpy(), y, offset=y[::-1])
    gp = process(x, y[::-1].loc[x.index])
    assert torch.equal(gp.y, process(x, y.to_numpy()).y)
    with pytest.raises(ValueError, match="Vecchia.predict: expected offset with the index of x_new, got it in another"):
        gp.predict(x[:3], offset=y[:3][::-1])
    with pytest.raises(ValueError, match="Vecchia.extend: expected y with the index of x, got it in another order"):
        gp.extend(x[:3], y[:3][::-1])
    array = xr.DataArray(x.to_numpy(), dims=("station", "axis"), coords={"station": x.index})
    heights = array[:, 0]
    with pytest.raises(ValueError, match=r"got it in another order. Take y.reindex_like\(x\), or y.to_numpy\(\)"):
        process(array, heights[::-1])
    assert torch.equal(process(array, heights[::-1].reindex_like(array)).y, torch.tensor(x["east"].to_numpy()))


def test_numbers_as_names_of_columns(stations, tmp_path):
    x, y = stations[["east", "north"]].set_axis([0, 1], axis=1), stations["height"]
    gp = process(x, y)
    assert gp.columns == ("0", "1")
    gp.save(tmp_path / "model")
    found = nngp.load(tmp_path / "model")(x[:3])[0]
    assert found.name is None
    pd.testing.assert_series_equal(found, gp(x.set_axis(["0", "1"], axis=1)[:3])[0])
    with pytest.raises(ValueError, match=r"expected x_new with the columns \['0', '1'\], got \['1', '0'\]"):
        gp(x[[1, 0]])
    outputs = process(x, x)(x[:3])[0]
    assert list(outputs.columns) == ["0", "1"]
    for names in (["a", "a"], [0, "0"]):
        with pytest.raises(ValueError, match="Vecchia: expected x with a name of its own for each column, got"):
            process(x.set_axis(names, axis=1), y)


def test_saved_methods_know_their_columns(stations, tmp_path):
    gp = process(stations[["east", "north"]], stations["height"])
    gp.save(tmp_path / "model")
    again = nngp.load(tmp_path / "model")
    assert again.columns == ("east", "north")
    pd.testing.assert_series_equal(again(stations[["east", "north"]])[0], gp(stations[["east", "north"]])[0])


def test_tensors_of_integers_become_floats_with_a_note():
    x = torch.arange(30)[:, None]
    y = torch.sin(x[:, 0] / 5)
    with pytest.warns(UserWarning, match="Vecchia: x holds integers, which become torch.float32."):
        gp = nngp.Vecchia(x, y, num_neighbors=5)
    assert gp.x.dtype == torch.float32
    assert torch.equal(gp(x[:3])[0], gp(x[:3].float())[0])
    with pytest.warns(UserWarning, match="VNNGP: x holds integers, which become torch.float64."):
        gp = nngp.VNNGP(x, (y > 0).long(), None, Bernoulli(), num_neighbors=5)
    assert gp.x.dtype == torch.float64


def test_a_missing_input_in_a_frame_names_its_column(stations):
    frame, y = stations[["east", "north"]].copy(), stations["height"].copy()
    frame.iloc[3:5, 1], y.iloc[4] = np.nan, np.nan  # a row without a target is left out whatever its inputs
    with (
        pytest.warns(UserWarning, match="y is missing in 1 of 60 rows"),
        pytest.raises(ValueError, match="Vecchia: expected x with finite values in column 'north', got 1"),
    ):
        process(frame, y)
    gp = process(stations[["east", "north"]], stations["height"])
    frame.iloc[7, 0] = np.inf
    with pytest.raises(ValueError, match=r"predict: expected x_new with finite values in column 'east', got 1"):
        gp.predict(frame)
