"""The compiled nearest-neighbor search for CPUs, `search.cpp`, and orders of points, `ordering.cpp`.

Cost: O(P log P) to build a tree; memory for P D numbers in float64 and as many in float32.
"""

import ctypes
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_nngp import _memory as memory
from pyro_nngp._checks import fail
from pyro_nngp.native import best_level, enabled, loaded
from pyro_nngp.native.boundary import address, check_range
from pyro_nngp.native.structures import Queries

MAX_POINTS = 2**31 - 2**10
"""Points are numbered in 32 bits."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def supported(num_points: int) -> bool:
    """Whether compiled code is available, switched on, and covers that many points."""
    return num_points <= MAX_POINTS and enabled()


class Tree:
    """A k-d tree over fixed points.

    Args:
        points: (P, D), finite and at most 1e150 in size.
    """

    def __init__(self, points: Floats) -> None:
        points = _places("points", points)
        self._num_dims = points.shape[1]
        size = loaded().nn_search_bytes(*points.shape)
        self._memory: Tensor = memory.empty((size,), torch.uint8)
        at = address("nn_search", "tree", self._memory, (size,), torch.uint8, 16)
        _check(loaded().nn_search_build(points.ctypes.data, *points.shape, at))

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
        """Write the k nearest points of some queries into `index` and `value`, nearest first, ties by number.

        Args:
            rows: which queries to answer, fastest in `spatial_order`.
            places: where to search from, (Q, D).
            limit: only points with smaller numbers count, (Q,).
            exclude: the number of one point to leave out, (Q,), -1 for none.
            index: numbers of the points, (Q, k), to be written; -1 where none is left.
            value: squared distances, (Q, k), to be written; infinity where no point is left.
            level: an instruction set below ``library().nn_levels()``; None is the widest.
        """
        num_places, k = (*index.shape, 0)[:2]
        if k < 1:
            fail("nn_search", "index", "of shape (Q, k) with k >= 1", index.shape, "Ask for at least one neighbor.")
        rows, places = np.ascontiguousarray(rows), np.ascontiguousarray(places)
        limit, exclude = np.ascontiguousarray(limit), np.ascontiguousarray(exclude)
        layout = {
            "rows": (rows, rows.shape[:1], np.int64),
            "places": (places, (num_places, self._num_dims), np.float64),
            "limit": (limit, (num_places,), np.int64),
            "exclude": (exclude, (num_places,), np.int64),
            "index": (index, (num_places, k), np.int64),
            "value": (value, (num_places, k), np.float64),
        }
        pointers = {name: address("nn_search", name, *expected) for name, expected in layout.items()}
        check_range("nn_search", "rows", rows, num_places)
        queries = Queries(num_rows=len(rows), num_neighbors=k, **pointers)
        _check(loaded().nn_search_run(self._memory.data_ptr(), ctypes.byref(queries), best_level(level)))


def spatial_order(points: Floats) -> Ints:
    """An order in which consecutive points are close together, (P,)."""
    points = _places("points", points)
    order = np.empty(len(points), np.int64)
    _check(loaded().nn_search_order(points.ctypes.data, *points.shape, order.ctypes.data))
    return order


def farthest_points(points: Floats, first: int) -> Ints:
    """Rows from `first` on, each the farthest from all before it, without those that coincide with others; ties by row.

    Distances come from float64 differences, squared and added in the order of the columns.
    """
    points = _places("points", points)
    if not 0 <= first < len(points):
        fail("nn_farthest_points", "first", f"in 0..{len(points) - 1}", first, "It is a row of the points.")
    order = np.empty(len(points), np.int64)
    count = loaded().nn_farthest_points(points.ctypes.data, *points.shape, first, order.ctypes.data)
    _check(count < 0)
    return order[:count]


def _places(arg: str, places: Floats) -> Floats:
    """Finite coordinates (P, D) with P, D >= 1 and finite squared distances, row by row."""
    if places.ndim != 2 or 0 in places.shape or len(places) > MAX_POINTS:
        fail("nn_search", arg, f"of shape (P, D) with 1 <= P <= {MAX_POINTS}", places.shape, "Give points.")
    places = np.ascontiguousarray(places)
    address("nn_search", arg, places, places.shape, np.float64)
    if not np.isfinite(places).all():
        fail("nn_search", arg, "to be finite", "NaN or infinity", "Drop such points first.")
    largest = float(np.abs(places).max())
    if not math.isfinite(4 * largest * largest * places.shape[1]):
        fail("nn_search", arg, "with finite squared distances", f"{largest:g}", "Rescale them.")
    return places


def _check(status: int) -> None:
    if status:
        raise MemoryError("nn_search: no memory for a tree of points or the candidates of queries")
