"""A command line for the main job: from a table of measurements to a map with its uncertainty.

See ``python -m pyro_nngp krige --help``.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pyro_nngp import fit, likelihoods, models
from pyro_nngp._checks import import_extra
from pyro_nngp._matplotlib import pyplot
from pyro_nngp._random import seeded
from pyro_nngp.adapters.maps import predict_grid
from pyro_nngp.adapters.maps.cells import Cells
from pyro_nngp.adapters.maps.formats import check_format
from pyro_nngp.adapters.plots import plot_map
from pyro_nngp.data import lon_lat

if TYPE_CHECKING:
    from pandas import DataFrame

_LIKELIHOODS = {
    "gaussian": likelihoods.Gaussian,
    "student-t": likelihoods.StudentT,
    "poisson": likelihoods.Poisson,
    "negative-binomial": likelihoods.NegativeBinomial,
    "bernoulli": likelihoods.Bernoulli,
    "classes": likelihoods.Categorical,
}
_METHODS = {"vecchia": models.Vecchia, "loo": models.LOO, "vnngp": models.VNNGP}
_READERS = {".csv": "read_csv", ".parquet": "read_parquet", ".gpkg": "read_file", ".geojson": "read_file"}
_MARGIN = 0.02  # around the data, relative to their extent
_MOST_CELLS = 10**8  # of a grid: hours of predictions, and gigabytes

_EXAMPLES = """
examples:
  temperature on a grid of a tenth of a degree, with a picture:
    python -m pyro_nngp krige stations.csv --x lon lat --y temperature --grid 0.1 --out map.nc --plot map.png
  counts at places of another table:
    python -m pyro_nngp krige survey.csv --x east north --y birds --likelihood negative-binomial \\
        --at sites.csv --out predicted.csv
  birds per hour from counts in different times of watching (the logarithm of hours is a column):
    python -m pyro_nngp krige survey.csv --x east north --y birds --offset log_hours --likelihood poisson \\
        --grid 100 --out birds.nc
  probabilities of the classes in a column of labels:
    python -m pyro_nngp krige soil.csv --x east north --y type --likelihood classes --grid 100 --out soil.nc
  a GeoTIFF on the cells of another raster, from the points of a GeoPackage:
    python -m pyro_nngp krige wells.gpkg --y depth --like elevation.tif --out depth.tif
