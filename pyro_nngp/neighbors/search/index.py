"""Nearest points and nearest predecessors: exact, blocked, equal from every backend, ties broken by index.

`nearest` finds for each query the k nearest of all points, `nearest_predecessors` for each point the k nearest among
the points before it; both sort by (distance, index). `SearchIndex` serves repeated calls: it keeps its k-d
tree or FAISS index. How answers are proven: `pyro_nngp.neighbors.search.backends`.

Predecessors are searched block by block, among the prefix of the points that reaches to twice the first row of the
block; with FAISS, which does not leave out later points itself, to one sixteenth beyond it.

Cost: O(N k log N) by k-d tree in low dimension, O(N^2 D / 2) by flat FAISS or in tiles; memory O(N (k + D)).

Symbols: N or P points, Q queries, R rows asked for, D dimensions, k neighbors.
"""

import sys
from functools import cache, cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from pyro_nngp import _memory as memory
from pyro_nngp._checks import (
    check_choice,
    check_coordinates,
    check_int,
    check_num_neighbors,
    check_same_kind,
    check_tensor,
    fail,
)
from pyro_nngp._kinds import check_flags
from pyro_nngp.native import search as compiled
from pyro_nngp.neighbors.search.backends import Backend, CompiledTree, FlatFaiss, find_faiss, has_gpu_faiss
from pyro_nngp.neighbors.search.copies import earlier_copies
from pyro_nngp.neighbors.search.on_device import GRID_DIMS, Metric, PointsInTorch, Queries

BACKENDS = ("auto", "kdtree", "torch", "faiss")
_MANY = 64  # queries that a progress bar is made for


def nearest(
    queries: Float[Tensor, "Q D"],
    points: Float[Tensor, "P D"],
    k: int,
    exclude: Int[Tensor, " Q"] | None = None,
    **options: Any,
) -> Int[Tensor, "Q k"]:
    """Find the k nearest points of each query, nearest first, ties by index.

    Args:
        queries: places to search from, (Q, D).
        points: points to search among, (P, D).
        k: number of neighbors, 1..P, or 1..P-1 with `exclude`.
        exclude: for each query the index of one point to leave out (such as the query itself), -1 for none.
        options: `backend`, `metric` and `progress` of :class:`SearchIndex`.

    Returns:
        Indices into `points`, (Q, k), int64.

    Raises:
        ValueError, TypeError: for malformed arguments.
        ImportError: if the backend needs FAISS and it does not import.
    """
    return SearchIndex(points, **options).nearest(queries, k, exclude)[0]


def nearest_predecessors(points: Float[Tensor, "N D"], k: int, start: int = 0, **options: Any) -> Int[Tensor, "R k"]:
    """Find the at most k nearest points before each point, nearest first, ties by index, -1 padded.

    Args:
        points: points in their ordering, (N, D).
        k: number of neighbors, k >= 1; rows with fewer predecessors are padded.
        start: first row to answer for, 0..N-1; for points appended to an ordering whose earlier rows are known.
        options: `backend`, `metric` and `progress` of :class:`SearchIndex`.

    Returns:
        Indices of predecessors of rows start..N-1, (R, k) with R = N - start, int64.

    Raises:
        ValueError, TypeError: for malformed arguments.
        ImportError: if the backend needs FAISS and it does not import.
    """
    return SearchIndex(points, **options).predecessors(k, start)[0]


