"""Nearest points and nearest predecessors: exact, blocked, the same from every backend, ties broken by index.

`nearest` finds for each query the k nearest of all points, `nearest_predecessors` for each point the k nearest among the points before
it; both sort by (distance, index). `SearchIndex` is the same for repeated calls: it keeps its k-d tree or FAISS index.

How an answer is proven: a backend (`pyro_nngp.search_backends`) returns somewhat more than k candidates with exact float64 distances and a
floor below which nothing was left out. The k nearest candidates are the k nearest points, ties included, once the k-th distance lies
strictly below the floor. Queries for which it does not (many ties at the k-th place, too few predecessors among the candidates) are
repeated with twice the candidates, finally by brute force. On a regular grid that concerns few queries.

How predecessors are found: among a prefix of the points that reaches one quarter beyond the first row of the block in question. At least
four fifths of it are predecessors, so under a random ordering a quarter more candidates nearly always suffice. Under any ordering a row
whose surroundings come later needs many candidates, but few rows can be like that (the first to enter a neighborhood), so doubling
keeps the total near O(N k log N).

Exact duplicates: of points that coincide only the first k + 1 can be anybody's neighbor; the others are left out of the index, so that a
million rows at a thousand places are no harder than distinct ones.

Cost: O(N k log N) by k-d tree in low dimension, O(N^2 D / 2) by brute force and flat FAISS; memory O(N (k + D)).

Symbols: N or P points, Q queries, D dimensions, k neighbors.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from pyro_nngp._checks import check_inputs, check_num_neighbors, check_same_kind, check_tensor, fail
from pyro_nngp.search_backends import (
    Backend,
    BruteForce,
    Candidates,
    FlatFaiss,
    Floats,
    Ints,
    InvertedFile,
    KDTree,
    Metric,
    find_faiss,
    has_gpu_faiss,
)

_SPARE = 9  # candidates beyond k: one point left out, eight ties, as grids have
_BLOCK = 2**19  # candidates handled at a time, a few MB per array
BACKENDS = ("auto", "kdtree", "torch", "faiss", "ivf")


def nearest(
    queries: Float[Tensor, "Q D"],
    points: Float[Tensor, "P D"],
    k: int,
    exclude: Int[Tensor, " Q"] | None = None,
    backend: str = "auto",
    *,
    metric: Metric | None = None,
    nprobe: int = 16,
    progress: bool = True,
) -> Int[Tensor, "Q k"]:
    """The k nearest points of each query, nearest first, ties by index.

    Args:
        queries: places to search from, (Q, D).
        points: points to search among, (P, D).
        k: number of neighbors, 1..P, or 1..P-1 with `exclude`.
        exclude: for each query the index of one point to leave out (such as the query itself), -1 for none.
        backend, metric, nprobe, progress: as for `SearchIndex`.

    Returns:
        Indices into `points`, (Q, k), int64.

    Raises:
        ValueError, TypeError: on malformed arguments.
        ImportError: if the backend needs FAISS and it does not import.
    """
    index = SearchIndex(points, backend=backend, metric=metric, nprobe=nprobe, progress=progress)
    return index.nearest(queries, k, exclude)[0]


def nearest_predecessors(
    points: Float[Tensor, "N D"],
    k: int,
    start: int = 0,
    backend: str = "auto",
    *,
    metric: Metric | None = None,
    nprobe: int = 16,
    progress: bool = True,
) -> Int[Tensor, "R k"]:
    """The at most k nearest points before each point, nearest first, ties by index, -1 padded.

    Args:
        points: points in their ordering, (N, D).
        k: number of neighbors, k >= 1; rows with fewer predecessors are padded.
        start: first row to answer for, 0..N-1; for points appended to an ordering whose earlier rows are known.
        backend, metric, nprobe, progress: as for `SearchIndex`.

    Returns:
        Indices of predecessors of rows start..N-1, (R, k) with R = N - start, int64.

    Raises:
        ValueError, TypeError: on malformed arguments.
        ImportError: if the backend needs FAISS and it does not import.
    """
    index = SearchIndex(points, backend=backend, metric=metric, nprobe=nprobe, progress=progress)
    return index.predecessors(k, start)[0]


def recall(approximate: Int[Tensor, "Q k"], exact: Int[Tensor, "Q k"]) -> float:
    """Share of the exact neighbors (-1 entries apart) that an approximate search found."""
    if approximate.shape != exact.shape:
        fail("recall", "approximate", f"of the shape of exact {tuple(exact.shape)}", tuple(approximate.shape), "Use one k for both.")
    real = exact >= 0
    found = torch.stack([(approximate == column[:, None]).any(-1) for column in exact.unbind(-1)], -1)
    return float((found & real).sum() / real.sum())


class SearchIndex:
    """Search over fixed points, kept for repeated calls.

    Args:
        points: finite points, (P, D). Distances are taken in float64 whatever their dtype.
        backend: "kdtree" (CPU), "torch" (brute force on the device of the points), "faiss" (flat, float32 candidates), all exact and
            identical; "ivf" (FAISS inverted file, approximate); "auto" picks an exact one by dimension, size, device and what is installed.
        metric: callable (n, D), (m, D) -> (n, m) of distances, any real numbers that grow with distance; brute force only.
        nprobe: inverted lists searched per query by "ivf".
        progress: whether a search that takes more than three seconds shows a progress bar.

    Raises:
        ValueError, TypeError: on malformed arguments.
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
        check_inputs("SearchIndex", "points", points)
        if nprobe < 1:
            fail("SearchIndex", "nprobe", "to be at least 1", nprobe, "Search at least one inverted list.")
        self.backend = _choose_backend(backend, points, metric)
        self._tensor = points.detach()
        self._points: Floats = self._tensor.cpu().double().numpy()
        self._metric, self._nprobe, self._progress = metric, nprobe, progress
        self._copies = _earlier_copies(self._points)
        self._sources: dict[int, "_Source"] = {}

    def nearest(
        self, queries: Float[Tensor, "Q D"], k: int, exclude: Int[Tensor, " Q"] | None = None
    ) -> tuple[Int[Tensor, "Q k"], Float[Tensor, "Q k"]]:
        """Indices and exact distances (float64; squared if Euclidean) of the k nearest points; arguments as for `nearest`."""
        self._check_queries(queries)
        size = len(self._points)
        check_num_neighbors("nearest", k, size if exclude is None else size - 1, "k")
        if exclude is None:
            without = np.full(len(queries), -1)
        else:
            _check_exclude(exclude, len(queries), size)
            without = exclude.cpu().numpy()
        copies = k + 1 if self._copies.max() > k else 0  # 0: no group is large enough to be thinned
        source = self._sources.get(copies)
        if source is None:
            source = self._sources[copies] = self._build(copies or size)
            source.prefix(size)
        limit = np.full(len(queries), size)
        with self._bar(len(queries)) as bar:
            index, value, _ = source.answer(queries.detach().cpu().double().numpy(), k, limit, without, k + _SPARE, bar)
        return self._tensors(index, value)

    def predecessors(self, k: int, start: int = 0) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
        """Indices and exact distances (-1 and infinity where there is none) of the k nearest predecessors of rows start..N-1."""
        size = len(self._points)
        check_num_neighbors("nearest_predecessors", k, sys.maxsize, "k")
        if not 0 <= start < size:
            fail("nearest_predecessors", "start", f"in 0..{size - 1}", start, "It is the first row to answer for.")
        source = self._build(k + 1)
        growth = source.backend.growth
        fetch = k + _SPARE + (0 if source.backend.filters else int(k * growth))
        index, value = np.empty((size - start, k), np.int64), np.empty((size - start, k))
        with self._bar(size - start) as bar:
            row = start
            while row < size:
                few = row < 16 * k  # nearly every row would ask for more than a tree has
                stop = min(size, row + max(256, int(row * growth)))
                source.prefix(stop, brute_only=few)
                block = slice(row - start, stop - start)
                none = np.full(stop - row, -1)
                here = source.answer(self._points[row:stop], k, np.arange(row, stop), none, fetch, bar)
                index[block], value[block], hard = here
                if hard > 1 / 3 and fetch < 2 * k:
                    fetch += fetch // 2  # a regular ordering, where half of the surroundings come later
                row = stop
        return self._tensors(index, value)

    def _build(self, copies: int) -> "_Source":
        """Backends over the points that have fewer than `copies` earlier duplicates."""
        kept = np.flatnonzero(self._copies < copies)
        points = self._points[kept]
        on_gpu = self._tensor.is_cuda
        brute = BruteForce(points, self._tensor.device, self._tensor.dtype, self._metric)
        backend: Backend = brute
        if self.backend == "kdtree":
            backend = KDTree(points)
        elif self.backend == "faiss":
            backend = FlatFaiss(points, on_gpu and has_gpu_faiss())
        elif self.backend == "ivf":
            backend = InvertedFile(points, self._nprobe, on_gpu and has_gpu_faiss())
        return _Source(backend, brute, kept)

    def _tensors(self, index: Ints, value: Floats) -> tuple[Tensor, Tensor]:
        device = self._tensor.device
        return torch.from_numpy(index).to(device), torch.from_numpy(value).to(device)

    def _bar(self, total: int) -> tqdm:
        return tqdm(total=total, desc="nearest neighbors", unit="point", delay=3, disable=not self._progress)

    def _check_queries(self, queries: Tensor) -> None:
        check_inputs("nearest", "queries", queries)
        check_same_kind("nearest", points=self._tensor, queries=queries)
        if queries.shape[1] != self._tensor.shape[1]:
            expectation = f"with {self._tensor.shape[1]} columns, as points have"
            fail("nearest", "queries", expectation, queries.shape[1], "Give both the same input dimensions.")


