"""Nearest points and nearest predecessors: exact, blocked, equal from every backend, ties broken by index.

`nearest` finds for each query the k nearest of all points, `nearest_predecessors` for each point the k nearest among
the points before it; both sort by (distance, index). `SearchIndex` serves repeated calls: it keeps its k-d
tree or FAISS index. How answers are proven: `pyro_nngp.neighbors.search.certification`; by what:
`pyro_nngp.neighbors.search.backends`.

Predecessors are searched block by block, among the prefix of the points that reaches one quarter beyond the first row
of the block. At least four fifths of the block are predecessors, so under a random ordering a quarter more candidates
nearly always suffice. Under other orderings a row whose surroundings come later needs many candidates, but such rows
are few (the first in each neighborhood), so that doubling keeps the total near O(N k log N). The compiled tree
leaves out later points itself, so its prefixes double and every ordering is quick.

Cost: O(N k log N) by k-d tree in low dimension, O(N^2 D / 2) by brute force and flat FAISS; memory O(N (k + D)).

Symbols: N or P points, Q queries, R rows asked for, D dimensions, k neighbors.
"""

import sys
from functools import cache, cached_property
from typing import Any

import numpy as np
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
from pyro_nngp.neighbors.search.backends import (
    BruteForce,
    CandidateBackend,
    CompiledTree,
    FlatFaiss,
    Floats,
    Ints,
    InvertedFile,
    KDTree,
    Metric,
    find_faiss,
    has_gpu_faiss,
)
from pyro_nngp.neighbors.search.certification import Queries, Source
from pyro_nngp.neighbors.search.copies import earlier_copies
from pyro_nngp.neighbors.search.on_device import GRID_DIMS, DeviceIndex