class SearchIndex:
    """A search index over fixed points, kept for repeated calls.

    Args:
        points: finite points, (P, D). Distances are taken in float64 whatever their dtype.
        backend: "kdtree" (compiled code on a CPU), "torch" (torch operations on the device of the points: grid cells
            up to 3 dimensions, then tiles of all distances), "faiss" (flat, float32 candidates): all exact, and
            identical. "auto" picks one by dimension, size, device and what is installed: on a CPU the tree up to 40
            dimensions, then FAISS, or without compiled code torch up to 3; on a GPU torch up to 3 dimensions, then
            FAISS if it is built for GPUs, else torch.
        metric: callable (n, D), (m, D) -> (n, m) of distances: any real numbers that grow with distance; infinity marks
            pairs that must not be neighbors. By "torch" only.
        progress: whether a search that takes more than three seconds shows a progress bar.

    Raises:
        ValueError, TypeError: for malformed arguments.
        ImportError: if the backend needs FAISS and it does not import.
    """

    def __init__(
        self,
        points: Float[Tensor, "P D"],
        *,
        backend: str = "auto",
        metric: Metric | None = None,
        progress: bool = True,
    ) -> None:
        check_coordinates("SearchIndex", "points", points)
        check_flags("SearchIndex", progress=progress)
        self.backend = _choose_backend(backend, points, metric)
        self._tensor = points.detach()
        self._metric, self._progress = metric, progress
        self._growth = 1 / 16 if self.backend == "faiss" else 1.0
        self._built: dict[int, tuple[Backend, Tensor | None]] = {}

    @cached_property
    def _points(self) -> Tensor:
        return self._places(self._tensor)

    @cached_property
    def _copies(self) -> Tensor:
        return earlier_copies(self._points.double())

    @cached_property
    def _most_copies(self) -> int:
        return int(self._copies.max())

    def _places(self, x: Tensor) -> Tensor:
        """Points as they are searched: a metric sees them as the user gave them."""
        return x.detach().double() if self._metric is None else x.detach()

    def nearest(
        self, queries: Float[Tensor, "Q D"], k: int, exclude: Int[Tensor, " Q"] | None = None
    ) -> tuple[Int[Tensor, "Q k"], Float[Tensor, "Q k"]]:
        """Indices and distances (float64; squared if Euclidean) of the k nearest points; arguments as for `nearest`."""
        size = len(self._tensor)
        check_coordinates("SearchIndex", "queries", queries)
        check_same_kind("nearest", points=self._tensor, queries=queries)
        if queries.shape[1] != self._tensor.shape[1]:
            expectation = f"with {self._tensor.shape[1]} columns, as points have"
            fail("nearest", "queries", expectation, queries.shape[1], "Give both the same input dimensions.")
        check_num_neighbors("nearest", k, size if exclude is None else size - 1, "k")
        if exclude is not None:
            _check_exclude(exclude, len(queries), size)
        copies = min(k, self._most_copies) + 1
        if copies not in self._built:  # it is kept once it is ready: other threads may search at the same time
            kept = self._kept(copies)
            self._built[copies] = self._build(self._points if kept is None else self._points[kept]), kept
        rows = torch.arange(len(queries), device=queries.device)
        limit, none = torch.full_like(rows, size), torch.full_like(rows, -1)
        asked = _queries(self._places(queries), limit, none if exclude is None else exclude, k)
        with self._bar(len(queries)) as bar:
            _answer(*self._built[copies], asked, bar)
        return asked.numbers, asked.value

    @memory.memory_errors("nearest_predecessors", "Lower k.")
    def predecessors(self, k: int, start: int = 0) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
        """Indices and distances (-1 and infinity for none) of the k nearest predecessors of the rows from `start`."""
        size = len(self._tensor)
        check_num_neighbors("nearest_predecessors", k, sys.maxsize, "k")
        check_int("nearest_predecessors", "start", start)
        if not 0 <= start < size:
            fail("nearest_predecessors", "start", f"in 0..{size - 1}", start, "It is the first row to answer for.")
        rows = torch.arange(start, size, device=self._tensor.device)
        queries = _queries(self._points[start:], rows, torch.full_like(rows, -1), k)
        with self._bar(len(rows)) as bar:
            self._answer_ascending(queries, bar)
        return queries.numbers, queries.value

    def nearest_before(
        self, queries: Float[Tensor, "Q D"], limit: Int[Tensor, " Q"], k: int
    ) -> tuple[Int[Tensor, "Q k"], Float[Tensor, "Q k"]]:
        """Indices and distances of the k nearest points before a limit; -1 and infinity where there are fewer.

        Arguments as for `nearest`.

        Args:
            queries: places to search from.
            limit: for each query only points with smaller numbers count, 0..P.
            k: number of neighbors.
        """
        ascending = limit.argsort(stable=True)
        limits = limit[ascending]
        asked = _queries(self._places(queries)[ascending], limits, torch.full_like(limits, -1), k)
        with self._bar(len(limits)) as bar:
            self._answer_ascending(asked, bar)
        back = torch.empty_like(ascending)
        back[ascending] = torch.arange(len(back), device=back.device)
        return asked.numbers[back], asked.value[back]

    def _answer_ascending(self, queries: Queries, bar: tqdm) -> None:
        """Answer queries whose limits ascend, among prefixes of the points that grow with them."""
        size, limits, first = len(self._tensor), queries.limit, 0
        kept = self._kept(queries.k + 1)
        while first < len(limits):
            limit = int(limits[first])
            stop = min(size, limit + max(256, int(limit * self._growth)))
            last = int(torch.searchsorted(limits, stop, right=True))
            inside = None if kept is None else kept[: int(torch.searchsorted(kept, stop))]
            backend = self._build(self._points[:stop] if inside is None else self._points[inside])
            _answer(backend, inside, queries.at(slice(first, last)), bar)
            first = last

    def _kept(self, copies: int) -> Tensor | None:
        """Numbers of the points that have fewer than `copies` earlier duplicates; None is all."""
        return None if self._most_copies < copies else torch.nonzero(self._copies < copies)[:, 0]

    def _build(self, points: Tensor) -> Backend:
        if self.backend == "kdtree":
            return CompiledTree(points)
        if self.backend == "faiss":
            return FlatFaiss(points, points.is_cuda and has_gpu_faiss())
        return PointsInTorch(points, self._metric)

    def _bar(self, total: int) -> tqdm:
        if not self._progress or total < _MANY:
            return _no_bar()
        return tqdm(total=total, desc="nearest neighbors", unit="point", delay=3)


