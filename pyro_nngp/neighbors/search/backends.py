"""Backends of the neighbor search: k-d trees (compiled and SciPy's), brute force, flat FAISS, inverted-file FAISS.

The compiled tree (`pyro_nngp.native.search`) gives exact answers. All others give candidates: for each query
they return about `fetch` of its nearest points with their exact distances, and a *floor*: no point left out has a
distance below it. An answer is accepted only if the floor proves it
(`pyro_nngp.neighbors.search.certification`), so backends that round differently find identical neighbors.

"Exact distance" means `squared_distances`: float64, from differences, summed over the dimensions in order (or the value
of the user's metric). The floor is the backend's distance of its last candidate minus a bound on its rounding.

Cost per query over P points in D dimensions: k-d tree O(fetch log P) for small D; brute force and flat FAISS O(P D);
inverted file O(sqrt(P) D nprobe).

Symbols: Q queries, P points, F candidates, D dimensions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from pyro_nngp._checks import fail, warn
from pyro_nngp.native import search as compiled

_SIDE_BY_SIDE = 16  # queries that the compiled tree answers together, in any order
CPU_BLOCK, GPU_BLOCK = 2**21, 2**27  # distances that brute force holds at a time

Metric = Callable[[Tensor, Tensor], Tensor]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Candidates(NamedTuple):
    """Candidates of Q queries.

    Attributes:
        ids: numbers of the points, (Q, F); -1 where an approximate search has none.
        value: their exact distances, (Q, F).
        floor: no other point has a smaller distance, (Q,).
    """

    ids: Ints
    value: Floats
    floor: Floats


class Backend(ABC):
    """A search structure over a growing prefix of fixed points.

    Attributes:
        growth: fraction by which the prefix may grow before the backend is built again.
        filters: whether the backend itself leaves out excluded points and points at or beyond `limit`.
    """

    growth: float
    filters: bool = False

    @abstractmethod
    def prefix(self, stop: int) -> None:
        """Search among points 0..stop-1 from now on."""

    def threads(self) -> int:
        """Number of threads that may search at a time; 1 for backends that are parallel themselves."""
        return 1

    def visiting_order(self, queries: Floats) -> Ints:
        """Order in which the queries are answered fastest."""
        return np.arange(len(queries))


class CandidateBackend(Backend):
    """A backend that proposes candidates; the nearest of them are selected and proven elsewhere."""

    @abstractmethod
    def max_fetch(self, k: int) -> int:
        """Largest number of candidates worth asking for; beyond it brute force is the better choice."""

    @abstractmethod
    def candidates(self, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        """Candidates with floors; F may be smaller than `fetch` when there are fewer points."""


def squared_distances(queries: Floats, points: Floats, index: Ints) -> Floats:
    """Squared Euclidean distances of each query to its candidates, (Q, F), the same for all backends."""
    total = np.zeros(index.shape)
    for query, point in zip(queries.T, points.T, strict=True):
        difference = point[index]
        difference -= query[:, None]
        difference *= difference
        total += difference
    return total


class KDTree(CandidateBackend):
    """SciPy's k-d tree, on as many threads as torch uses: the choice in low dimension without compiled code."""

    growth = 0.25

    def __init__(self, points: Floats) -> None:
        self._points = points
        self._rounding = 4 * (points.shape[1] + 64) * np.finfo(np.float64).eps  # relative, sums down the tree included

    def prefix(self, stop: int) -> None:
        # In many dimensions a query visits most leaves nearby anyway, and fewer, larger ones are read faster.
        self._tree = cKDTree(self._points[:stop], leafsize=16 if self._points.shape[1] < 4 else 64, balanced_tree=False)

    def max_fetch(self, k: int) -> int:
        return max(4 * k, self._tree.n // 64)

    def threads(self) -> int:
        return torch.get_num_threads()

    def visiting_order(self, queries: Floats) -> Ints:
        return cKDTree(queries, balanced_tree=False, compact_nodes=False).indices  # leaf by leaf: neighbors in cache

    def candidates(self, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        fetch = min(fetch, self._tree.n)
        distance, index = (each.reshape(-1, fetch) for each in self._tree.query(queries, fetch))
        floor = distance[:, -1] ** 2 * (1 - self._rounding)
        return Candidates(index, squared_distances(queries, self._points, index), floor)


class CompiledTree(Backend):
    """The compiled k-d tree, on as many threads as torch uses: exact answers; the choice on CPUs if it is available."""

    growth = 1.0
    filters = True

    def __init__(self, points: Floats) -> None:
        self._points = points

    def prefix(self, stop: int) -> None:
        self._tree = compiled.Tree(self._points[:stop])

    def threads(self) -> int:
        return torch.get_num_threads()

    def visiting_order(self, queries: Floats) -> Ints:
        return compiled.spatial_order(queries) if len(queries) > _SIDE_BY_SIDE else np.arange(len(queries))

    def answer(self, rows: Ints, queries: Floats, limit: Ints, exclude: Ints, index: Ints, value: Floats) -> None:
        """Write the nearest neighbors of some rows of `queries` into those rows of `index` and `value`, (Q, k)."""
        self._tree.nearest(rows, queries, limit, exclude, index, value)


class BruteForce(CandidateBackend):
    """All distances, block by block, on the device of the points; works with any metric."""

    growth = 1 / 16
    filters = True

    def __init__(self, points: Floats, device: torch.device, dtype: torch.dtype, metric: Metric | None) -> None:
        self._points, self._metric = points, metric
        self._device = device
        self._dtype = torch.float64 if metric is None else dtype  # a metric sees the points as the user gave them
        self._block = CPU_BLOCK if device.type == "cpu" else GPU_BLOCK

    @cached_property
    def _center(self) -> Floats:
        return self._points.mean(0) if self._metric is None else np.zeros(self._points.shape[1])

    @cached_property
    def _centered(self) -> Tensor:
        return self._to_device(self._points - self._center)

    @cached_property
    def _norms(self) -> Tensor:
        return (self._centered * self._centered).sum(-1)

    def prefix(self, stop: int) -> None:
        self._stop = stop

    def max_fetch(self, k: int) -> int:
        return len(self._points)

    def candidates(self, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        stop = min(self._stop, max(int(limit.max()), 1))
        rows = max(1, self._block // stop)
        parts = [
            self._from_first(stop, queries[i : i + rows], fetch, limit[i : i + rows], exclude[i : i + rows])
            for i in range(0, len(queries), rows)
        ]
        return Candidates(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def _from_first(self, stop: int, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        """Candidates among points 0..stop-1 for one block of queries."""
        query = self._to_device(queries - self._center)
        value = self._values(query, self._centered[:stop])
        first = min(int(limit.min()), stop)
        beyond = np.arange(first, stop) >= limit[:, None]
        value[:, first:].masked_fill_(torch.as_tensor(beyond, device=value.device), torch.inf)
        row = np.flatnonzero((exclude >= 0) & (exclude < stop))
        value[torch.from_numpy(row), torch.from_numpy(exclude[row])] = torch.inf
        top, index = (each.cpu().numpy() for each in value.topk(min(fetch, stop), largest=False))
        last = top[:, -1].astype(np.float64)
        if self._metric is not None:
            return Candidates(index, top.astype(np.float64), last)
        norms = (query * query).sum(-1).cpu().numpy()
        bound = _rounding(norms, float(self._norms[:stop].max()), len(queries.T), float(np.finfo(np.float64).eps))
        return Candidates(index, squared_distances(queries, self._points, index), last + norms - bound)

    def _to_device(self, array: Floats) -> Tensor:
        return torch.as_tensor(array, dtype=self._dtype, device=self._device)

    def _values(self, query: Tensor, points: Tensor) -> Tensor:
        """Values that grow with distance: the metric, or |p|^2 - 2 p.q for the Euclidean one."""
        if self._metric is None:
            return torch.addmm(self._norms[: len(points)], query, points.T, alpha=-2)
        with torch.no_grad():
            value = self._metric(query, points)
        if not isinstance(value, Tensor) or value.shape != (len(query), len(points)):
            expectation = f"to return a tensor of shape {(len(query), len(points))}"
            actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            fail("SearchIndex", "metric", expectation, actual, "Map (n, D), (m, D) to (n, m).")
        if bool(value.isnan().any()):
            fail("SearchIndex", "metric", "to return numbers", "NaN", "Try it on a few of the points.")
        return value.clone()  # masked in place by the caller


class FlatFaiss(CandidateBackend):
    """Brute force by FAISS in float32: the choice in high dimension, and on a GPU if FAISS is built for one."""

    growth = 1 / 16

    def __init__(self, points: Floats, on_gpu: bool) -> None:
        self._faiss = find_faiss()
        self._points = points
        self._center = points.mean(0)
        self._single = _single(points, self._center)
        self._norm = float((self._single.astype(np.float64) ** 2).sum(-1).max())
        self._resources = self._faiss.StandardGpuResources() if on_gpu else None

    def prefix(self, stop: int) -> None:
        self._stop = stop

    def max_fetch(self, k: int) -> int:
        return 2048 if self._resources is not None else 4 * k + 64

    def candidates(self, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        stop = min(self._stop, max(int(limit.max()), 1))
        fetch = min(fetch, stop)
        single = _single(queries, self._center)
        if self._resources is None:
            distance, index = self._faiss.knn(single, self._single[:stop], fetch)
        else:
            distance, index = self._faiss.knn_gpu(self._resources, single, self._single[:stop], fetch)
        value = squared_distances(queries, self._points, index)
        norms = (single.astype(np.float64) ** 2).sum(-1)
        bound = _rounding(norms, self._norm, queries.shape[1], float(np.finfo(np.float32).eps))
        as_bounded = (np.abs(distance - value) <= bound[:, None]).all(-1)  # detects a build that rounds more coarsely
        return Candidates(index, value, np.where(as_bounded, distance[:, -1] - bound, -np.inf))


class InvertedFile(CandidateBackend):
    """FAISS's inverted file: approximate, for sizes at which exact search is too slow; see `recall`."""

    growth = 0.25

    def __init__(self, points: Floats, nprobe: int, on_gpu: bool) -> None:
        faiss = find_faiss()
        self._points = points
        self._center = points.mean(0)
        self._single = _single(points, self._center)
        lists = max(1, min(len(points) // 40, int(4 * len(points) ** 0.5)))
        self._quantizer = faiss.IndexFlatL2(points.shape[1])  # kept here: the index does not own it
        self._index = faiss.IndexIVFFlat(self._quantizer, points.shape[1], lists)
        self._index.cp.min_points_per_centroid = 1  # no message on stderr for small sets
        self._index.train(self._single)
        if on_gpu:
            self._index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, self._index)
        self._index.nprobe = min(nprobe, lists)

    def prefix(self, stop: int) -> None:
        self._index.add(self._single[self._index.ntotal : stop])

    def max_fetch(self, k: int) -> int:
        return 4 * k + 64

    def candidates(self, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        _, index = self._index.search(_single(queries, self._center), min(fetch, self._index.ntotal))
        # Where the probed lists hold fewer points, index is -1. The infinite floor has the others taken as they are.
        return Candidates(index, squared_distances(queries, self._points, index), np.full(len(queries), np.inf))


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


def _single(places: Floats, center: Floats) -> NDArray[np.float32]:
    """Points in float32, as FAISS takes them; centered first, so that single precision suffices far from the origin."""
    return np.ascontiguousarray(places - center, dtype=np.float32)


def _rounding(norms: Floats, norm: float, dim: int, eps: float) -> Floats:
    """Bound on the error of |q|^2 - 2 p.q + |p|^2 for |q|^2 = norms and |p|^2 <= norm, with the rounding of inputs."""
    return 2 * (dim + 8) * eps * (np.sqrt(norms) + np.sqrt(norm)) ** 2
