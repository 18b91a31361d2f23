"""Tiles of a map while it is computed: in memory, or in a folder from which an interrupted map resumes.

The folder holds one file for each finished tile, with a digest of its content, the number of the tile, and the identity
of the map: a kill at any moment loses only the present tile, and no file of another map or place is taken for it. The
arrays of the map are put together at the end, in memory maps whose place on the disk is allocated first.
"""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_nngp._checks import check_memory, fail
from pyro_nngp.inference.checkpoint import load_checkpoint, save_checkpoint

_FILE = re.compile(r"(\d{6,})\.tile|\d{6,}\.tile\.[0-9a-f]{16}\.part|\w+\.npy")


class Parts:
    """Tiles that become arrays by name.

    Args:
        folder: folder of the tiles; None keeps the arrays in memory.
        identity: digest of everything that determines the values; compared with the digests in the files.
        tiles: slices of the grid, by number.
        shape: sizes of the grid.

    Attributes:
        arrays: the arrays of the map, after :meth:`assemble`.
        done: whether each tile is finished.

    Raises:
        CheckpointError: if a file is damaged.
        ValueError: if the folder holds parts of another map, or other things.
    """

    def __init__(self, folder: Path | None, identity: str, tiles: list[Any], shape: tuple[int, ...]) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.done = np.zeros(len(tiles), bool)
        self._folder, self._identity, self._tiles, self._shape = folder, identity, tiles, shape
        if folder is None:
            return
        folder.mkdir(exist_ok=True)
        for file in folder.iterdir():
            found = _FILE.fullmatch(file.name)
            if found is None:
                cure = "Move that away, or name another path."
                fail("predict_grid", str(folder), "to hold parts of maps alone", file.name, cure)
            if found[1]:
                self._read(int(found[1]))
                self.done[int(found[1])] = True

    def finish(self, number: int, values: dict[str, Tensor]) -> None:
        """Keep the values of a tile, (..., *tile) each; none if no cell is inside."""
        if self._folder is None:
            self._place(number, values)
        else:
            state = {"map": self._identity, "tile": number, "values": values}
            save_checkpoint(self._folder / f"{number:06d}.tile", state)
        self.done[number] = True

    def assemble(self) -> None:
        """Put the arrays together from the files of all tiles."""
        if self._folder is not None:
            for number in range(len(self._tiles)):
                self._place(number, self._read(number))

    def array(self, name: str, lead: tuple[int, ...]) -> np.ndarray:
        """The array `name`, of shape (*lead, *grid), which is created full of NaN at first use."""
        if name not in self.arrays:
            shape = (*lead, *self._shape)
            if self._folder is None:
                check_memory(
                    "predict_grid", f"the map's {name}", int(np.prod(shape)), torch.float32, "Give path='map.nc'."
                )
                array = np.full(shape, np.nan, np.float32)
            else:
                file = self._folder / f"{name}.npy"
                array = np.lib.format.open_memmap(file, "w+", np.float32, shape)
                if hasattr(os, "posix_fallocate"):  # a write to a hole on a full disk would end the process
                    with file.open("r+b") as whole:
                        os.posix_fallocate(whole.fileno(), 0, os.fstat(whole.fileno()).st_size)
                array[...] = np.nan
            self.arrays[name] = array
        return self.arrays[name]

    def remove(self) -> None:
        """Delete the folder, once the map has been written."""
        self.arrays.clear()
        if self._folder is not None:
            for file in self._folder.iterdir():
                if _FILE.fullmatch(file.name):
                    file.unlink()
            self._folder.rmdir()

    def _place(self, number: int, values: dict[str, Tensor]) -> None:
        tile = self._tiles[number]
        for name, part in values.items():
            self.array(name, part.shape[: part.ndim - len(self._shape)])[(..., *tile)] = part.numpy()

    def _read(self, number: int) -> dict[str, Tensor]:
        """Values of a tile from its file, after checks."""
        file = Path(f"{self._folder}/{number:06d}.tile")
        state = load_checkpoint(file)
        if state.get("map") != self._identity or state.get("tile") != number:
            cure = "Delete it, or name another path."
            fail("predict_grid", str(file), "to hold parts of the same map", "those of another one or place", cure)
        return state["values"]
