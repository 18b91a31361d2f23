"""Sources of rows larger than the memory of one process, read a block at a time.

A source is anything with a ``shape`` whose slices ``source[start:stop]`` are arrays: NumPy's memory maps, arrays of
Zarr and HDF5, tensors, and columns of a Parquet file by :class:`ParquetColumns`. The path of a ``.npy`` file is opened
as a memory map, that of a ``.zarr`` store as an array.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_nngp._checks import check_path, fail, import_extra


class ParquetColumns:
    """Columns of a Parquet file; a slice reads only the row groups that it overlaps.

    Args:
        path: the file.
        columns: names of the columns; one name gives an array of one dimension.

    Attributes:
        shape: (N, number of columns), or (N,) for one name.

    Raises:
        ValueError: if the file does not have such a column.
        ImportError: if pyarrow is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] | str) -> None:
        check_path("ParquetColumns", "path", path)
        import_extra("ParquetColumns", "pyarrow", "maps")
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path)
        self._names = [columns] if isinstance(columns, str) else list(columns)
        for name in self._names:
            if name not in self._file.schema_arrow.names:
                cure = f"It has {self._file.schema_arrow.names}."
                fail("ParquetColumns", "columns", "of the file", repr(name), cure)
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._ends = np.cumsum(groups)
        rows = int(self._ends[-1]) if groups else 0
        self.shape: tuple[int, ...] = (rows,) if isinstance(columns, str) else (rows, len(self._names))

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        first, last = np.searchsorted(self._ends, [start, max(start, stop - 1)], side="right")
        table = self._file.read_row_groups(list(range(first, last + 1)), columns=self._names)
        begin = start - (int(self._ends[first - 1]) if first else 0)
        parts = [table[name].slice(begin, stop - start).to_numpy() for name in self._names]
        return parts[0] if len(self.shape) == 1 else np.stack(parts, 1)


def open_source(where: str, arg: str, value: Any) -> Any:
    """A source of rows, with files opened.

    Raises:
        TypeError: if `value` is neither a source nor the path of a ``.npy`` file or ``.zarr`` store.
    """
    if isinstance(value, str | os.PathLike):
        suffix = Path(value).suffix
        if suffix == ".npy":
            return np.load(value, mmap_mode="r", allow_pickle=False)
        if suffix == ".zarr":
            return import_extra(where, "zarr", "maps").open_array(store=os.fspath(value), mode="r")
        cure = "Open other files yourself, and pass the array; ParquetColumns reads Parquet."
        fail(where, arg, "to end in .npy or .zarr", str(value), cure)
    if not (hasattr(value, "shape") and hasattr(value, "__getitem__")):
        cure = "Pass a memory map, a tensor, a Zarr array, or ParquetColumns(path, names)."
        fail(where, arg, "to be an array that can be read by slices", type(value).__name__, cure, TypeError)
    return value


def read_rows(source: Any, start: int, stop: int) -> Tensor:
    """Rows of a source as a tensor: float32 and float64 as they are, other numbers in float64."""
    rows = source[start:stop]
    if not isinstance(rows, Tensor):
        array = np.asarray(rows)
        rows = torch.from_numpy(np.array(array, array.dtype if array.dtype.kind in "fiub" else np.float64))
    return rows.clone() if rows.dtype in (torch.float32, torch.float64) else rows.double()
