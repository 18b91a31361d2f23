"""The command line: from a table of measurements to maps, pictures and tables."""

import sys

import numpy as np
import pandas as pd
import pytest
import rioxarray
import torch
import xarray as xr

import pyro_nngp as nngp
from pyro_nngp.adapters.command_line import main
from pyro_nngp.inference import DivergenceError, FitResult


@pytest.fixture
def stations(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"lon": 10 + rng.random(90), "lat": 45 + rng.random(90), "day": rng.random(90)})
    frame["rain"] = 100 + 50 * np.sin(6 * frame["lon"]) + rng.standard_normal(90)
    frame["storms"] = rng.poisson(np.exp(np.sin(6 * frame["lon"])))
    frame["note"] = "dry"
    frame.to_csv(tmp_path / "stations.csv", index=False)
    return frame


@pytest.fixture
def krige(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda command: main(["krige", *command.split()])


def untrained(gp, **settings):
    """A result of training that leaves the method as it is."""
    return FitResult(torch.zeros(1), [], 0.0, True, None, "lbfgs", 9, 0, 0)


def test_a_map_with_a_picture_and_the_model(stations, krige, tmp_path, capsys):
    status = krige(
        "stations.csv --x lon lat --y rain --grid 0.1 --out map.nc --plot map.png --save model --quantiles 0.1 0.9"
    )
    assert status == 0
    said = capsys.readouterr().out
    assert "Vecchia on 90 places on the globe (lon, lat)" in said
    assert "121 cells to predict (11 y, 11 x)" in said
    assert "FitResult(converged" in said
    with xr.open_dataset("map.nc", engine="h5netcdf", decode_coords="all") as found:
        assert set(found.data_vars) == {"mean", "sd", "quantiles"}
        assert found["y"][0] > found["y"][-1]
        assert found.rio.crs.to_epsg() == 4326
        truth = 100 + 50 * np.sin(6 * found["x"]) + 0 * found["y"]
        assert float(abs(found["mean"] - truth).mean()) < 5
        gp = nngp.load("model")
        place = nngp.data.lon_lat(torch.tensor([[float(found.x[3]), float(found.y[4])]], dtype=torch.float64))
        assert float(found["mean"][4, 3]) == pytest.approx(gp(place)[0].item(), rel=1e-5)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_map_of_classes_and_a_table_of_their_probabilities(stations, krige):
    stations["soil"] = np.where(stations["lon"] > 10.5, "sand", np.where(stations["lat"] > 45.5, "clay", "loam"))
    stations.loc[:4, "soil"] = None
    stations[:45].to_csv("soil.csv", index=False)
    command = "soil.csv --x lon lat --flat --y soil --likelihood classes --max-seconds 1"
    assert krige(f"{command} --grid 0.25 --out soil.nc --plot soil.png") == 0
    with xr.open_dataset("soil.nc", engine="h5netcdf") as found:
        assert found["category"].values.tolist() == ["clay", "loam", "sand"]
        east = found["probability"].sel(category="sand").sel(lon=10.9, method="nearest")
        assert float(east.mean()) > 0.6
        np.testing.assert_allclose(found["probability"].sum("category"), 1, rtol=1e-5)
    stations[["lon", "lat"]][:4].to_csv("sites.csv", index=False)
    assert krige(f"{command} --at sites.csv --out out.csv") == 0
    assert list(pd.read_csv("out.csv").columns[2:]) == ["probability_clay", "probability_loam", "probability_sand"]


@pytest.mark.slow
def test_an_offset_is_a_column(stations, krige, capsys):
    hours = np.random.default_rng(1).uniform(1, 50, 90)
    stations["log_hours"] = np.log(hours)
    stations["storms"] = np.random.default_rng(2).poisson(3 * hours)
    stations.to_csv("hours.csv", index=False)
    command = "hours.csv --x lon lat --flat --y storms --likelihood poisson --max-seconds 1 --grid 0.3 --out rate.csv"
    assert krige(f"{command} --offset log_hours") == 0
    assert pd.read_csv("rate.csv")["mean"].median() == pytest.approx(3, rel=0.2)
    assert krige(f"{command} --offset hours") == 2
    assert "has no column 'hours', which --offset names" in capsys.readouterr().err
    stations.loc[0, "log_hours"] = np.nan
    stations.to_csv("hours.csv", index=False)
    assert krige(f"{command} --offset log_hours") == 2
    assert "1 rows have no 'log_hours'; remove them." in capsys.readouterr().err
    assert krige("hours.csv --x lon lat --y note --likelihood classes --grid 1 --out x.nc") == 2
    assert "the column 'note' holds 1 classes; two or more are needed" in capsys.readouterr().err


@pytest.mark.slow
def test_counts_at_the_places_of_another_table(stations, krige):
    stations[["lon", "lat"]][:7].to_csv("sites.csv", index=False)
    command = "--y storms --likelihood poisson --flat --at sites.csv --out out.csv --quantiles 0.5 --above 0"
    assert krige(f"stations.csv --x lon lat {command}") == 0
    found = pd.read_csv("out.csv")
    assert list(found.columns) == ["lon", "lat", "mean", "sd", "quantile_0.5", "above_0"]
    assert len(found) == 7
    assert (found["quantile_0.5"] % 1 == 0).all()
    assert found["above_0"].between(0, 1).all()


def test_the_seed_governs_the_draws_at_the_places_of_a_table(stations, krige, monkeypatch):
    monkeypatch.setattr("pyro_nngp.adapters.krige.fit", untrained)
    stations[:20].to_csv("few.csv", index=False)
    found = []
    for _ in range(2):
        assert krige("few.csv --x lon lat --y storms --likelihood poisson --at few.csv --out out.csv --above 1") == 0
        found.append(pd.read_csv("out.csv"))
    pd.testing.assert_frame_equal(*found)
    assert krige("few.csv --x lon lat --y storms --likelihood poisson --at few.csv --out out.csv") == 0
    assert "sd" in pd.read_csv("out.csv")


@pytest.mark.parametrize(("separator", "decimal"), [(";", ","), (";", "."), ("\t", ",")])
def test_other_separators_are_read(stations, krige, monkeypatch, separator, decimal):
    monkeypatch.setattr("pyro_nngp.adapters.krige.fit", untrained)
    found = []
    for sep, point in ((",", "."), (separator, decimal)):
        stations[:20].to_csv("few.csv", index=False, sep=sep, decimal=point)
        assert krige("few.csv --x lon lat --flat --y rain --at few.csv --out out.csv") == 0
        found.append(pd.read_csv("out.csv"))
    pd.testing.assert_frame_equal(*found)


def test_one_input_and_rows_without_measurements(stations, krige, capsys):
    stations.loc[:9, "rain"] = np.nan
    stations.to_csv("holes.csv", index=False)
    assert krige("holes.csv --x day --y rain --grid 0.25 --out map.csv --plot map.png") == 0
    assert "10 of 90 rows have no 'rain' and are left out." in capsys.readouterr().out
    assert list(pd.read_csv("map.csv").columns) == ["day", "mean", "sd"]


def test_the_cells_of_a_raster_and_the_points_of_a_file(stations, krige):
    import geopandas

    points = geopandas.GeoDataFrame(stations, geometry=geopandas.points_from_xy(stations["lon"], stations["lat"]))
    points.set_crs("EPSG:4326").to_file("stations.gpkg")
    raster = xr.DataArray(
        np.ones((3, 4), "f4"), dims=("y", "x"), coords={"y": [46, 45.5, 45], "x": [10, 10.3, 10.6, 11]}
    )
    raster.rio.write_crs("EPSG:4326").rio.to_raster("like.tif")
    assert krige("stations.gpkg --y rain --like like.tif --out map.tif") == 0
    with rioxarray.open_rasterio("map.tif") as found:
        assert found.shape == (2, 3, 4)
        assert found.attrs["long_name"] == ("mean", "sd")
        assert found.rio.crs.to_epsg() == 4326


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("none.csv --x lon lat --y rain --grid 1 --out map.nc", "none.csv: no such file"),
        ("stations.txt --x lon lat --y rain --grid 1 --out map.nc", "expected a name that ends in .csv, .parquet"),
        (
            "stations.csv --x lon lat --y snow --grid 1 --out map.nc",
            "no column 'snow', which --y names; it has lon",
        ),
        ("stations.csv --x lon lot --y rain --grid 1 --out map.nc", "no column 'lot', which --x names"),
        ("stations.csv --x lon lat --y note --grid 1 --out map.nc", "the column 'note' does not hold numbers"),
        ("stations.csv --y rain --grid 1 --out map.nc", "has no points: name its columns of coordinates by --x"),
        (
            "stations.csv --x lon lat day --y rain --grid 1 --out map.nc",
            "two inputs, not for lon, lat, day. Give one for",
        ),
        ("stations.csv --x lon lat --y rain --grid 1 2 3 --out map.nc", "--grid: expected one positive cell size"),
        ("stations.csv --x lon lat --y rain --grid -1 --out map.nc", "--grid: expected one positive cell size"),
        ("stations.csv --x lon lat --y rain --grid 1e-6 --out map.nc", "e+12 cells are more than 1e+08. Take larger"),
        ("stations.csv --x lon lat --y rain --grid 1e-320 --out map.nc", "--grid: inf cells are more than 1e+08"),
        (
            "stations.csv --x lon lat day --y rain --grid 1 1 1 --out map.tif",
            "expected path to end in .nc or .zarr for",
        ),
        (
            "stations.csv --x lon lat day --y rain --grid 1 1 1 --out map.nc --plot map.png",
            "the grid has day, lat, lon",
        ),
        (
            "stations.csv --x lon lat --y rain --grid 1 --out map.nc --plot map.doc",
            "--plot map.doc: expected a name that",
        ),
        ("stations.csv --x lon lat --y rain --grid 1 --out none/map.nc", "none/map.nc: there is no folder none; make"),
        (
            "stations.csv --x lon lat --y rain --grid 1 --out map.nc --save none/gp",
            "--save none/gp: there is no",
        ),
        ("stations.csv --x lon lat --y rain --grid 1 --out map.nc --quantiles 5", "between 0 and 1, such as 0.05 and"),
        ("stations.csv --x lon lat --y rain --at none.csv --out out.csv", "none.csv: no such file"),
        ("stations.csv --x lon lat --y rain --at days.csv --out out.csv", "days.csv has no column 'lon', which --x"),
        (
            "stations.csv --x lon lat --y rain --grid 1 --out map.doc",
            "--out map.doc: a map goes to .nc, .zarr, .tif, .tiff or .csv.",
        ),
        ("stations.csv --x lon lat --y rain --grid 1 --out map.nc --bounds 3 4 1 2", "expected west < east"),
        ("stations.csv --x day --y rain --grid 1 --out map.nc --bounds 1 2 3 4", "west, south, east and north are for"),
        ("stations.csv --x lon lat --y rain --grid 1 --out map.nc --likelihood classes", "holds measurements, not"),
        ("days.csv --x day same --y day --grid 1 --out map.nc", "days.csv has one value of same; a map needs two diff"),
        (
            "a.csv --x lon lat --y rain --at b.csv --out b.csv --plot b.png",
            "--plot: there is no picture of predictions",
        ),
        ("a.csv --x lon lat --y rain --at b.csv --out b.csv --bounds 1 2 3 4", "--bounds: they are of --grid"),
        ("a.csv --x lon lat --y rain --like a.tif --out b.tif --bounds 1 2 3 4", "--bounds: they are of --grid"),
        ("a.csv --y note --likelihood classes --grid 1 --out b.nc --above 1", "labels have neither; the results are"),
        ("stations.csv --x lon lat --y rain --at stations.csv --out map.nc", "go to .csv or .parquet"),
        ("stations.csv --x lon lat --y rain --grid 1 --out map.nc --blocks 3", "--blocks: they are the folds of --sc"),
        ("stations.csv --x lon lat --y rain --grid 1 --out map.nc --crs EPSG:1", "--crs EPSG:1: no coordinate refere"),
        ("stations.csv --x lon lat day --y rain --grid 1 --out a.nc --crs EPSG:4326", "have two inputs, longitude"),
        (
            "a.csv --x lon lat --y rain --at b.csv --out c.csv --flat --crs EPSG:1",
            "no effect on a table of predictions",
        ),
        ("stations.csv --x lon lat --y storms --grid 1 --out map.nc --likelihood lognormal", "LogNormal: expected y"),
        ("stations.csv --x lon lat --y rain --grid 1 --likelihood poisson --out map.nc", "Poisson: expected y"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_training(stations, krige, capsys, monkeypatch, command, message):
    monkeypatch.setattr("pyro_nngp.adapters.krige.fit", None)
    stations[["day"]].assign(same=1).to_csv("days.csv", index=False)
    assert krige(command) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ")
    assert message in said


def test_rows_without_a_place_are_an_error(stations, krige, capsys):
    stations.loc[:2, "lat"] = np.nan
    stations.to_csv("holes.csv", index=False)
    assert krige("holes.csv --x lon lat --y rain --grid 1 --out map.nc") == 2
    assert "3 rows have no 'lat'; remove them" in capsys.readouterr().err
    stations.assign(rain=np.nan).to_csv("holes.csv", index=False)
    assert krige("holes.csv --x lon day --y rain --grid 1 --out map.nc") == 2
    assert "no row of holes.csv has a value in the column 'rain'" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["pandas", "xarray", "pyproj"])
def test_a_package_that_is_missing_is_named(stations, krige, capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert krige("stations.csv --x lon lat --y rain --grid 0.5 --out map.nc") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"expected {package} to be installed, got no such package. Run pip install 'pyro-nngp[maps]'" in said


def test_a_projected_system_is_kept_and_scores_are_printed(stations, krige, capsys):
    stations[["lon", "lat"]] = (stations[["lon", "lat"]] - [10, 45]) * 1e4 + [4e5, 5e6]
    stations.rename(columns={"lon": "east", "lat": "north"}).to_csv("utm.csv", index=False)
    command = "utm.csv --x east north --y rain --crs EPSG:32632 --grid 2000 --out map.tif --scores 4 --blocks 3000"
    assert krige(command) == 0
    said = capsys.readouterr().out
    assert "CrossValidation of 90 rows in 4 folds, hyperparameters kept" in said
    assert "coverage" in said
    with rioxarray.open_rasterio("map.tif") as found:
        assert found.rio.crs.to_epsg() == 32632
        assert abs(found.rio.resolution()[0]) == 2000


def test_skewed_measurements_get_a_hint(stations, krige, monkeypatch, capsys):
    monkeypatch.setattr("pyro_nngp.adapters.krige.fit", untrained)
    stations["arsenic"] = np.exp(0.8 * np.random.default_rng(3).standard_normal(90))
    stations.to_csv("skewed.csv", index=False)
    command = "skewed.csv --x lon lat --flat --grid 0.5 --out map.csv"
    assert krige(f"{command} --y arsenic") == 0
    assert "'arsenic' is positive and skewed" in capsys.readouterr().out
    for other in ("--y rain", "--y arsenic --likelihood lognormal", "--y arsenic --likelihood gamma"):
        assert krige(f"{command} {other}") == 0
        assert "hint" not in capsys.readouterr().out


def test_an_exposure_without_its_logarithm_is_an_error_at_once(stations, krige, monkeypatch, capsys):
    monkeypatch.setattr("pyro_nngp.adapters.krige.fit", None)
    stations["hours"] = np.linspace(1, 90, 90)
    stations.to_csv("hours.csv", index=False)
    command = "hours.csv --x lon lat --flat --y storms --likelihood poisson --offset hours --grid 0.5 --out map.csv"
    assert krige(command) == 2
    said = capsys.readouterr().err
    assert "--offset hours: VNNGP: offset has values of" in said
    assert "Give a column of logarithms." in said


def ending(losses, error=None, **changes):
    """A training run with such losses, which may end by an error."""

    def run(gp, callback, **settings):
        for step, loss in enumerate(losses, 1):
            callback(step, loss)
        if error is not None:
            raise error
        ended_by = changes.get("ended_by")
        return FitResult(torch.tensor(losses), [], 0.0, ended_by is None, ended_by, "lbfgs", 9, 0, 0)

    return run


@pytest.mark.parametrize(
    ("run", "status", "message"),
    [
        (ending([5.0, float("nan")]), 1, "after 2 steps of training the loss is nan nats per row. There is no map."),
        (ending([5.0] * 50 + [2e4]), 1, "after 51 steps of training the loss is 2e+04 nats per row"),
        (ending([2e4, 11.0]), 1, "a loss of 11 nats per row, where a model without places has about 4.98"),
        (ending([], ended_by="the time limit"), 1, "--max-seconds 2: training made no step in that time, so there is"),
        (ending([5.0], DivergenceError("no loss")), 1, "error: no loss"),
        (ending([5.0], KeyboardInterrupt()), 130, "Interrupted in training; nothing was written."),
        (ending([5.0], ended_by="Ctrl-C"), 130, "after 1 steps of training; no map was written; the model as it is"),
    ],
)
def test_training_that_fails_or_is_interrupted_writes_no_map(
    stations, krige, tmp_path, monkeypatch, capsys, run, status, message
):
    monkeypatch.setattr("pyro_nngp.adapters.krige.fit", run)
    before = {path.name for path in tmp_path.iterdir()}
    command = (
        "stations.csv --x lon lat --flat --y rain --grid 0.5 --out map.nc --plot map.png --save gp --max-seconds 2"
    )
    assert krige(command) == status
    assert message in capsys.readouterr().err
    written = {path.name for path in tmp_path.iterdir()} - before
    assert written == ({"gp.interrupted"} if "after 1 steps" in message else set())
    if written:
        assert nngp.load("gp.interrupted").num_data == 90
