"""Files of maps: NetCDF, Zarr and GeoTIFF, chosen by the file extension."""

import errno
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyro_nngp._checks import check_path, fail, import_extra
from pyro_nngp.adapters.maps.systems import mapped

if TYPE_CHECKING:
    from xarray import DataArray, Dataset

_HEADERS = 2**16  # bytes of a file beside its values
ENDINGS = {".nc": "h5netcdf", ".zarr": "zarr", ".tif": "rioxarray", ".tiff": "rioxarray"}


def check_format(where: str, path: Any, dims: tuple[str, ...]) -> Path:
    """Return the path of a map after checking that its format can hold a grid of these dimensions."""
    check_path(where, "path", path)
    path = Path(path)
    if path.suffix not in ENDINGS:
        fail(where, "path", f"to end in {', '.join(ENDINGS)}", repr(path.name), "Choose one of these formats.")
    package = ENDINGS[path.suffix]
    import_extra(where, package, "maps")
    if package == "rioxarray" and len(dims) != 2:
        fail(where, "path", "to end in .nc or .zarr for a grid that is no raster", path.name, "Rasters are 2-D.")
    store = path.suffix == ".zarr"
    if (path.exists() and not (path.is_file() or (store and _is_store(path)))) or (store and path.is_file()):
        cure = "Name another path; nothing was deleted."
        fail(where, "path", "to be a new one, or that of a map to replace", str(path), cure)
    return path


def _is_store(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("zarr.json", ".zgroup"))


def write(dataset: "Dataset", path: Path) -> None:
    """Write a map; an existing file is replaced once writing is complete."""
    scratch = path.with_name(f".{path.name}.new{path.suffix}")
    _check_space(scratch, dataset.nbytes + _HEADERS)
    if path.suffix == ".nc":
        dataset.to_netcdf(scratch, engine="h5netcdf")
    elif path.suffix == ".zarr":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Consolidated metadata")  # of format 3, which xarray writes by default
            dataset.to_zarr(scratch, mode="w")
        if path.exists():
            shutil.rmtree(path)
    else:
        _write_raster(dataset, scratch)
    os.replace(scratch, path)


def _check_space(scratch: Path, size: int) -> None:
    """Raise ``OSError`` unless a file of this size can be written: HDF5 and GDAL do not recover from a full disk."""
    if not hasattr(os, "posix_fallocate"):
        if shutil.disk_usage(scratch.parent).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return
    trial = scratch.with_name(f"{scratch.name}.space")
    try:
        with trial.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    finally:
        trial.unlink(missing_ok=True)


def read(path: Path, like: "Dataset") -> "Dataset":
    """Open a map file; values are read lazily.

    Args:
        path: the file.
        like: the map that was written, for the variables, dimensions and coordinates that bands do not have.
    """
    import xarray

    if path.suffix == ".nc":
        return xarray.open_dataset(path, engine="h5netcdf", decode_coords="all")
    if path.suffix == ".zarr":
        return xarray.open_zarr(path, chunks=None, decode_coords="all")
    bands = import_extra("predict_grid", "rioxarray", "maps").open_rasterio(path)
    first, variables = 0, {}
    for name, array in like.data_vars.items():
        *further, vertical, horizontal = array.dims
        shape = tuple(like.sizes[dim] for dim in further)
        count = math.prod(shape)
        own = bands.isel(band=slice(first, first + count)).drop_vars(bands.coords)
        own = own.rename(dict(zip(own.dims, ("band", vertical, horizontal), strict=True)))
        if len(further) > 1:  # values are read: bands have one dimension
            own = xarray.DataArray(own.values.reshape(*shape, *own.shape[1:]), dims=array.dims)
        variables[name] = own.rename({"band": further[0]}) if len(further) == 1 else own
        variables[name] = own.isel(band=0) if not further else variables[name]
        variables[name].attrs.clear()
        first += count
    return mapped(xarray.Dataset(variables).assign_coords(like.coords))


def _write_raster(dataset: "Dataset", path: Path) -> None:
    """Write all variables as the bands of a GeoTIFF, with their names as descriptions."""
    import xarray

    bands = dict(_bands(dataset))
    stacked = xarray.concat(list(bands.values()), "band", coords="minimal", compat="override")
    vertical, horizontal = stacked.dims[1:]
    stacked = stacked.rio.set_spatial_dims(horizontal, vertical)
    stacked.attrs["long_name"] = tuple(bands)
    stacked.rio.to_raster(path, driver="GTiff", compress="deflate")


def _bands(dataset: "Dataset") -> Iterator[tuple[str, "DataArray"]]:
    """Rasters of a map with a name for each, such as ``quantile=0.05``."""
    for name, array in dataset.data_vars.items():
        further = array.dims[:-2]
        flat = array.stack(_further=further) if further else array.expand_dims("_further", -1)
        for column in range(flat.sizes["_further"]):
            band = flat.isel(_further=column)
            labels = [f"{dim}={band[dim].item()}" for dim in further]
            drop = [each for each in ("_further", *further) if each in band.coords]
            yield " ".join([str(name), *labels]), band.drop_vars(drop)