@cache
def _no_bar() -> tqdm:
    """A bar that shows nothing."""
    return tqdm(disable=True)


def _queries(places: Tensor, limit: Tensor, exclude: Tensor, k: int) -> Queries:
    """Queries with memory for their answers."""
    shape, device = (len(places), k), places.device
    answers = memory.empty(shape, torch.int64, device), memory.empty(shape, torch.float64, device)
    return Queries(places, limit, exclude, *answers)


def _answer(backend: Backend, kept: Tensor | None, queries: Queries, bar: tqdm) -> None:
    """Answer queries about all points by a backend that has the `kept` ones."""
    if kept is None:
        backend.answer(queries, bar.update)
        return
    place = torch.searchsorted(kept, queries.exclude).clamp(max=len(kept) - 1)
    exclude = torch.where(kept[place] == queries.exclude, place, -1)
    limit = torch.searchsorted(kept, queries.limit)
    backend.answer(queries._replace(limit=limit, exclude=exclude), bar.update)
    queries.numbers.copy_(torch.where(queries.numbers < 0, -1, kept[queries.numbers]))


def _choose_backend(backend: str, points: Tensor, metric: Metric | None) -> str:
    """Resolve "auto", and raise for combinations that do not work."""
    where = "SearchIndex"
    check_choice(where, "backend", backend, BACKENDS, "Use 'auto' if in doubt.")
    if metric is not None:
        if not callable(metric):
            fail(where, "metric", "to be callable", type(metric).__name__, "Map (n, D), (m, D) to (n, m).", TypeError)
        if backend not in ("auto", "torch"):
            fail(where, "backend", "'auto' or 'torch' with a metric", repr(backend), "Others are Euclidean only.")
        return "torch"
    if backend == "faiss" and find_faiss() is None:
        cure = "Install pyro-nngp[cpu] or pyro-nngp[gpu], or use backend='auto'."
        fail(where, "FAISS", f"to be installed for backend {backend!r}", "no module that imports", cure, ImportError)
    size, dim = points.shape
    has_tree = compiled.supported(size)
    if backend == "kdtree" and not has_tree:
        cure = "Use backend='auto', which finds the same neighbors."
        fail(where, "compiled code", "for backend 'kdtree'", f"none for {size} points", cure)
    if backend != "auto":
        return backend
    if points.is_cuda:
        return "faiss" if dim > GRID_DIMS and has_gpu_faiss() else "torch"
    if has_tree and dim <= 40:
        return "kdtree"
    if dim <= GRID_DIMS:
        return "torch"
    # FAISS and torch bring an OpenMP runtime each, and two of them in one process crash on macOS.
    if sys.platform != "darwin" and find_faiss() is not None:
        return "faiss"
    return "kdtree" if has_tree else "torch"


def _check_exclude(exclude: Tensor, num_queries: int, size: int) -> None:
    check_tensor("nearest", "exclude", exclude)
    if exclude.dtype != torch.int64 or exclude.shape != (num_queries,):
        actual = f"{exclude.dtype} of shape {tuple(exclude.shape)}"
        fail("nearest", "exclude", f"to be int64 of shape ({num_queries},)", actual, "Give one index per query.")
    if int(exclude.min()) < -1 or int(exclude.max()) >= size:
        actual = f"{int(exclude.min())}..{int(exclude.max())}"
        fail("nearest", "exclude", f"in -1..{size - 1}", actual, "It numbers the points searched, -1 for none.")
