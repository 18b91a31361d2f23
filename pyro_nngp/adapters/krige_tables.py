"""Tables, rasters and grids of the command line: from files to tensors, and to a table of predictions.

``given`` are the arguments of :mod:`pyro_nngp.adapters.command_line`. Symbols: N rows, D inputs.
"""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pyro_nngp._checks import import_extra
from pyro_nngp._random import seeded
from pyro_nngp.data import lon_lat

if TYPE_CHECKING:
    from pandas import DataFrame

_READERS = {".csv": "read_csv", ".parquet": "read_parquet", ".gpkg": "read_file", ".geojson": "read_file"}
_MARGIN = 0.02  # around the data, relative to their extent
_MOST_CELLS = 10**8  # of a grid: hours of predictions, and gigabytes


class UsageError(Exception):
    """An error of the arguments or files, with a message of one line."""


def extra(name: str) -> Any:
    """A module that the extra of maps installs."""
    return import_extra("krige", name, "maps")


def read_table(path: Path) -> "DataFrame":
    """Read a table in any of the formats."""
    if path.suffix not in _READERS:
        raise UsageError(f"{path}: expected a name that ends in {', '.join(_READERS)}.")
    if not path.is_file():
        raise UsageError(f"{path}: no such file.")
    library = extra("geopandas") if path.suffix in (".gpkg", ".geojson") else extra("pandas")
    return getattr(library, _READERS[path.suffix])(path, **(_dialect(path) if path.suffix == ".csv" else {}))


def _dialect(path: Path) -> dict[str, str]:
    """Separator and decimal point of a .csv file, by its first two lines: spreadsheets also write 1,5;2,5."""
    with path.open(encoding="utf-8", errors="replace") as file:
        header, first = file.readline(), file.readline()
    separators = [separator for separator in ";\t|" if separator in header]
    if "," in header or not separators:
        return {}
    return {"sep": separators[0], "decimal": "," if re.search(r"\d,\d", first) else "."}


def read_inputs(table: "DataFrame", given: argparse.Namespace, path: Path) -> tuple[np.ndarray, list[str]]:
    """Inputs (N, D) and their names: the columns of --x, or the points of a file that has geometries."""
    if given.x is None:
        if not hasattr(table, "geometry"):
            raise UsageError(f"{path} has no points: name its columns of coordinates by --x.")
        points = table.geometry
        names = ["lon", "lat"] if points.crs is not None and points.crs.is_geographic else ["x", "y"]
        return np.stack([points.x, points.y], 1), names
    x = np.stack([read_numbers(table, name, path, "--x") for name in given.x], 1)
    for name, column in zip(given.x, x.T, strict=True):
        if missing := int((~np.isfinite(column)).sum()):
            raise UsageError(f"{path}: {missing} rows have no {name!r}; remove them.")
    return x, list(given.x)


def read_system(table: "DataFrame", given: argparse.Namespace) -> Any:
    """The coordinate reference system of the inputs: of --crs, or of a file's points; None if neither has one."""
    of_points = getattr(table, "crs", None) if given.x is None else None
    if given.crs is None:
        return of_points
    pyproj = extra("pyproj")
    try:
        system = pyproj.CRS.from_user_input(given.crs)
    except pyproj.exceptions.CRSError as error:
        raise UsageError(
            f"--crs {given.crs}: no coordinate reference system; give a code such as EPSG:32632."
        ) from error
    if of_points is not None and of_points != system:
        raise UsageError(f"--crs {given.crs}: the points of {given.table} are in {name_of(of_points)}; leave it out.")
    return system


def name_of(system: Any) -> str:
    """The code of a reference system; EPSG:4326, degrees, without one."""
    authority = ("EPSG", "4326") if system is None else system.to_authority()
    return system.to_wkt() if authority is None else ":".join(authority)