"""


class _UsageError(Exception):
    """An error of the arguments or files, with a message of one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        _krige(given)
    except KeyboardInterrupt:
        print("\nInterrupted; the same command continues the map where it is.", file=sys.stderr)
        return 130
    except (_UsageError, ValueError, TypeError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pyro_nngp", description="Nearest-neighbor Gaussian processes.")
    commands = parser.add_subparsers(required=True, metavar="command")
    krige = commands.add_parser(
        "krige",
        help="a map with its uncertainty from a table of measurements",
        description="Fit a process to a table of measurements, and predict on a grid, a raster or at other places. "
        "Hyperparameters are learned; nothing has to be standardized.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = krige.add_argument
    add("table", type=Path, help="measurements: .csv, .parquet, .gpkg or .geojson")
    add("--x", nargs="+", metavar="COLUMN", help="inputs, such as lon lat or east north; left out, a file's points")
    add("--y", required=True, metavar="COLUMN", help="what was measured; rows without it are left out")
    where = krige.add_mutually_exclusive_group(required=True)
    where.add_argument("--grid", type=float, nargs="+", metavar="STEP", help="cell size, one number or one per input")
    where.add_argument("--like", type=Path, metavar="RASTER", help="predict at the cells of this raster")
    where.add_argument("--at", type=Path, metavar="TABLE", help="predict at the places of this table")
    add("--bounds", type=float, nargs=4, metavar=("W", "S", "E", "N"), help="of the grid; default: the data's")
    add("--out", type=Path, required=True, help=".nc, .zarr, .tif or .csv of a map, .csv or .parquet of a table")
    add("--plot", type=Path, metavar="PICTURE", help="also a picture of mean and standard deviation, .png or .pdf")
    add(
        "--likelihood",
        choices=_LIKELIHOODS,
        default="gaussian",
        help="of the measurements (default: gaussian); classes are labels",
    )
    add(
        "--offset", metavar="COLUMN", help="known part of the process, such as the log of an exposure; 0 in predictions"
    )
    add("--method", choices=_METHODS, help="default: vecchia for gaussian measurements, vnngp for others")
    add("--quantiles", type=float, nargs="+", default=[], metavar="P", help="such as 0.05 0.95")
    add("--above", type=float, nargs="+", default=[], metavar="VALUE", help="probability of more than these values")
    add("--flat", action="store_true", help="take columns named lon and lat as plane coordinates, not as degrees")
    add("--save", type=Path, metavar="FILE", help="also the trained model, for pyro_nngp.load")
    add("--max-seconds", type=float, metavar="S", help="of training (default: until it has converged)")
    add("--seed", type=int, default=0, help="of training, and of quantiles and probabilities without a formula")
    return parser


def _krige(given: argparse.Namespace) -> None:
    """Run the command: from the table to the file."""
    _refuse_unused(given)
    _check_files(given)
    table = _read(given.table)
    x, names = _inputs(table, given, given.table)
    y, classes = _targets(table, given)
    measured = np.isfinite(y)
    if not measured.all():
        print(f"{(~measured).sum()} of {len(y)} rows have no {given.y!r} and are left out.")
    if not measured.any():
        raise _UsageError(f"no row of {given.table} has a value in the column {given.y!r}.")
    on_globe = _is_globe(names) and not given.flat
    likelihood = _LIKELIHOODS[given.likelihood](*([len(classes)] if classes else []))
    offset = None
    if given.offset is not None:
        offset = _numbers(table, given.offset, given.table, "--offset")[measured]
        if missing := int((~np.isfinite(offset)).sum()):
            raise _UsageError(f"{given.table}: {missing} rows have no {given.offset!r}; remove them.")
    if given.at is not None:
        places = _read(given.at)
        x_new = _placed(_inputs(places, given, given.at)[0], on_globe)
    else:
        template = _template(given, x[measured], names, on_globe)
    method = _METHODS[given.method or ("vecchia" if given.likelihood == "gaussian" else "vnngp")]
    targets, options = torch.from_numpy(y[measured]), {"offset": offset, "seed": given.seed}
    gp = method(_placed(x[measured], on_globe), targets, None, likelihood, **options)
    gp.classes = classes
    gp.columns = ("x (EPSG:4326)", "y (EPSG:4326)", "z (EPSG:4326)") if on_globe else tuple(names)
    kind = "places on the globe" if on_globe else "points"
    print(f"{type(gp).__name__} on {gp.num_data} {kind} ({', '.join(names)})")
    if given.at is None:
        _check_map(given, Cells(template, None, gp.columns, None, gp.x))
    print(fit(gp, max_seconds=given.max_seconds, seed=given.seed))
    print(gp.kernel, gp.likelihood, sep="\n")
    if given.save is not None:
        gp.save(given.save)
        print(f"wrote {given.save}")
    if given.at is not None:
        _predict_table(gp, given, places, x_new)
        return
    to_file = given.out.suffix != ".csv"
    grid = predict_grid(
        gp,
        template,
        quantile_levels=given.quantiles,
        thresholds=given.above,
        path=given.out if to_file else None,
        seed=given.seed,
    )
    if not to_file:
        grid.to_dataframe().reset_index().to_csv(given.out, index=False)
    print(f"wrote {given.out}: {', '.join(f'{size} {dim}' for dim, size in grid.sizes.items())}")
    if given.plot is not None:
        places = x[measured] if x.shape[1] == 2 else None
        axes = np.atleast_1d(plot_map(grid, places))
        for axis in axes if len(names) == 2 else ():
            axis.set(xlabel=names[0], ylabel=names[1])
        axes[0].figure.savefig(given.plot, dpi=150)
        print(f"wrote {given.plot}")


def _check_files(given: argparse.Namespace) -> None:
    """Raise unless all files can be written and the quantiles are probabilities."""
    for option, path in {"--out": given.out, "--plot": given.plot, "--save": given.save}.items():
        if path is not None and not path.parent.is_dir():
            raise _UsageError(f"{option} {path}: there is no folder {path.parent}; make it first.")
    if given.at is not None and given.out.suffix not in (".csv", ".parquet"):
        raise _UsageError(f"--out {given.out}: predictions at places of a table go to .csv or .parquet.")
    if given.plot is not None:
        formats = pyplot("krige").FigureCanvasBase.filetypes
        if given.plot.suffix[1:] not in formats:
            raise _UsageError(f"--plot {given.plot}: expected a name that ends in .{', .'.join(sorted(formats))}.")
    for level in given.quantiles:
        if not 0 < level < 1:
            raise _UsageError(
                f"--quantiles: expected probabilities between 0 and 1, such as 0.05 and 0.95, got {level:g}."
            )


def _check_map(given: argparse.Namespace, cells: Cells) -> None:
    """Raise unless the file and the picture can hold the map; print the number of its cells."""
    if given.out.suffix != ".csv":
        check_format("krige", given.out, cells.dims)
    if given.plot is not None and len(cells.dims) > 2:
        raise _UsageError(f"--plot: a picture has one or two dimensions; the grid has {', '.join(cells.dims)}.")
    sizes = ", ".join(f"{size} {dim}" for dim, size in zip(cells.dims, cells.shape, strict=True))
    print(f"{math.prod(cells.shape)} cells to predict ({sizes})")


def _refuse_unused(given: argparse.Namespace) -> None:
    """Raise for an option that has no effect beside the others."""
    if given.at is not None and given.plot is not None:
        raise _UsageError(
            "--plot: there is no picture of predictions at places of a table; leave it out, or predict a map."
        )
    if given.grid is None and given.bounds is not None:
        raise _UsageError("--bounds: they are of --grid; leave them out.")
    if given.likelihood == "classes" and (given.quantiles or given.above):
        raise _UsageError("--quantiles, --above: labels have neither; the results are probabilities of the classes.")


def _extra(name: str) -> Any:
    return import_extra("krige", name, "maps")


def _read(path: Path) -> "DataFrame":
    """Read a table in any of the formats."""
    if path.suffix not in _READERS:
        raise _UsageError(f"{path}: expected a name that ends in {', '.join(_READERS)}.")
    if not path.is_file():
        raise _UsageError(f"{path}: no such file.")
    library = _extra("geopandas") if path.suffix in (".gpkg", ".geojson") else _extra("pandas")
    return getattr(library, _READERS[path.suffix])(path, **(_dialect(path) if path.suffix == ".csv" else {}))


def _dialect(path: Path) -> dict[str, str]:
    """Separator and decimal point of a .csv file, by its first two lines: spreadsheets also write 1,5;2,5."""
    with path.open(encoding="utf-8", errors="replace") as file:
        header, first = file.readline(), file.readline()
    separators = [separator for separator in ";\t|" if separator in header]
    if "," in header or not separators:
        return {}
    return {"sep": separators[0], "decimal": "," if re.search(r"\d,\d", first) else "."}


def _inputs(table: "DataFrame", given: argparse.Namespace, path: Path) -> tuple[np.ndarray, list[str]]:
    """Inputs (N, D) and their names: the columns of --x, or the points of a file that has geometries."""
    if given.x is None:
        if not hasattr(table, "geometry"):
            raise _UsageError(f"{path} has no points: name its columns of coordinates by --x.")
        points = table.geometry
        names = ["lon", "lat"] if points.crs is not None and points.crs.is_geographic else ["x", "y"]
        return np.stack([points.x, points.y], 1), names
    x = np.stack([_numbers(table, name, path, "--x") for name in given.x], 1)
    for name, column in zip(given.x, x.T, strict=True):
        if missing := int((~np.isfinite(column)).sum()):
            raise _UsageError(f"{path}: {missing} rows have no {name!r}; remove them.")
    return x, list(given.x)


def _targets(table: "DataFrame", given: argparse.Namespace) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Measurements as floats, and None; or the numbers of labels, and the sorted labels."""
    if given.likelihood != "classes" or given.y not in table.columns:
        return _numbers(table, given.y, given.table, "--y"), None
    labels = table[given.y]
    if labels.dtype.kind == "f" and (labels.dropna() % 1 != 0).any():
        raise _UsageError(
            f"{given.table}: the column {given.y!r} holds measurements, not classes; leave --likelihood out."
        )
    classes = tuple(sorted({str(label) for label in labels.dropna()}))
    if len(classes) < 2:
        raise _UsageError(
            f"{given.table}: the column {given.y!r} holds {len(classes)} classes; two or more are needed."
        )
    places = {label: float(number) for number, label in enumerate(classes)}
    return labels.map(lambda label: places.get(str(label), math.nan)).to_numpy(float), classes


def _numbers(table: "DataFrame", name: str, path: Path, option: str) -> np.ndarray:
    """A column of the table as floats."""
    pandas = _extra("pandas")
    if name not in table.columns:
        have = ", ".join(map(str, table.columns))
        raise _UsageError(f"{path} has no column {name!r}, which {option} names; it has {have}.")
    try:
        return pandas.to_numeric(table[name]).to_numpy(float)
    except (ValueError, TypeError) as error:
        raise _UsageError(f"{path}: the column {name!r} does not hold numbers ({error}).") from error


def _is_globe(names: Sequence[str]) -> bool:
    """Whether two columns are longitude and latitude, by their names."""
    first, second = (name.lower() for name in names) if len(names) == 2 else ("", "")
    return first.startswith(("lon", "lng")) and second.startswith("lat")


def _placed(x: np.ndarray, on_globe: bool) -> torch.Tensor:
    places = torch.from_numpy(x)
    return lon_lat(places) if on_globe else places


def _template(given: argparse.Namespace, x: np.ndarray, names: Sequence[str], on_globe: bool) -> Any:
    """The grid to predict on."""
    _extra("xarray")
    axes = ["x", "y"] if on_globe else list(names)
    if given.like is not None:
        raster = _extra("rioxarray").open_rasterio(given.like, masked=True)
        return raster if on_globe else raster.rename({"x": names[0], "y": names[1]} if len(names) == 2 else {})
    steps = given.grid * (len(axes) if len(given.grid) == 1 else 1)
    if len(steps) != len(axes) or not all(0 < step < math.inf for step in steps):
        raise _UsageError(f"--grid: expected one positive cell size, or one for each of {', '.join(names)}.")
    low, high = x.min(0), x.max(0)
    low, high = low - _MARGIN * (high - low), high + _MARGIN * (high - low)
    if given.bounds is not None:
        if len(axes) != 2:
            raise _UsageError("--bounds: west, south, east and north are for two inputs.")
        low, high = np.array(given.bounds[:2]), np.array(given.bounds[2:])
        if not (high > low).all():
            raise _UsageError("--bounds: expected west < east and south < north.")
    if not (high > low).all():
        single = ", ".join(name for name, more in zip(names, high > low, strict=True) if not more)
        raise _UsageError(
            f"--grid: {given.table} has one value of {single}; a map needs two different places, or --bounds."
        )
    extents = zip(low.tolist(), high.tolist(), steps, strict=True)
    if (count := math.prod((top - bottom) / step for bottom, top, step in extents)) > _MOST_CELLS:
        cure = "Take larger cells, or a part of the map by --bounds."
        raise _UsageError(f"--grid: {count:.3g} cells are more than {_MOST_CELLS:.0e}. {cure}")
    sizes = [math.ceil((top - bottom) / step) for bottom, top, step in zip(low, high, steps, strict=True)]
    parts = zip(axes, low, steps, sizes, strict=True)
    centers = {axis: bottom + step * (np.arange(size) + 0.5) for axis, bottom, step, size in parts}
    if len(axes) != 2:
        return centers
    across, up = centers
    grid = _extra("xarray").Dataset(coords={up: centers[up][::-1], across: centers[across]})  # north is the first row
    if on_globe:
        _extra("rioxarray")  # gives grids their reference system
        return grid.rio.write_crs("EPSG:4326")
    return grid


def _predict_table(gp: Any, given: argparse.Namespace, table: "DataFrame", x_new: torch.Tensor) -> None:
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


def run() -> None:
    """Run the command line and leave Python with its exit status."""
    sys.exit(main())