class _Source:
    """A backend, brute force behind it, and the numbers of the points that both hold (all but surplus duplicates)."""

    def __init__(self, backend: Backend, brute: BruteForce, kept: Ints) -> None:
        self.backend, self._brute, self._kept = backend, brute, kept

    def prefix(self, stop: int, brute_only: bool = False) -> None:
        """Search among points 0..stop-1."""
        inside = int(np.searchsorted(self._kept, stop))
        self._now: Backend = self._brute if brute_only else self.backend
        self._now.prefix(inside)
        self._brute.prefix(inside)

    def answer(
        self, queries: Floats, k: int, limit: Ints, exclude: Ints, fetch: int, bar: tqdm
    ) -> tuple[Ints, Floats, float]:
        """The k nearest points below `limit` other than `exclude`, in the numbering of all points, (Q, k) each.

        Asks for `fetch` candidates, keeps the proven answers, and asks for twice as many for the other queries, whose share comes third.
        """
        limit = np.searchsorted(self._kept, limit)
        place = np.minimum(np.searchsorted(self._kept, exclude), len(self._kept) - 1)
        exclude = np.where(self._kept[place] == exclude, place, -1)
        index, value = np.empty((len(queries), k), np.int64), np.empty((len(queries), k))
        proven = np.zeros(len(queries), bool)
        backend, hard = self._now, 0.0
        todo = backend.visiting_order(queries)
        while todo.size:
            if fetch > backend.max_fetch(k):
                backend = self._brute
            complete = backend is self._brute and fetch >= len(self._kept)

            def work(rows: Ints) -> int:
                found = backend.candidates(queries[rows], fetch, limit[rows], exclude[rows])  # noqa: B023
                index[rows], value[rows], proven[rows] = _select(found, k, limit[rows], exclude[rows])
                proven[rows] |= complete  # noqa: B023
                return int(proven[rows].sum())

            threads = backend.threads()
            size = max(1, min(_BLOCK // fetch, -(-len(todo) // threads)))
            chunks = [todo[i : i + size] for i in range(0, len(todo), size)]
            for count in _map(work, chunks, threads):
                bar.update(count)
            todo = todo[~proven[todo]]
            hard = hard or len(todo) / len(queries)
            fetch *= 2
        return np.where(index < 0, -1, self._kept[index]), value, hard


def _map(work: Callable[[Ints], int], chunks: list[Ints], threads: int) -> Iterator[int]:
    """The built-in `map`, by several threads if that is of use; NumPy and SciPy let go of the interpreter in all that is heavy here."""
    if min(threads, len(chunks)) == 1:
        yield from map(work, chunks)
    else:
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(work, chunks)


def _select(found: Candidates, k: int, limit: Ints, exclude: Ints) -> tuple[Ints, Floats, NDArray[np.bool_]]:
    """The k nearest admissible candidates by (distance, index), -1 padded, and whether the floor proves them."""
    index, value, floor = found
    if index.shape[1] <= k:  # there are no more points; one column more than k is looked at below
        missing = ((0, 0), (0, k + 1 - index.shape[1]))
        index, value = np.pad(index, missing, constant_values=-1), np.pad(value, missing)
    out = (index < 0) | (index >= limit[:, None]) | (index == exclude[:, None])
    value[out] = np.inf
    order = np.argsort(value, axis=-1, kind="stable")[:, : k + 1]
    first = np.take_along_axis(value, order, -1)
    tied = np.flatnonzero((first[:, 1:] == first[:, :-1]).any(-1))
    order[tied] = np.lexsort((index[tied], value[tied]))[:, : k + 1]
    index, value = np.take_along_axis(index, order[:, :k], -1), first[:, :k]
    index[np.isinf(value)] = -1
    required = np.minimum(k, limit - ((exclude >= 0) & (exclude < limit)))
    last = np.take_along_axis(value, np.maximum(required - 1, 0)[:, None], -1)[:, 0]
    return index, value, (required == 0) | (last < floor)


def _earlier_copies(points: Floats) -> Ints:
    """For each point the number of earlier points that it coincides with.

    Rows are brought together by a hash. Where different rows share one, a group may be counted short, which only keeps more of its points.
    """
    code = np.zeros(len(points), np.uint64)
    for column in points.T:
        code = (code ^ (column + 0.0).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)  # + 0.0 turns -0.0 into 0.0
        code ^= code >> np.uint64(32)
    order = np.argsort(code, kind="stable")
    code = code[order]
    same = code[1:] == code[:-1]
    candidates = np.flatnonzero(same)
    same[candidates] = (points[order[candidates + 1]] == points[order[candidates]]).all(-1)
    place = np.arange(len(points))
    first = np.maximum.accumulate(np.where(np.append(False, same), 0, place))
    copies = np.empty_like(place)
    copies[order] = place - first
    return copies


def _choose_backend(backend: str, points: Tensor, metric: Metric | None) -> str:
    """Resolve "auto", and refuse what cannot be done."""
    if backend not in BACKENDS:
        fail("SearchIndex", "backend", f"to be one of {BACKENDS}", repr(backend), "Use 'auto' if in doubt.")
    if metric is not None:
        if not callable(metric):
            fail("SearchIndex", "metric", "to be a callable (n, D), (m, D) -> (n, m)", type(metric).__name__, "Pass a function.", TypeError)
        if backend not in ("auto", "torch"):
            fail("SearchIndex", "backend", "'torch' or 'auto' with a metric of one's own", repr(backend), "Only brute force takes it.")
        return "torch"
    if backend in ("faiss", "ivf") and find_faiss() is None:
        raise ImportError(f"SearchIndex: backend {backend!r} needs FAISS. Install pyro-nngp[cpu] or pyro-nngp[gpu], or use 'auto'.")
    if backend != "auto":
        return backend
    size, dim = points.shape
    if points.is_cuda:
        if dim <= 3 and size > 500_000:
            return "kdtree"
        return "faiss" if has_gpu_faiss() else "torch"
    if dim <= 8:
        return "kdtree"
    # Two OpenMP runtimes in one process, FAISS's and torch's, are known to crash on macOS.
    return "faiss" if sys.platform != "darwin" and find_faiss() is not None else "torch"


def _check_exclude(exclude: Tensor, num_queries: int, size: int) -> None:
    check_tensor("nearest", "exclude", exclude)
    if exclude.dtype != torch.int64 or exclude.shape != (num_queries,):
        actual = f"{exclude.dtype} of shape {tuple(exclude.shape)}"
        fail("nearest", "exclude", f"to be int64 of shape ({num_queries},), one index per query", actual, "Use -1 for none.")
    if int(exclude.min()) < -1 or int(exclude.max()) >= size:
        actual = f"{int(exclude.min())}..{int(exclude.max())}"
        fail("nearest", "exclude", f"in -1..{size - 1}", actual, "It numbers the points searched.")
