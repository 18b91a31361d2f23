"""One Zarr store that several processes fill: each writes whole chunks, which are the tiles of the map.

The store lies in a folder until it is complete, with flags of finished tiles from each process. An interrupted map
resumes with any number of processes, all of which must see the folder.
"""

import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyro_nngp._checks import fail, import_extra
from pyro_nngp.adapters.maps.cells import tile_sides
from pyro_nngp.distributed import World
from pyro_nngp.inference.checkpoint import load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from xarray import Dataset

_IDENTITY, _STORE = "identity.pt", "map.zarr"


class SharedStore:
    """Arrays by name in a store that all processes write; arguments and methods as :class:`~.parts.Parts`.

    Args:
        world: the processes.
        target: path of the finished store.
        identity: digest of everything that determines the values.
        like: the map with its coordinates and the shapes of its variables.
        tiles: slices of the grid, the last dimensions, by number.

    Attributes:
        done: whether each tile is finished, by any process.

    Raises:
        ValueError: if the folder holds parts of another map, or `target` is no Zarr store.
    """

    def __init__(self, world: World, target: Path | None, identity: str, like: "Dataset", tiles: list[Any]) -> None:
        if target is None or target.suffix != ".zarr":
            cure = "Give path='map.zarr', which each process writes its tiles to."
            fail("predict_grid", "path", f"to end in .zarr on {world.size} processes", target, cure)
        self._zarr = import_extra("predict_grid", "zarr", "maps")
        self._world, self._target, self._folder = world, target, Path(f"{target}.part")
        if world.rank == 0 and not (self._folder / _IDENTITY).exists():
            self._create(like, len(tiles[0]), identity)
        world.barrier()
        if load_checkpoint(self._folder / _IDENTITY).get("map") != identity:
            cure = "Delete it, or name another path."
            fail("predict_grid", str(self._folder), "to hold parts of the same map", "those of another one", cure)
        self.done = np.zeros(len(tiles), bool)
        for each in self._folder.glob("done*.pt"):
            self.done |= load_checkpoint(each)["done"].numpy()
        world.barrier()  # all have read the flags before any process writes new ones
        self._file, self._tiles = self._folder / f"done{world.rank}of{world.size}.pt", tiles
        self._flags = torch.from_numpy(self.done.copy())
        self._group = self._zarr.open_group(self._folder / _STORE, mode="r+")

    def finish(self, number: int, values: dict[str, Tensor]) -> None:
        """Write the values of a tile, (..., *tile) each; none if no cell is inside."""
        for name, part in values.items():
            self._group[name][(..., *self._tiles[number])] = part.numpy()
        self._flags[number] = True
        save_checkpoint(self._file, {"done": self._flags})

    def publish(self) -> None:
        """Move the complete store to its path."""
        self._world.barrier()
        if self._world.rank == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # consolidated metadata of format 3, which xarray writes by default
                self._zarr.consolidate_metadata(self._folder / _STORE)
            if self._target.exists():
                shutil.rmtree(self._target)
            os.replace(self._folder / _STORE, self._target)
            shutil.rmtree(self._folder)
        self._world.barrier()

    def _create(self, like: "Dataset", grid_dims: int, identity: str) -> None:
        self._folder.mkdir(exist_ok=True)
        store = self._folder / _STORE
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            like.drop_vars(list(like.data_vars)).to_zarr(store, mode="w", consolidated=False)
        group = self._zarr.open_group(store, mode="r+")
        for name, variable in like.data_vars.items():
            lead = variable.shape[: variable.ndim - grid_dims]
            chunks = [*lead, *tile_sides(grid_dims)]
            group.create_array(
                name,
                shape=variable.shape,
                chunks=[max(1, min(each)) for each in zip(chunks, variable.shape, strict=True)],
                dtype="float32",
                compressors=self._zarr.codecs.ZstdCodec(checksum=True),  # a damaged chunk is an error when read
                fill_value=np.float32(np.nan),
                dimension_names=[str(dim) for dim in variable.dims],
            )
        save_checkpoint(self._folder / _IDENTITY, {"map": identity})
