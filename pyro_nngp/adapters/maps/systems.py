"""Coordinate reference systems of grids: of the template, of the data's points, or the caller's.

A system is kept as in the CF conventions: a coordinate ``spatial_ref`` with the well-known text, which is the grid
mapping of the variables, and attributes of the horizontal coordinates. GDAL, QGIS and rioxarray read it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyro_nngp._checks import fail, import_extra

if TYPE_CHECKING:
    from xarray import Dataset

MAPPING = "spatial_ref"


def system_of(grid: "Dataset") -> str | None:
    """The reference system of a grid as well-known text; None if it has none."""
    mappings = {str(array.encoding.get("grid_mapping")) for array in grid.data_vars.values()} - {"None"}
    for name in (*mappings, MAPPING, "crs"):
        if name in grid.variables:
            text = grid[name].attrs.get("crs_wkt", grid[name].attrs.get("spatial_ref"))
            if text:
                return str(text)
    return None


def known_system(where: str, crs: Any, grid: "Dataset", columns: Sequence[str] | None) -> Any:
    """The one reference system of a grid, of points, and of the caller; None if there is none.

    Args:
        where: name of the caller.
        crs: anything that pyproj takes, such as "EPSG:32632"; None takes the system of the grid or the points.
        grid: the grid.
        columns: names of the data's columns, such as "x (EPSG:32632)" for points of geopandas.

    Raises:
        ValueError: for an unknown system, or two that differ.
    """
    of_points = {name.partition(" (")[2].removesuffix(")") for name in columns or () if " (" in name}
    of_points = {name for name in of_points if ":" in name}  # an authority and its code, not the unit of a column
    given = {"crs": crs, "the data": next(iter(of_points), None), "the template": system_of(grid)}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    pyproj = import_extra(where, "pyproj", "maps")
    systems = {}
    for name, value in given.items():
        try:
            systems[name] = pyproj.CRS.from_user_input(value)
        except (pyproj.exceptions.CRSError, TypeError, ValueError, RuntimeError) as error:
            cure = 'Give an EPSG code, such as "EPSG:32632".'
            fail(where, name, "to be a coordinate reference system", f"{value!r:.60}", cure, cause=error)
    (first, system), *others = systems.items()
    for name, other in others:
        if other != system:
            cure = "Reproject one of them, as by template.rio.reproject."
            fail(where, name, f"in the reference system {_short(system)}, as {first}", _short(other), cure)
    return system


def with_system(grid: "Dataset", system: Any, dims: Sequence[str]) -> "Dataset":
    """The grid with a reference system; its last two dimensions are the vertical and the horizontal one."""
    if system is None or len(dims) < 2:
        return grid
    attributes = system.to_cf()
    grid = grid.assign_coords({MAPPING: ((), 0, attributes | {"spatial_ref": attributes["crs_wkt"]})})
    axes = {each["axis"]: each for each in system.cs_to_cf()}
    for dim, axis in zip(dims[-2:], ("Y", "X"), strict=True):
        if dim in grid.coords:
            grid[dim].attrs.update(axes.get(axis, {}))
    return grid


def mapped(dataset: "Dataset") -> "Dataset":
    """The dataset with its reference system as the grid mapping of all variables, if it has one."""
    if MAPPING in dataset.coords:
        for array in dataset.data_vars.values():
            array.encoding["grid_mapping"] = MAPPING
    return dataset


def _short(system: Any) -> str:
    authority = system.to_authority()
    return system.name if authority is None else ":".join(authority)


__all__ = ["MAPPING", "known_system", "mapped", "system_of", "with_system"]
