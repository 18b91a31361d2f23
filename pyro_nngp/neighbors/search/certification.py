"""Certified nearest neighbors: query a backend, keep answers that its floor proves, and ask for more otherwise.

The k nearest candidates of a query are its k nearest points, ties included, once the k-th distance lies strictly below
the floor under which the backend left nothing out. Queries for which it does not (many ties at the k-th place, too few
predecessors among the candidates) are repeated with twice the candidates, and finally by brute force.

Symbols: Q queries, P points, D dimensions, k neighbors, F candidates.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from pyro_nngp.neighbors.search.backends import BruteForce, CandidateBackend, Candidates, CompiledTree, Floats, Ints

BLOCK = 2**19  # candidates handled at a time, a few MB per array


@dataclass
class Queries:
    """Queries and their answers so far.

    Attributes:
        places: coordinates of the queries, (Q, D).
        limit: only points with smaller numbers count, (Q,).
        exclude: the number of one point to leave out, (Q,), -1 for none.
        index, value: numbers and exact distances of the neighbors, (Q, k), to be written; -1 and infinity where there
            is none.
        proven: whether the answers are known to be right, (Q,).
    """

    places: Floats
    limit: Ints
    exclude: Ints
    index: Ints
    value: Floats
    proven: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.proven = np.zeros(len(self.places), bool)

    @property
    def k(self) -> int:
        """Number of neighbors wanted."""
        return self.index.shape[1]

    def settle(self, tree: CompiledTree, rows: Ints) -> int:
        """Answer some queries by a backend that needs no proof; return the number of proven answers."""
        tree.answer(rows, self.places, self.limit, self.exclude, self.index, self.value)
        self.proven[rows] = True
        return len(rows)

    def ask(self, backend: CandidateBackend, fetch: int, final: bool, rows: Ints) -> int:
        """Query a backend; accept its answer without a certificate if `final`; return the number of proven answers."""
        limit, exclude = self.limit[rows], self.exclude[rows]
        candidates = backend.candidates(self.places[rows], fetch, limit, exclude)
        self.index[rows], self.value[rows], proven = _nearest_candidates(candidates, self.k, limit, exclude)
        self.proven[rows] = proven | final
        return int(self.proven[rows].sum())


class Source:
    """A backend with brute force as fallback, and the numbers of the points that it searches."""

    def __init__(self, backend: CandidateBackend | CompiledTree, brute: BruteForce, kept: Ints) -> None:
        self.backend, self._brute, self._kept = backend, brute, kept

    def prefix(self, stop: int, brute_only: bool = False) -> None:
        """Search among points 0..stop-1 from now on."""
        inside = int(np.searchsorted(self._kept, stop))
        self._brute.prefix(inside)
        self._first: CandidateBackend | CompiledTree = self._brute
        if not brute_only:
            self._first = self.backend
            self.backend.prefix(inside)

    def answer(self, queries: Queries, fetch: int, bar: tqdm) -> float:
        """Answer all queries; return the fraction of them for which `fetch` candidates were too few."""
        all_kept = self._kept[-1] == len(self._kept) - 1
        if not all_kept:
            place = np.minimum(np.searchsorted(self._kept, queries.exclude), len(self._kept) - 1)
            queries.exclude = np.where(self._kept[place] == queries.exclude, place, -1)
            queries.limit = np.searchsorted(self._kept, queries.limit)
        backend, hard = self._first, 0.0
        todo = backend.visiting_order(queries.places)
        while todo.size:
            if isinstance(backend, CompiledTree):
                work = partial(queries.settle, backend)
            else:
                if fetch > backend.max_fetch(queries.k):
                    backend = self._brute
                work = partial(queries.ask, backend, fetch, backend is self._brute and fetch >= len(self._kept))
            threads = backend.threads()
            size = max(1, min(BLOCK // fetch, max(256, -(-len(todo) // threads))))
            chunks = [todo[i : i + size] for i in range(0, len(todo), size)]
            for count in _map(work, chunks, threads):
                bar.update(count)
            todo = todo[~queries.proven[todo]]
            hard = hard or len(todo) / len(queries.places)
            fetch *= 2
        if not all_kept:
            queries.index[...] = np.where(queries.index < 0, -1, self._kept[queries.index])
        return hard


def _nearest_candidates(
    candidates: Candidates, k: int, limit: Ints, exclude: Ints
) -> tuple[Ints, Floats, NDArray[np.bool_]]:
    """The k nearest admissible candidates by (distance, index), -1 padded, and whether the floor proves them."""
    index, value, floor = candidates
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
    """The built-in `map`, in threads if several are allowed: NumPy and SciPy release the GIL in heavy operations."""
    if min(threads, len(chunks)) == 1:
        yield from map(work, chunks)
    else:
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(work, chunks)
