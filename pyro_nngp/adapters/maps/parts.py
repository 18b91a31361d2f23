"""Arrays of a map while it is computed: in memory, or in a folder from which an interrupted map resumes.

The folder holds one memory-mapped array for each variable, a flag for each finished tile, and a digest of
everything that determines the values. Flags are written after the data, so that a kill at any moment loses only the
present tile.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from pyro_nngp._checks import fail

_IDENTITY, _DONE = "identity.json", "done.npy"


class Parts:
    """Arrays by name that are filled tile by tile.

    Args:
        folder: folder of the memory maps; None keeps the arrays in memory.
        identity: digest of everything that determines the values; compared with that of the folder.
        num_tiles: number of tiles.

    Raises:
        ValueError: if the folder holds parts of another map.
    """

    def __init__(self, folder: Path | None, identity: str, num_tiles: int) -> None:
        self.folder, self.arrays = folder, dict[str, np.ndarray]()
        if folder is None:
            self.done = np.zeros(num_tiles, bool)
            return
        if folder.exists():
            file = folder / _IDENTITY
            if not file.is_file() or json.loads(file.read_text()) != identity:
                cure = "Delete it, or name another path."
                fail("predict_grid", str(folder), "to hold parts of the same map", "those of another one", cure)
            for file in folder.glob("*.npy"):
                self.arrays[file.stem] = np.lib.format.open_memmap(file, "r+")
            self.done = self.arrays.pop("done")
            return
        folder.mkdir()
        self.done = np.lib.format.open_memmap(folder / _DONE, "w+", bool, (num_tiles,))
        (folder / _IDENTITY).write_text(json.dumps(identity))

    def write(self, name: str, shape: tuple[int, ...], place: tuple[Any, ...], values: np.ndarray) -> None:
        """Write values of a tile into the array `name`, which is created full of NaN at first use."""
        if name not in self.arrays:
            if self.folder is None:
                self.arrays[name] = np.full(shape, np.nan, np.float32)
            else:
                scratch = self.folder / f"{name}.new"
                array = np.lib.format.open_memmap(scratch, "w+", np.float32, shape)
                array[...] = np.nan
                array.flush()
                os.replace(scratch, self.folder / f"{name}.npy")
                self.arrays[name] = array
        self.arrays[name][place] = values

    def finish(self, tile: int) -> None:
        """Mark a tile as complete."""
        if self.folder is not None:
            for array in self.arrays.values():
                array.flush()  # type: ignore[attr-defined]
        self.done[tile] = True
        if self.folder is not None:
            self.done.flush()  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Delete the folder, once the map has been written."""
        self.arrays.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder)
