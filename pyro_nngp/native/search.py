"""The compiled nearest-neighbor search for CPUs: `search.cpp`.

Cost: O(P log P) to build; memory for P D numbers in float64 and as many in float32.
"""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_nngp.linalg import blocks as memory
from pyro_nngp.native import best_level, loaded, wanted

MAX_POINTS = 2**31 - 2**10
"""Points are numbered in 32 bits."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def supported(num_points: int) -> bool:
    """Whether the compiled code is there, wanted, and made for that many points."""
    return num_points <= MAX_POINTS and wanted()


class Tree:
    """A k-d tree over fixed points.

    Args:
        points: (P, D), finite and at most 1e150 in size.
    """

    def __init__(self, points: Floats) -> None:
        points = np.ascontiguousarray(points)
        size = loaded().nn_search_bytes(*points.shape)
        self._memory: Tensor = memory.empty((size,), torch.uint8)
        _check(loaded().nn_search_build(points.ctypes.data, *points.shape, self._memory.data_ptr()))

    def nearest(
        self,
        rows: Ints,
        places: Floats,
        limit: Ints,
        exclude: Ints,
        index: Ints,
        value: Floats,
        level: int | None = None,
    ) -> None:
        """Write down the k nearest points of some queries, nearest first, ties by number.

        Args:
            rows: which queries to answer, fastest in `spatial_order`.
            places: where to search from, (Q, D).
            limit: only points with a smaller number are wanted, (Q,).
            exclude: the number of one point that is not wanted, (Q,), -1 for none.
            index: numbers of the points, (Q, k), to be written; -1 where none is left.
            value: squared distances, (Q, k), to be written; infinity where no point is left.
            level: an instruction set below ``library().nn_levels()``; None is the widest.
        """
        arrays = [np.ascontiguousarray(each) for each in (rows, places, limit, exclude)]
        for output in (index, value):
            assert output.flags.c_contiguous, "written in place"
            arrays.append(output)
        queries = _Queries(len(rows), index.shape[1], *(each.ctypes.data for each in arrays))
        _check(loaded().nn_search_run(self._memory.data_ptr(), ctypes.byref(queries), best_level(level)))


def spatial_order(points: Floats) -> Ints:
    """An order in which points that follow each other lie close together, (P,)."""
    points, order = np.ascontiguousarray(points), np.empty(len(points), np.int64)
    _check(loaded().nn_search_order(points.ctypes.data, *points.shape, order.ctypes.data))
    return order


class _Queries(ctypes.Structure):
    """`struct Queries` of search.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_rows", "num_neighbors")),
        *((name, ctypes.c_void_p) for name in ("rows", "places", "limit", "exclude", "index", "value")),
    ]


def _check(status: int) -> None:
    if status:
        raise MemoryError("nn_search: no memory for a tree of points or the candidates of queries")
