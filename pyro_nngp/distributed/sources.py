"""Sources of rows larger than the memory of one process, read a block at a time.

A source is anything with a ``shape`` whose slices ``source[start:stop]`` are arrays: NumPy's memory maps, arrays of
Zarr and HDF5, tensors, and columns of a Parquet file by :class:`ParquetColumns`. The path of a ``.npy`` file is opened
as a memory map, columns of a ``.zarr`` store as an array.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_nngp._checks import check_path, fail, import_extra
from pyro_nngp._masks import with_nan


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
        groups = list(range(first, last + 1)) if start < stop else []
        table = self._file.read_row_groups(groups, columns=self._names)
        begin = start - (int(self._ends[first - 1]) if first else 0)
        parts = [table[name].slice(begin, max(stop - start, 0)).to_numpy() for name in self._names]
        return parts[0] if len(self.shape) == 1 else np.stack(parts, 1)


def open_source(where: str, arg: str, value: Any) -> Any:
    """A source of rows, with files opened.

    Raises:
        TypeError: if `value` is not a source.
        ValueError: for a path that does not end in ``.npy`` or ``.zarr``, or a file of another kind.
        FileNotFoundError: if there is no such file.
    """
    source = _opened(where, arg, value) if isinstance(value, str | os.PathLike) else value
    if not (hasattr(source, "shape") and hasattr(source, "__getitem__")):
        cure = "Pass a memory map, a tensor, a Zarr array, or ParquetColumns(path, names)."
        fail(where, arg, "to be an array that can be read by slices", type(source).__name__, cure, TypeError)
    return source


def _opened(where: str, arg: str, path: Any) -> Any:
    """The array of a file."""
    suffix = Path(path).suffix
    if suffix not in (".npy", ".zarr"):
        cure = "Open other files yourself, and pass the array; ParquetColumns reads Parquet."
        fail(where, arg, "to end in .npy or .zarr", str(path), cure)
    if not Path(path).exists():
        cure = f"Each process looks for it from its own folder, {Path.cwd()}: all of them have to see it."
        fail(where, arg, "to be a file or store that exists", str(path), cure, FileNotFoundError)
    if suffix == ".zarr":
        return import_extra(where, "zarr", "maps").open_array(store=os.fspath(path), mode="r")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        cure = "Write it by numpy.save, from an array of numbers."
        fail(where, arg, "to be a .npy file of numbers", str(path), cure, ValueError, error)


def read_rows(where: str, arg: str, source: Any, start: int, stop: int) -> Tensor:
    """Rows of a source as a tensor: float32 and float64 as they are, other real numbers in float64.

    Raises:
        TypeError: for anything but real numbers.
    """
    rows = source[start:stop]
    if not isinstance(rows, Tensor):
        array = np.asarray(with_nan(rows))
        if array.dtype.kind not in "fiub":
            cure = "Convert them, to float64 for instance."
            fail(where, arg, "to hold real numbers", f"dtype {array.dtype}", cure, TypeError)
        rows = torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))
    elif rows.is_complex():
        fail(where, arg, "to hold real numbers", rows.dtype, "Convert them, to float64 for instance.", TypeError)
    return rows.clone() if rows.dtype in (torch.float32, torch.float64) else rows.double()
