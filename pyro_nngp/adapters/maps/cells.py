"""The cells of a grid: their inputs, the mask, and tiles.

Cost: O(cells of a tile) for a tile; covariates that are files are read tile by tile.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._kinds import check_kind, check_sequence
from pyro_nngp._masks import with_nan
from pyro_nngp.adapters.maps.systems import known_system, with_system
from pyro_nngp.data.globe import lon_lat

if TYPE_CHECKING:
    from xarray import DataArray, Dataset

_WHERE = "predict_grid"
TILE_SIDE = 128  # cells of a tile along each of the last two dimensions: its neighbors are near one another in memory
_BLOCK = 2**16  # rows of an array read at a time
_BAND = "band"  # the dimension of bands in files of rasters; dropped if its size is one

Tile = tuple[slice, ...]


class _Source(NamedTuple):
    """Variables of the template that hold one or several inputs, and whether they are degrees on the globe."""

    names: tuple[str, ...]
    on_globe: bool


class Cells:
    """Cells of a grid and their inputs; arguments as in :func:`~pyro_nngp.adapters.maps.predict_grid`.

    Attributes:
        dims: names of the grid's dimensions.
        shape: their sizes.
        coords: coordinates of the template.
        tiles: slices of the grid that are computed one at a time.
    """

    def __init__(
        self,
        template: Any,
        columns: Sequence[str] | None,
        known: Sequence[str] | None,
        mask: Any,
        like: Tensor,
        crs: Any = None,
    ) -> None:
        import xarray

        if columns is not None:
            check_sequence(_WHERE, "columns", columns, 'Write columns=["x", "y"].')
            for name in columns:
                check_kind(_WHERE, "columns", name, str, "names", 'Write columns=["x", "y"].')
            columns = list(columns)  # an array of names has no truth value
        grid = _dataset(template)
        self.dims = _dims(grid)
        grid = with_system(grid, known_system(_WHERE, crs, grid, columns or known), self.dims)
        self.coords = dict(grid.coords)
        self.shape = tuple(grid.sizes[dim] for dim in self.dims)
        self._like = like
        self._sources = _sources(grid, columns, known, like.shape[1])
        self._inputs = {name: _numeric(grid[name], self.dims) for source in self._sources for name in source.names}
        if mask is not None:
            if not isinstance(mask, xarray.DataArray) or mask.dtype != bool or not set(mask.dims) <= set(self.dims):
                expectation = f"to be a DataArray of booleans on {', '.join(map(str, self.dims))}"
                actual = f"{mask.dtype} on {mask.dims}" if isinstance(mask, xarray.DataArray) else type(mask).__name__
                fail(_WHERE, "mask", expectation, actual, "Pass template.notnull() or the like.", TypeError)
            mask = mask.transpose(*[dim for dim in self.dims if dim in mask.dims])
        self._mask = mask
        ranges = [
            [slice(start, min(start + side, size)) for start in range(0, size, side)]
            for side, size in zip(tile_sides(len(self.shape)), self.shape, strict=True)
        ]
        self.tiles: list[Tile] = list(itertools.product(*ranges))

    @property
    def everything(self) -> Tile:
        """One tile of all cells."""
        return tuple(slice(0, size) for size in self.shape)

    def at(self, tile: Tile) -> tuple[np.ndarray, Tensor]:
        """The mask of a tile, in its shape, and the inputs (P, D) of its cells."""
        columns = {name: self._values(array, tile) for name, array in self._inputs.items()}
        inside = np.ones(tuple(part.stop - part.start for part in tile), bool)
        for values in columns.values():
            inside &= ~np.isnan(values)
        if self._mask is not None:
            inside &= self._values(self._mask, tile)
        parts = []
        for names, on_globe in self._sources:
            part = torch.from_numpy(np.stack([columns[name][inside] for name in names], 1)).double()
            parts.append(lon_lat(part) if on_globe and len(part) else part.new_empty(0, 3) if on_globe else part)
        return inside, torch.cat(parts, 1).to(self._like)

    def digest(self) -> str:
        """Digest of the inputs and the mask."""
        hasher = hashlib.blake2b(repr((self.dims, self.shape, self._sources)).encode(), digest_size=16)
        arrays = [*self._inputs.values(), *([] if self._mask is None else [self._mask])]
        for array in arrays:
            for start in range(0, len(array) if array.ndim else 1, _BLOCK):
                block = array[start : start + _BLOCK] if array.ndim else array
                hasher.update(np.ascontiguousarray(block.to_numpy()).tobytes())
        return hasher.hexdigest()

    def _values(self, array: "DataArray", tile: Tile) -> np.ndarray:
        """Values of an array in a tile, repeated along missing dimensions."""
        part = {dim: each for dim, each in zip(self.dims, tile, strict=True) if dim in array.dims}
        shape = tuple(each.stop - each.start for each in tile)
        kept = tuple(size if dim in part else 1 for dim, size in zip(self.dims, shape, strict=True))
        return np.broadcast_to(np.asarray(with_nan(array.isel(part))).reshape(kept), shape)


def tile_sides(num_dims: int) -> list[int]:
    """Cells of a tile along each dimension of a grid."""
    return [1] * max(num_dims - 2, 0) + ([TILE_SIDE] * 2 if num_dims > 1 else [TILE_SIDE**2])


def _dataset(template: Any) -> "Dataset":
    """The template as a Dataset, without a dimension of bands that has size one."""
    import xarray

    if isinstance(template, xarray.DataArray):
        name = template.name if template.name is not None and template.name not in template.coords else "_template"
        grid = template.to_dataset(name=name)
    elif isinstance(template, xarray.Dataset):
        grid = template
    elif isinstance(template, Mapping):
        axes = {str(name): np.asarray(with_nan(values)) for name, values in template.items()}
        for name, values in axes.items():
            if values.ndim != 1:
                cure = "Give the coordinates along each dimension, or a Dataset."
                fail(_WHERE, f"template[{name!r}]", "of one dimension", values.shape, cure)
            if values.dtype.kind == "f" and (bad := int((~np.isfinite(values)).sum())):
                fail(
                    _WHERE,
                    f"template[{name!r}]",
                    "to be finite",
                    f"{bad} masked, NaN or infinite entries",
                    "Drop them.",
                )
        names = tuple(reversed(axes))  # as rasters: rows are the last input
        grid = xarray.Dataset({"_template": (names, np.empty([len(axes[name]) for name in names], np.bool_))}, axes)
    else:
        cure = 'Pass a raster, or {"x": ..., "y": ...} with the values along each dimension.'
        expectation = "to be an xarray DataArray or Dataset or a mapping"
        fail(_WHERE, "template", expectation, type(template).__name__, cure, TypeError)
    return grid.squeeze(_BAND, drop=True) if grid.sizes.get(_BAND) == 1 else grid


def _dims(grid: "Dataset") -> tuple[str, ...]:
    """Dimensions of the grid, in the order of the first variable that has all of them."""
    everything = {str(dim) for dim in grid.sizes}
    if not everything or 0 in grid.sizes.values():
        fail(_WHERE, "template", "to have cells", dict(grid.sizes), "Give coordinates.")
    orders = [array.dims for array in grid.data_vars.values() if set(array.dims) == everything]
    return tuple(str(dim) for dim in (orders[0] if orders else grid.sizes))


def _sources(
    grid: "Dataset", columns: Sequence[str] | None, known: Sequence[str] | None, num_inputs: int
) -> list[_Source]:
    """The variables of the grid that hold the inputs, in their order."""
    names = list(columns or known or ())
    if not names and num_inputs == 2 and {"x", "y"} <= {str(name) for name in grid.variables}:
        names = ["x", "y"]
    if len(names) != num_inputs and not (columns and known):
        cure = 'Name the variables of the template that hold them, such as columns=["x", "y"].'
        fail(_WHERE, "columns", f"to name the {num_inputs} inputs", names or None, cure)
    sources: list[_Source] = []
    for name in names:
        base, _, system = name.partition(" (")
        if system and name not in grid.variables:  # coordinates of points of geopandas
            on_globe = f"z ({system}" in names
            if base == "z" or (on_globe and base == "y"):  # x stands for all three
                continue
            sources.append(_Source(("x", "y") if on_globe else (base,), on_globe))
        else:
            sources.append(_Source((name,), False))
    for each in itertools.chain.from_iterable(source.names for source in sources):
        if each not in grid.variables:
            have = [str(name) for name in grid.variables if name != "_template"]
            cure = "Add it to the template, or name others by columns=[...]."
            fail(_WHERE, "template", f"to have the variable {each!r}", have, cure)
    return sources


def _numeric(array: "DataArray", dims: tuple[str, ...]) -> "DataArray":
    """An input with its dimensions in the order of the grid."""
    if array.dtype.kind not in "fiub":
        cure = "Give numbers, such as days since a date."
        fail(_WHERE, f"template[{array.name!r}]", "to hold numbers", array.dtype, cure, TypeError)
    return array.transpose(*[dim for dim in dims if dim in array.dims])