def read_targets(table: "DataFrame", given: argparse.Namespace) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Measurements as floats, and None; or the numbers of labels, and the sorted labels."""
    if given.likelihood != "classes" or given.y not in table.columns:
        return read_numbers(table, given.y, given.table, "--y"), None
    labels = table[given.y]
    if labels.dtype.kind == "f" and (labels.dropna() % 1 != 0).any():
        raise UsageError(
            f"{given.table}: the column {given.y!r} holds measurements, not classes; leave --likelihood out."
        )
    classes = tuple(sorted({str(label) for label in labels.dropna()}))
    if len(classes) < 2:
        raise UsageError(f"{given.table}: the column {given.y!r} holds {len(classes)} classes; two or more are needed.")
    places = {label: float(number) for number, label in enumerate(classes)}
    return labels.map(lambda label: places.get(str(label), math.nan)).to_numpy(float), classes


def read_numbers(table: "DataFrame", name: str, path: Path, option: str) -> np.ndarray:
    """A column of the table as floats."""
    pandas = extra("pandas")
    if name not in table.columns:
        have = ", ".join(map(str, table.columns))
        raise UsageError(f"{path} has no column {name!r}, which {option} names; it has {have}.")
    try:
        return pandas.to_numeric(table[name]).to_numpy(float)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: the column {name!r} does not hold numbers ({error}).") from error


def is_globe(names: Sequence[str]) -> bool:
    """Whether two columns are longitude and latitude, by their names."""
    first, second = (name.lower() for name in names) if len(names) == 2 else ("", "")
    return first.startswith(("lon", "lng")) and second.startswith("lat")


def placed(x: np.ndarray, on_globe: bool) -> torch.Tensor:
    """Inputs of the method, (N, D) or (N, 3): degrees become places in space."""
    places = torch.from_numpy(x)
    return lon_lat(places) if on_globe else places


def make_template(given: argparse.Namespace, x: np.ndarray, names: Sequence[str], on_globe: bool) -> Any:
    """The grid to predict on."""
    extra("xarray")
    axes = ["x", "y"] if on_globe else list(names)
    if given.like is not None:
        raster = extra("rioxarray").open_rasterio(given.like, masked=True)
        return raster if on_globe else raster.rename({"x": names[0], "y": names[1]} if len(names) == 2 else {})
    if len(given.grid) == 1 and len(axes) > 2:
        cure = "Give one for each, or predict where all of them are known, at the places of a table, by --at."
        raise UsageError(f"--grid: one cell size is for one or two inputs, not for {', '.join(names)}. {cure}")
    steps = given.grid * (len(axes) if len(given.grid) == 1 else 1)
    if len(steps) != len(axes) or not all(0 < step < math.inf for step in steps):
        raise UsageError(f"--grid: expected one positive cell size, or one for each of {', '.join(names)}.")
    low, high = x.min(0), x.max(0)
    low, high = low - _MARGIN * (high - low), high + _MARGIN * (high - low)
    if given.bounds is not None:
        if len(axes) != 2:
            raise UsageError("--bounds: west, south, east and north are for two inputs.")
        low, high = np.array(given.bounds[:2]), np.array(given.bounds[2:])
        if not (high > low).all():
            raise UsageError("--bounds: expected west < east and south < north.")
    if not (high > low).all():
        single = ", ".join(name for name, more in zip(names, high > low, strict=True) if not more)
        raise UsageError(
            f"--grid: {given.table} has one value of {single}; a map needs two different places, or --bounds."
        )
    extents = zip(low.tolist(), high.tolist(), steps, strict=True)
    if (count := math.prod((top - bottom) / step for bottom, top, step in extents)) > _MOST_CELLS:
        cure = "Take larger cells, or a part of the map by --bounds."
        raise UsageError(f"--grid: {count:.3g} cells are more than {_MOST_CELLS:.0e}. {cure}")
    sizes = [math.ceil((top - bottom) / step) for bottom, top, step in zip(low, high, steps, strict=True)]
    parts = zip(axes, low, steps, sizes, strict=True)
    centers = {axis: bottom + step * (np.arange(size) + 0.5) for axis, bottom, step, size in parts}
    if len(axes) != 2:
        return centers
    across, up = centers
    return extra("xarray").Dataset(coords={up: centers[up][::-1], across: centers[across]})  # north is the first row


def predict_table(gp: Any, given: argparse.Namespace, table: "DataFrame", x_new: torch.Tensor) -> None:
    """Append predictions to the table of --at, and write it."""
    from pyro_nngp.distributions.quantiles import exceedance, quantiles

    levels, thresholds = (torch.tensor(values, dtype=gp.x.dtype) for values in (given.quantiles, given.above))
    with torch.no_grad(), seeded(given.seed, gp.x):
        predictive = gp.predict(x_new)
        if gp.classes is None:
            columns = {"mean": predictive.mean, "sd": predictive.variance.sqrt()}
            columns |= {f"quantile_{p:g}": each for p, each in zip(levels, quantiles(predictive, levels), strict=True)}
            above = zip(thresholds, exceedance(predictive, thresholds), strict=True)
            columns |= {f"above_{value:g}": each for value, each in above}
        else:
            columns = {f"probability_{name}": each for name, each in zip(gp.classes, predictive.probs.mT, strict=True)}
    predicted = table.assign(**{name: values.numpy() for name, values in columns.items()})
    if given.out.suffix == ".csv":
        predicted.to_csv(given.out, index=False)
    else:
        predicted.to_parquet(given.out)
    print(f"wrote {given.out}: {len(predicted)} rows")


__all__ = [
    "UsageError",
    "extra",
    "is_globe",
    "make_template",
    "name_of",
    "placed",
    "predict_table",
    "read_inputs",
    "read_numbers",
    "read_system",
    "read_table",
    "read_targets",
]
