"""Backends of the neighbor search: the compiled k-d tree, flat FAISS, and torch operations (:mod:`.on_device`).

All give exact answers, with the same distances: float64, from differences, summed over the dimensions in order. The
tree and the operations of torch prove theirs. FAISS, in float32, gives candidates and with them a *floor*, below which
no other point's distance lies: its distance of the last candidate less a bound on its rounding. The k nearest
candidates are the answer, ties included, if the k-th distance lies below the floor; queries for which it does not (many
ties at the k-th place, too few predecessors among the candidates) go to torch.

Cost per query over P points in D dimensions: k-d tree O(k log P) for small D; FAISS O(P D).

Symbols: Q queries, P points, F candidates, D dimensions, k neighbors.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_nngp._checks import warn
from pyro_nngp.native import search as compiled
from pyro_nngp.neighbors.search.on_device import PointsInTorch, Progress, Queries

SPARE = 9  # candidates beyond k: one point left out, and eight ties, as grids have
MOST_ON_GPU = 2048  # neighbors that FAISS finds there
_SIDE_BY_SIDE = 16  # queries that the compiled tree answers together, in any order
BLOCK = 2**19  # candidates handled at a time, a few MB per array

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Backend(Protocol):
    """Fixed points to search among."""

    def answer(self, queries: Queries, done: Progress) -> None:
        """Write the nearest points of all queries into their memory."""


class CompiledTree:
    """The compiled k-d tree, on as many threads as torch uses: the choice on CPUs if it is available."""

    def __init__(self, points: Tensor) -> None:
        self._tree = compiled.Tree(_array(points))

    def answer(self, queries: Queries, done: Progress) -> None:
        """Write the nearest points of all queries into their memory."""
        places, limit, exclude, *answers = (_array(each) for each in queries)
        num, threads = len(places), torch.get_num_threads()
        order = compiled.spatial_order(places) if num > _SIDE_BY_SIDE else np.arange(num)
        size = max(1, min(BLOCK // (queries.k + SPARE), max(256, -(-num // threads))))

        def work(rows: Ints) -> int:
            self._tree.nearest(rows, places, limit, exclude, *answers)
            return len(rows)

        for count in _map(work, [order[i : i + size] for i in range(0, num, size)], threads):
            done(count)
        queries.write(*map(torch.from_numpy, answers))


class FlatFaiss:
    """Brute force by FAISS in float32: the choice in high dimension, and on a GPU if FAISS is built for one."""

    def __init__(self, points: Tensor, on_gpu: bool) -> None:
        self._faiss = find_faiss()
        self._tensor, self._points = points, _array(points)
        self._center = self._points.mean(0)
        self._single = _single(self._points, self._center)
        self._norm = float((self._single.astype(np.float64) ** 2).sum(-1).max())
        self._resources = self._faiss.StandardGpuResources() if on_gpu else None

    @cached_property
    def _exact(self) -> PointsInTorch:
        return PointsInTorch(self._tensor)

    def answer(self, queries: Queries, done: Progress) -> None:
        """Write the nearest points of all queries into their memory."""
        fetch = queries.k + SPARE + queries.k // 16  # as many later points as the search of predecessors has
        size = max(1, BLOCK // fetch)
        for start in range(0, len(queries.places), size):
            part = queries.at(slice(start, start + size))
            hard = self._ask(part, fetch)
            done(len(part.places) - len(hard))
            if len(hard):
                rest = part.at(hard)
                self._exact.answer(rest, done)
                part.numbers[hard], part.value[hard] = rest.numbers, rest.value

    def _ask(self, queries: Queries, fetch: int) -> Tensor:
        """Answer queries by FAISS; returns the rows of those that remain open."""
        places, limit, exclude = (_array(each) for each in queries[:3])
        stop = min(len(self._points), max(int(limit.max()), 1))
        fetch = min(fetch, stop)
        if self._resources is not None and fetch > MOST_ON_GPU:
            return torch.arange(len(places), device=queries.places.device)
        single = _single(places, self._center)
        if self._resources is None:
            distance, index = self._faiss.knn(single, self._single[:stop], fetch)
        else:
            distance, index = self._faiss.knn_gpu(self._resources, single, self._single[:stop], fetch)
        value = squared_distances(places, self._points, index)
        norms = (single.astype(np.float64) ** 2).sum(-1)
        # |q|^2 - 2 p.q + |p|^2 has this error at most, with the rounding of its inputs.
        bound = 2 * (places.shape[1] + 8) * float(np.finfo(np.float32).eps) * (np.sqrt(norms) + self._norm**0.5) ** 2
        as_bounded = (np.abs(distance - value) <= bound[:, None]).all(-1)  # detects a build that rounds more coarsely
        floor = np.where(as_bounded, distance[:, -1] - bound, -np.inf)
        index, value, proven = _nearest_candidates(index, value, floor, queries.k, limit, exclude)
        queries.write(torch.from_numpy(index), torch.from_numpy(value))
        return torch.from_numpy(np.flatnonzero(~proven)).to(queries.places.device)


def squared_distances(queries: Floats, points: Floats, index: Ints) -> Floats:
    """Squared Euclidean distances of each query to its candidates, (Q, F), the same for all backends."""
    total = np.zeros(index.shape)
    for query, point in zip(queries.T, points.T, strict=True):
        difference = point[index]
        difference -= query[:, None]
        difference *= difference
        total += difference
    return total


def find_faiss() -> Any:
    """The faiss module, or None where it is absent or does not import (a GPU build without NVIDIA's libraries).

    It is imported late, so that it stays optional and torch's OpenMP is loaded first.
    """
    try:
        import faiss
    except ImportError:
        return None
    return faiss


def has_gpu_faiss() -> bool:
    """Whether FAISS is a GPU build that sees a GPU; warns if a package for CPUs has replaced one."""
    faiss = find_faiss()
    if faiss is not None and not hasattr(faiss, "StandardGpuResources"):
        if _is_installed("faiss-gpu") and _is_installed("faiss-cpu"):
            warn(
                "SearchIndex: faiss-cpu has replaced the module of faiss-gpu, so the search runs without FAISS on the "
                "GPU. Run pip uninstall -y faiss-cpu faiss-gpu, then pip install 'pyro-nngp[gpu]'."
            )
        return False
    return faiss is not None and faiss.get_num_gpus() > 0


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _array(tensor: Tensor) -> Any:
    """A tensor as an array; without a copy where it is on the CPU."""
    return tensor.cpu().numpy()


def _single(places: Floats, center: Floats) -> NDArray[np.float32]:
    """Points in float32, as FAISS takes them; centered first, so that single precision suffices far from the origin."""
    return np.ascontiguousarray(places - center, dtype=np.float32)


def _nearest_candidates(
    index: Ints, value: Floats, floor: Floats, k: int, limit: Ints, exclude: Ints
) -> tuple[Ints, Floats, NDArray[np.bool_]]:
    """The k nearest admissible candidates by (distance, index), -1 padded, and whether the floor proves them."""
    if index.shape[1] <= k:  # there are no more points; the code below reads one column more than k
        missing = ((0, 0), (0, k + 1 - index.shape[1]))
        index, value = np.pad(index, missing, constant_values=-1), np.pad(value, missing)
    value[(index < 0) | (index >= limit[:, None]) | (index == exclude[:, None])] = np.inf
    order = np.argsort(value, axis=-1, kind="stable")[:, : k + 1]
    first = np.take_along_axis(value, order, -1)
    tied = np.flatnonzero((first[:, 1:] == first[:, :-1]).any(-1))
    order[tied] = np.lexsort((index[tied], value[tied]))[:, : k + 1]
    index, value = np.take_along_axis(index, order[:, :k], -1), first[:, :k]
    index[np.isinf(value)] = -1
    required = np.minimum(k, limit - ((exclude >= 0) & (exclude < limit)))
    last = np.take_along_axis(value, np.maximum(required - 1, 0)[:, None], -1)[:, 0]
    return index, value, (required == 0) | (last < floor)


def _map(work: Callable[[Ints], int], chunks: list[Ints], threads: int) -> Iterator[int]:
    """The built-in `map`, in threads if several are allowed: compiled code releases the interpreter's lock."""
    if min(threads, len(chunks)) == 1:
        yield from map(work, chunks)
    else:
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(work, chunks)
