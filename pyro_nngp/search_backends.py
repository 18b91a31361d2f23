"""Where candidates for nearest points come from: k-d tree, brute force, flat FAISS, inverted-file FAISS.

Every backend answers one question. Given queries and a number `fetch`, it returns for each query at least the nearest `fetch` points
it can find, with their exact distances and a *floor*: no point that it left out has a distance below the floor. `pyro_nngp.search` takes
an answer only where the floor proves it, which is why backends that round differently return identical neighbors.

"Exact distance" means `squared_distances`: float64, from differences, summed over the dimensions in order; every comparison is made on that
number (or on the value of the user's metric). The floor is what the backend reports for its last candidate less a bound on its rounding.

Cost per query over P points in D dimensions: k-d tree O(fetch log P) for small D; brute force and flat FAISS O(P D); inverted file
O(sqrt(P) D nprobe).

Symbols: Q queries, P points, F = fetch, D dimensions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from pyro_nngp._checks import fail

Metric = Callable[[Tensor, Tensor], Tensor]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Candidates(NamedTuple):
    """Candidates of Q queries: `index (Q, F)` into the points, `value (Q, F)` exact distances, `floor (Q,)` bounding all others below."""

    index: Ints
    value: Floats
    floor: Floats


class Backend(ABC):
    """A source of candidates over a growing prefix of fixed points.

    Attributes:
        growth: by which fraction the prefix may grow before it is worth building anew.
        filters: whether `candidates` itself leaves out excluded points and points at or beyond `limit`.
    """

    growth: float
    filters: bool = False

    @abstractmethod
    def prefix(self, stop: int) -> None:
        """Search among points 0..stop-1 from now on."""

    @abstractmethod
    def max_fetch(self, k: int) -> int:
        """Beyond this many candidates brute force is the better choice."""

    @abstractmethod
    def candidates(self, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        """Candidates with floors; F may be smaller than `fetch` when there are fewer points."""

    def threads(self) -> int:
        """How many threads may call `candidates` at a time; 1 for what is parallel inside."""
        return 1

    def visiting_order(self, queries: Floats) -> Ints:
        """Order in which the queries are answered fastest."""
        return np.arange(len(queries))


def squared_distances(queries: Floats, points: Floats, index: Ints) -> Floats:
    """Squared Euclidean distances between each query and its candidates, (Q, F): the one number all backends are judged by."""
    total = np.zeros(index.shape)
    for query, point in zip(queries.T, points.T, strict=True):
        difference = point[index]
        difference -= query[:, None]
        difference *= difference
        total += difference
    return total


class KDTree(Backend):
    """SciPy's k-d tree, on as many threads as torch uses: the choice in low dimension."""

    growth = 0.25

    def __init__(self, points: Floats) -> None:
        self._points = points
        self._rounding = 4 * (points.shape[1] + 64) * np.finfo(np.float64).eps  # relative; the path through the tree adds up too

    def prefix(self, stop: int) -> None:
        self._tree = cKDTree(self._points[:stop], balanced_tree=False)

    def max_fetch(self, k: int) -> int:
        return max(4 * k, self._tree.n // 64)

    def threads(self) -> int:
        return torch.get_num_threads()

    def visiting_order(self, queries: Floats) -> Ints:
        return cKDTree(queries, balanced_tree=False, compact_nodes=False).indices  # leaf by leaf: neighbors in cache

    def candidates(self, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        fetch = min(fetch, self._tree.n)
        distance, index = (each.reshape(-1, fetch) for each in self._tree.query(queries, fetch))
        floor = np.full(len(queries), np.inf) if fetch == self._tree.n else distance[:, -1] ** 2 * (1 - self._rounding)
        return Candidates(index, squared_distances(queries, self._points, index), floor)


class BruteForce(Backend):
    """All distances, block by block, on the device of the points; takes any metric and never fails."""

    growth = 1 / 16
    filters = True

    def __init__(self, points: Floats, device: torch.device, dtype: torch.dtype, metric: Metric | None) -> None:
        self._metric = metric
        self._raw = points
        self._center = points.mean(0) if metric is None else np.zeros(points.shape[1])
        self._points = torch.as_tensor(points - self._center, dtype=torch.float64 if metric is None else dtype, device=device)
        self._norms = (self._points * self._points).sum(-1)
        self._block = 2**21 if device.type == "cpu" else 2**27  # distances held at a time

    def prefix(self, stop: int) -> None:
        self._stop = stop

    def max_fetch(self, k: int) -> int:
        return len(self._raw)

    def candidates(self, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        rows = max(1, self._block // self._stop)
        parts = [
            self._block_candidates(queries[i : i + rows], fetch, limit[i : i + rows], exclude[i : i + rows])
            for i in range(0, len(queries), rows)
        ]
        return Candidates(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def _block_candidates(self, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        stop = min(self._stop, max(int(limit.max()), 1))
        points = self._points[:stop]
        query = torch.as_tensor(queries - self._center, dtype=points.dtype, device=points.device)
        value = self._values(query, points)
        first = min(int(limit.min()), stop)
        beyond = torch.arange(first, stop, device=points.device) >= torch.as_tensor(limit, device=points.device)[:, None]
        value[:, first:].masked_fill_(beyond, torch.inf)
        row = torch.as_tensor(np.flatnonzero((exclude >= 0) & (exclude < stop)), device=points.device)
        value[row, torch.as_tensor(exclude, device=points.device)[row]] = torch.inf
        top, index = (each.cpu().numpy() for each in value.topk(min(fetch, stop), largest=False))
        last = top[:, -1].astype(np.float64)
        if fetch >= stop:
            last[:] = np.inf
        if self._metric is not None:
            return Candidates(index, top.astype(np.float64), last)
        norms = (query * query).sum(-1).cpu().numpy()
        floor = last + norms - _rounding(norms, float(self._norms[:stop].max()), points.shape[1], torch.finfo(torch.float64).eps)
        return Candidates(index, squared_distances(queries, self._raw, index), floor)

    def _values(self, query: Tensor, points: Tensor) -> Tensor:
        """The metric, or for the Euclidean one |p|^2 - 2 p.q, which ranks alike; exact values follow for the candidates alone."""
        if self._metric is None:
            return torch.addmm(self._norms[: len(points)], query, points.T, alpha=-2)
        with torch.no_grad():
            value = self._metric(query, points)
        if not isinstance(value, Tensor) or value.shape != (len(query), len(points)):
            actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            fail("search", "metric", f"to return a tensor of shape {(len(query), len(points))}", actual, "Map (n, D), (m, D) to (n, m).")
        if bool(value.isnan().any()):
            fail("search", "metric", "to return numbers", "NaN", "Check it on a few points of x.")
        return value.clone()  # masked in place by the caller


class FlatFaiss(Backend):
    """Brute force by FAISS in float32: the choice in high dimension on a CPU, or on a GPU when FAISS is built for one."""

    growth = 1 / 16

    def __init__(self, points: Floats, on_gpu: bool) -> None:
        self._faiss = find_faiss()
        self._points = points
        self._center = points.mean(0)
        self._single = self._to_single(points)
        self._norm = float((self._single.astype(np.float64) ** 2).sum(-1).max())
        self._resources = self._faiss.StandardGpuResources() if on_gpu else None

    def prefix(self, stop: int) -> None:
        self._stop = stop

    def max_fetch(self, k: int) -> int:
        return 2048 if self._resources is not None else 4 * k + 64

    def candidates(self, queries: Floats, fetch: int, limit: Ints, exclude: Ints) -> Candidates:
        stop = min(self._stop, max(int(limit.max()), 1))
        fetch = min(fetch, stop)
        single = self._to_single(queries)
        if self._resources is None:
            distance, index = self._faiss.knn(single, self._single[:stop], fetch)
        else:
            distance, index = self._faiss.knn_gpu(self._resources, single, self._single[:stop], fetch)
        value = squared_distances(queries, self._points, index)
        norms = (single.astype(np.float64) ** 2).sum(-1)
        bound = _rounding(norms, self._norm, queries.shape[1], float(np.finfo(np.float32).eps))
        honest = (np.abs(distance - value) <= bound[:, None]).all(-1)  # a build that rounds more coarsely is found out
        floor = np.where(honest, distance[:, -1] - bound, -np.inf)
        return Candidates(index, value, np.full(len(queries), np.inf) if fetch == stop else floor)

    def _to_single(self, array: Floats) -> NDArray[np.float32]:
        return np.ascontiguousarray(array - self._center, dtype=np.float32)


class InvertedFile(Backend):
    """FAISS's inverted file (`IndexIVFFlat`): approximate, for sizes where exact search is out of reach; measure it with `recall`."""

    growth = 0.25

    def __init__(self, points: Floats, nprobe: int, on_gpu: bool) -> None:
        faiss = find_faiss()
        self._points = points
        self._single = points.astype(np.float32)
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
        _, index = self._index.search(queries.astype(np.float32), min(fetch, self._index.ntotal))
        value = squared_distances(queries, self._points, index)
        value[index < 0] = np.inf  # fewer points than asked for in the probed lists
        return Candidates(index, value, np.full(len(queries), np.inf))  # taken as it is


def find_faiss() -> Any:
    """The faiss module, or None where it is absent or does not import (a GPU build without NVIDIA's libraries).

    Imported late, so that it stays optional and torch's OpenMP is loaded first.
    """
    try:
        import faiss
    except ImportError:
        return None
    return faiss


def has_gpu_faiss() -> bool:
    """Whether FAISS is a GPU build that sees a GPU."""
    faiss = find_faiss()
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


def _rounding(norms: Floats, norm: float, dim: int, eps: float) -> Floats:
    """Bound on the error of |q|^2 - 2 p.q + |p|^2 for |q|^2 = norms and |p|^2 <= norm, rounding of the inputs included."""
    return 2 * (dim + 8) * eps * (np.sqrt(norms) + np.sqrt(norm)) ** 2
