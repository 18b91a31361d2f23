"""A command line for the main job: from a table of measurements to a map with its uncertainty.

See ``python -m pyro_nngp krige --help``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pyro_nngp.adapters.krige import LIKELIHOODS, METHODS, TrainingError, krige
from pyro_nngp.adapters.krige_tables import UsageError
from pyro_nngp.inference import DivergenceError
from pyro_nngp.linalg import NotPositiveDefiniteError

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
  scores for gaps of 5 km and a map in UTM coordinates that a GIS reads:
    python -m pyro_nngp krige wells.csv --x easting northing --crs EPSG:32632 --y arsenic --likelihood lognormal \\
        --scores --blocks 5000 --grid 250 --out arsenic.tif
  a GeoTIFF on the cells of another raster, from the points of a GeoPackage:
    python -m pyro_nngp krige wells.gpkg --y depth --like elevation.tif --out depth.tif
"""


_CONTINUES = "\nInterrupted; the same command continues the map where it is."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 0, 1 if training failed, 2 for wrong arguments, 130 on Ctrl-C."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        krige(given)
    except KeyboardInterrupt as stop:
        print(f"\n{stop!s}" if stop.args else _CONTINUES, file=sys.stderr)
        return 130
    except (TrainingError, DivergenceError, NotPositiveDefiniteError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (UsageError, ValueError, TypeError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pyro_nngp", description="Nearest-neighbor Gaussian processes.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser(
        "krige",
        help="a map with its uncertainty from a table of measurements",
        description="Fit a process to a table of measurements, and predict on a grid, a raster or at other places. "
        "Hyperparameters are learned; nothing has to be standardized.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("table", type=Path, help="measurements: .csv, .parquet, .gpkg or .geojson")
    add("--x", nargs="+", metavar="COLUMN", help="inputs, such as lon lat or east north; left out, a file's points")
    add("--y", required=True, metavar="COLUMN", help="what was measured; rows without it are left out")
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--grid", type=float, nargs="+", metavar="STEP", help="cell size; beyond two inputs one for each"
    )
    where.add_argument("--like", type=Path, metavar="RASTER", help="predict at the cells of this raster")
    where.add_argument("--at", type=Path, metavar="TABLE", help="predict at the places of this table")
    add("--bounds", type=float, nargs=4, metavar=("W", "S", "E", "N"), help="of the grid; default: the data's")
    add("--out", type=Path, required=True, help=".nc, .zarr, .tif or .csv of a map, .csv or .parquet of a table")
    add("--plot", type=Path, metavar="PICTURE", help="also a picture of mean and standard deviation, .png or .pdf")
    add(
        "--likelihood",
        choices=LIKELIHOODS,
        default="gaussian",
        help="of the measurements (default: gaussian); classes are labels",
    )
    add(
        "--offset", metavar="COLUMN", help="known part of the process, such as the log of an exposure; 0 in predictions"
    )
    add("--method", choices=METHODS, help="default: vecchia for gaussian measurements, vnngp for others")
    add("--quantiles", type=float, nargs="+", default=[], metavar="P", help="such as 0.05 0.95")
    add("--above", type=float, nargs="+", default=[], metavar="VALUE", help="probability of more than these values")
    add("--flat", action="store_true", help="take columns named lon and lat as plane coordinates, not as degrees")
    add("--crs", metavar="SYSTEM", help="reference system of the inputs and the map, such as EPSG:32632")
    add(
        "--scores",
        type=int,
        nargs="?",
        const=0,
        metavar="FOLDS",
        help="also scores of predictions of each fold from the others (default: 10 folds)",
    )
    add("--blocks", type=float, metavar="SIDE", help="folds of whole blocks of this size, km for degrees; see --scores")
    add("--save", type=Path, metavar="FILE", help="also the trained model, for pyro_nngp.load")
    add("--max-seconds", type=float, metavar="S", help="of training (default: until it has converged)")
    add("--seed", type=int, default=0, help="of training, and of quantiles and probabilities without a formula")
    return parser


def run() -> None:
    """Run the command line and leave Python with its exit status."""
    sys.exit(main())