BACKENDS = ("auto", "kdtree", "torch", "faiss", "ivf")
SPARE = 9  # candidates beyond k: one point left out, and eight ties, as grids have
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
        options: `backend`, `metric`, `nprobe` and `progress` of :class:`SearchIndex`.

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
        options: `backend`, `metric`, `nprobe` and `progress` of :class:`SearchIndex`.

    Returns:
        Indices of predecessors of rows start..N-1, (R, k) with R = N - start, int64.

    Raises:
        ValueError, TypeError: for malformed arguments.
        ImportError: if the backend needs FAISS and it does not import.
    """
    return SearchIndex(points, **options).predecessors(k, start)[0]


def recall(approximate: Int[Tensor, "Q k"], exact: Int[Tensor, "Q k"]) -> float:
    """Fraction of the exact neighbors (without -1 entries) that an approximate search returned."""
    check_tensor("recall", "approximate", approximate)
    check_tensor("recall", "exact", exact)
    if approximate.shape != exact.shape:
        expectation = f"of the shape of exact {tuple(exact.shape)}"
        fail("recall", "approximate", expectation, tuple(approximate.shape), "Use one k for both.")
    real = exact >= 0
    hits = torch.stack([(approximate == column[:, None]).any(-1) for column in exact.unbind(-1)], -1)
    return float((hits & real).sum() / real.sum())


class SearchIndex:
    """A search index over fixed points, kept for repeated calls.

    Args:
        points: finite points, (P, D). Distances are taken in float64 whatever their dtype.
        backend: "kdtree" (CPU; compiled where the installation could, else SciPy's), "torch" (torch operations on
            the device of the points: grid cells up to 3 dimensions, then tiles of all distances), "faiss" (flat,
            float32 candidates), all exact and identical; "ivf" (FAISS inverted file, approximate); "auto" picks an
            exact one by dimension, size, device and what is installed: on a CPU the compiled tree up to 40 dimensions,
            then FAISS, or without compiled code SciPy's up to 8; on a GPU "torch" up to 3 dimensions, then FAISS if it
            is built for GPUs, else "torch".
        metric: callable (n, D), (m, D) -> (n, m) of distances: any real numbers that grow with distance; infinity marks
            pairs that must not be neighbors. Brute force only.
        nprobe: inverted lists searched per query by "ivf".
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
        nprobe: int = 16,
        progress: bool = True,
    ) -> None:
        check_coordinates("SearchIndex", "points", points)
        check_flags("SearchIndex", progress=progress)
        check_int("SearchIndex", "nprobe", nprobe, 1, "Search at least one inverted list.")
        self.backend = _choose_backend(backend, points, metric)
        self._tensor = points.detach()
        self._metric, self._nprobe, self._progress = metric, nprobe, progress
        self._on_device = DeviceIndex(points) if self.backend == "torch" and metric is None else None
        self._sources: dict[int, Source] = {}

    @cached_property
    def _points(self) -> Floats:
        return self._tensor.cpu().double().numpy()

    @cached_property
    def _copies(self) -> Ints:
        return earlier_copies(torch.from_numpy(self._points)).numpy()

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
        if self._on_device is not None:
            with self._bar(len(queries)) as bar:
                return self._on_device.nearest(queries, k, exclude, bar.update)
        without = np.full(len(queries), -1) if exclude is None else exclude.cpu().numpy()
        copies = min(k, int(self._copies.max())) + 1
        if copies not in self._sources:
            source = self._build(copies)
            source.prefix(size)
            self._sources[copies] = source  # once it is ready: other threads may search at the same time
        places = queries.detach().cpu().double().numpy()
        with self._bar(len(queries)) as bar:
            limit, answers = np.full(len(queries), size), _empty(len(queries), k)
            self._sources[copies].answer(Queries(places, limit, without, *answers), k + SPARE, bar)
        return self._tensors(*answers)

    @memory.memory_errors("nearest_predecessors", "Lower k.")
    def predecessors(self, k: int, start: int = 0) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
        """Indices and distances (-1 and infinity for none) of the k nearest predecessors of the rows from `start`."""
        size = len(self._tensor)
        check_num_neighbors("nearest_predecessors", k, sys.maxsize, "k")
        check_int("nearest_predecessors", "start", start)
        if not 0 <= start < size:
            fail("nearest_predecessors", "start", f"in 0..{size - 1}", start, "It is the first row to answer for.")
        if self._on_device is not None:
            with self._bar(size - start) as bar:
                return self._on_device.predecessors(k, start, bar.update)
        rows = np.arange(start, size)
        queries = Queries(self._points[start:], rows, np.full(len(rows), -1), *_empty(len(rows), k))
        with self._bar(len(rows)) as bar:
            self._answer_ascending(queries, bar)
        return self._tensors(queries.index, queries.value)

    def nearest_before(
        self, queries: Float[Tensor, "Q D"], limit: Int[Tensor, " Q"], k: int
    ) -> tuple[Int[Tensor, "Q k"], Float[Tensor, "Q k"]]:
        """Indices and distances of the k nearest points before a limit; -1 and infinity where there are fewer.

        On CPUs only. Arguments as for `nearest`.

        Args:
            queries: places to search from.
            limit: for each query only points with smaller numbers count, 0..P.
            k: number of neighbors.
        """
        ascending = limit.argsort(stable=True)
        places, limits = queries.detach().double()[ascending].numpy(), limit[ascending].numpy()
        asked = Queries(places, limits, np.full(len(limits), -1), *_empty(len(limits), k))
        with self._bar(len(limits)) as bar:
            self._answer_ascending(asked, bar)
        index, value = self._tensors(asked.index, asked.value)
        back = torch.empty_like(ascending)
        back[ascending] = torch.arange(len(back))
        return index[back], value[back]

    def _answer_ascending(self, queries: Queries, bar: tqdm) -> None:
        """Answer queries whose limits ascend, among prefixes of the points that grow with them."""
        size, k, limits = len(self._tensor), queries.k, queries.limit
        source = self._build(k + 1)
        growth = source.backend.growth
        fetch = k + SPARE + (0 if source.backend.filters else int(k * growth))
        first = 0
        while first < len(limits):
            limit = int(limits[first])
            stop = min(size, limit + max(256, int(limit * growth)))
            last = max(first + 1, int(np.searchsorted(limits, stop, side="right" if stop == size else "left")))
            # Of a row with few predecessors, a tree that does not filter would return nearly all that it holds.
            source.prefix(stop, brute_only=limit < 16 * k and not source.backend.filters)
            block = slice(first, last)
            part = Queries(
                queries.places[block], limits[block], queries.exclude[block], queries.index[block], queries.value[block]
            )
            hard = source.answer(part, fetch, bar)
            if hard > 1 / 3 and fetch < 2 * k:
                fetch += fetch // 2  # a regular ordering, in which half of the surroundings come later
            first = last

    def _build(self, copies: int) -> Source:
        """Backends over the points that have fewer than `copies` earlier duplicates."""
        kept = np.flatnonzero(self._copies < copies)
        points, on_gpu = self._points[kept], self._tensor.is_cuda and has_gpu_faiss()
        brute = BruteForce(points, self._tensor.device, self._tensor.dtype, self._metric)
        backend: CandidateBackend | CompiledTree = brute
        if self.backend == "kdtree":
            backend = CompiledTree(points) if compiled.supported(len(points)) else KDTree(points)
        elif self.backend == "faiss":
            backend = FlatFaiss(points, on_gpu)
        elif self.backend == "ivf":
            backend = InvertedFile(points, self._nprobe, on_gpu)
        return Source(backend, brute, kept)

    def _tensors(self, index: Ints, value: Floats) -> tuple[Tensor, Tensor]:
        device = self._tensor.device
        return torch.from_numpy(index).to(device), torch.from_numpy(value).to(device)

    def _bar(self, total: int) -> tqdm:
        if not self._progress or total < _MANY:
            return _no_bar()
        return tqdm(total=total, desc="nearest neighbors", unit="point", delay=3)


@cache
def _no_bar() -> tqdm:
    """A bar that shows nothing."""
    return tqdm(disable=True)


def _empty(num_queries: int, k: int) -> tuple[Ints, Floats]:
    """Memory for numbers and distances of neighbors."""
    shape = num_queries, k
    return memory.empty(shape, torch.int64).numpy(), memory.empty(shape, torch.float64).numpy()


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
    if backend in ("faiss", "ivf") and find_faiss() is None:
        cure = "Install pyro-nngp[cpu] or pyro-nngp[gpu], or use backend='auto'."
        fail(where, "FAISS", f"to be installed for backend {backend!r}", "no module that imports", cure, ImportError)
    if backend != "auto":
        return backend
    size, dim = points.shape
    if points.is_cuda:
        return "faiss" if dim > GRID_DIMS and has_gpu_faiss() else "torch"
    has_tree = compiled.supported(size)
    if dim <= (40 if has_tree else 8):
        return "kdtree"
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
