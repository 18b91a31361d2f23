"""Neighbor graphs: which points each point is conditioned on, kept with the points as a module of buffers.

Rows are numbered as in the x that the user gave, whatever the ordering; ties in distance go to the point that comes
first in the ordering, so that results do not depend on the order of the rows. -1 stands for no neighbor. Distances are
taken in float64 of the points and lengthscales as they are stored.

Cost: one search at construction and at each refresh; O(N (K + D)) memory. A batch of B points costs O(B K), whatever N.

Symbols: N points in D dimensions, K neighbors, B points of a batch, U points of a batch and its neighbors,
P new points.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import (
    check_finite,
    check_inputs,
    check_new_inputs,
    check_num_neighbors,
    check_rows,
    check_same_kind,
    check_tensor,
    fail,
)
from pyro_nngp.levels import dependency_levels
from pyro_nngp.ordering import make_ordering, random_ordering
from pyro_nngp.search import Metric, SearchIndex


@dataclass(frozen=True)
class Batch:
    """Some points of a graph, together with the neighbors that they need.

    Attributes:
        rows: the points and their neighbors, sorted, (U,).
        targets: positions of the points among `rows`, (B,).
        neighbors: positions of their neighbors among `rows`, (B, K), -1 padded.
        scale: N / B, which makes a sum over the batch an unbiased estimate of the sum over all points.
        extra: positions of the further rows that were asked for, in the shape they came in; None if none were.
    """

    rows: Int[Tensor, " U"]
    targets: Int[Tensor, " B"]
    neighbors: Int[Tensor, "B K"]
    scale: float
    extra: Int[Tensor, "..."] | None = None


class NeighborGraph(torch.nn.Module):
    """At most K nearest predecessors of each point in an ordering.

    Args:
        x: points (N, D), finite; exact duplicates are allowed.
        num_neighbors: K, in 1..N-1.
        ordering: "random" | "maximin" | "coordinate" | "given", or a permutation (N,): the row at each position.
        seed: of the random ordering.
        metric: None is the Euclidean distance; a tensor of lengthscales, (D,) or scalar, divides the inputs first; a
            callable (n, D), (m, D) -> (n, m) gives distances of its own (blocked brute force).
        neighbors: instead of a search, the user's own rows (N, K): predecessors in the ordering, -1 padded. Such
            a graph cannot be refreshed; the metric serves its queries.
        backend: of the search, see :class:`~pyro_nngp.search.SearchIndex`.
        nprobe: of the approximate search, see there.
        progress: whether a search above three seconds shows a progress bar.

    Attributes:
        x, order, neighbors, lengthscale: buffers, part of the ``state_dict``. Row i of `neighbors` holds the rows of x
            that x[i] is conditioned on, nearest first.

    Raises:
        ValueError, TypeError: for malformed points, K out of range, or neighbors that do not precede their point.
    """

    x: Tensor
    order: Tensor
    neighbors: Tensor
    lengthscale: Tensor

    def __init__(
        self,
        x: Float[Tensor, "N D"],
        num_neighbors: int,
        ordering: str | Int[Tensor, " N"] = "random",
        *,
        seed: int = 0,
        metric: Float[Tensor, " *D"] | Metric | None = None,
        neighbors: Int[Tensor, "N K"] | None = None,
        backend: str = "auto",
        nprobe: int = 16,
        progress: bool = True,
    ) -> None:
        super().__init__()
        check_inputs("NeighborGraph", "x", x)
        check_num_neighbors("NeighborGraph", num_neighbors, len(x) - 1)
        self._metric = None if isinstance(metric, Tensor) else metric
        self._backend, self._nprobe, self._progress = backend, nprobe, progress
        self._given = neighbors is not None
        self._index: tuple[SearchIndex, Tensor] | None = None
        self._levels: list[Tensor] | None = None
        self.register_buffer("x", x.detach().clone())
        self.register_buffer("lengthscale", torch.ones(x.shape[1], dtype=x.dtype, device=x.device))
        if isinstance(metric, Tensor):
            self._set_lengthscale(metric)
        self.register_buffer("order", make_ordering(self._scaled(self.x), ordering, seed).clone())
        if neighbors is None:
            neighbors = self._search(num_neighbors)
        else:
            _check_neighbors(neighbors, self.order, num_neighbors)
            neighbors = neighbors.clone()
        self.register_buffer("neighbors", neighbors)
        self.register_load_state_dict_post_hook(_forget_after_loading)

    @property
    def num_points(self) -> int:
        """N."""
        return len(self.x)

    @property
    def num_neighbors(self) -> int:
        """K."""
        return self.neighbors.shape[1]

    def refresh(self, lengthscale: Float[Tensor, " *D"] | None = None) -> None:
        """Search again, in place: after points have moved, or under other lengthscales. The ordering stays.

        Args:
            lengthscale: what the inputs are divided by, (D,) or scalar, positive; None keeps the present ones.

        Raises:
            ValueError, TypeError: for malformed lengthscales, lengthscales with a metric of one's own, or a graph whose
                neighbors the user gave.
        """
        if self._given:
            cure = "Give no neighbors at construction to have them searched."
            fail("NeighborGraph.refresh", "neighbors", "to come from a search", "the user's own", cure)
        if lengthscale is not None:
            self._set_lengthscale(lengthscale)
        self._forget()
        self.neighbors.copy_(self._search(self.num_neighbors))

    def query(
        self, x_new: Float[Tensor, "B D"], k: int | None = None, exclude: Int[Tensor, " B"] | None = None
    ) -> Int[Tensor, "B k"]:
        """Rows of the k nearest of all points, nearest first.

        Args:
            x_new: places to search from.
            k: how many, 1..N (N-1 with `exclude`); None is K.
            exclude: for each place the row of one point to leave out, -1 for none.

        Raises:
            ValueError, TypeError: for malformed arguments.

        Cost: the search index is built by the first call and kept until points or lengthscales change.
        """
        where = "NeighborGraph.query"
        check_new_inputs(where, x_new, self.x)
        k = self.num_neighbors if k is None else k
        check_num_neighbors(where, k, self.num_points - (exclude is not None), "k")
        if exclude is not None:
            check_rows(where, "exclude", exclude, self.num_points, len(x_new), lowest=-1)
        index, positions = self._searcher()
        if exclude is not None:
            exclude = torch.where(exclude < 0, -1, positions[exclude])
        return self._rows(index.nearest(self._scaled(x_new), k, exclude)[0])

    def others(self, k: int | None = None, idx: Int[Tensor, " B"] | None = None) -> Int[Tensor, "B k"]:
        """Rows of the k nearest *other* points of the rows `idx` (None: of all rows), nearest first.

        Exact duplicates count as others: only the row itself is left out.

        Raises:
            ValueError, TypeError: if k is not in 1..N-1, or `idx` is not a vector of row numbers.
        """
        if idx is None:
            idx = torch.arange(self.num_points, device=self.x.device)
        check_rows("NeighborGraph.others", "idx", idx, self.num_points)
        return self.query(self.x[idx], k, idx)

    def levels(self) -> list[Int[Tensor, " _"]]:
        """Rows by dependency level: level 0 has no neighbors, others come one above the highest of their neighbors."""
        if self._levels is None:
            self._levels = dependency_levels(self.neighbors)
        return self._levels

    def batch(self, idx: Int[Tensor, " B"] | None = None, extra: Int[Tensor, "..."] | None = None) -> Batch:
        """The points `idx` (None: all) and the neighbors that they need.

        Args:
            idx: rows, distinct.
            extra: further rows to have among ``Batch.rows``, of any shape; -1 is passed through.

        Raises:
            ValueError, TypeError: if `idx` is not a vector of distinct row numbers, or `extra` holds others.
        """
        where = "NeighborGraph.batch"
        if idx is not None:
            check_rows(where, "idx", idx, self.num_points)
            if repeats := len(idx) - len(idx.unique()):
                fail(where, "idx", "without repeats", f"{repeats} repeats", "Draw without replacement.")
        if extra is not None:
            check_rows(where, "extra", extra.flatten(), self.num_points, extra.numel(), lowest=-1)
        if idx is None:
            every = torch.arange(self.num_points, device=self.x.device)
            return Batch(every, every, self.neighbors, 1.0, extra)
        neighbors = self.neighbors[idx]
        further = idx[:0] if extra is None else extra.flatten()
        parts = [idx, neighbors.flatten(), further]
        rows, positions = torch.cat(parts).unique(return_inverse=True)
        if rows[0] < 0:
            rows, positions = rows[1:], positions - 1
        targets, near, rest = positions.split([len(part) for part in parts])
        rest = None if extra is None else rest.view_as(extra)
        return Batch(rows, targets, near.view_as(neighbors), self.num_points / len(idx), rest)

    def extend(
        self, x_new: Float[Tensor, "P D"], k: int | None = None, seed: int = 0
    ) -> tuple[Int[Tensor, " P"], Int[Tensor, "P k"]]:
        """Append new points, in random order, to the ordering.

        Args:
            x_new: new points.
            k: neighbors per new point, 1..N+P-1; None is K.
            seed: of the order of the new points.

        Returns:
            That order, and for each new point (in the rows of `x_new`) the rows of the nearest among all old points
            (0..N-1) and the earlier new ones (N plus their row), nearest first, old ones first at equal distance;
            -1 padded.

        Raises:
            ValueError, TypeError: for malformed arguments.

        Cost: that of one `query` and one search for predecessors among the P new points; O(P k) memory.
        """
        where = "NeighborGraph.extend"
        check_new_inputs(where, x_new, self.x)
        k = self.num_neighbors if k is None else k
        check_num_neighbors(where, k, self.num_points + len(x_new) - 1, "k")
        order = random_ordering(x_new, seed)
        scaled = self._scaled(x_new)[order]
        old, old_distance = self._searcher()[0].nearest(scaled, min(k, self.num_points))
        new, new_distance = self._search_index(scaled).predecessors(k)
        new = torch.where(new < 0, -1, self.num_points + order[new])  # -1 is infinitely far
        rows = torch.cat([self._rows(old), new], -1)
        nearest = torch.cat([old_distance, new_distance], -1).sort(dim=-1, stable=True).indices[:, :k]
        return order, rows.gather(-1, nearest)[_positions(order)]

    def _set_lengthscale(self, lengthscale: Tensor) -> None:
        check_tensor("NeighborGraph", "lengthscale", lengthscale)
        if self._metric is not None:
            cure = "Call refresh without lengthscales after the metric has changed."
            fail("NeighborGraph", "lengthscale", "to be None with a metric of one's own", "a tensor", cure)
        lengthscale = lengthscale.detach().to(self.lengthscale)
        if lengthscale.shape not in ((), self.lengthscale.shape):
            expectation = f"a scalar or of shape {tuple(self.lengthscale.shape)}"
            fail("NeighborGraph", "lengthscale", expectation, tuple(lengthscale.shape), "Give one per input dimension.")
        check_finite("NeighborGraph", "lengthscale", lengthscale)
        if (lengthscale <= 0).any():
            fail("NeighborGraph", "lengthscale", "> 0", float(lengthscale.min()), "Inputs are divided by it.")
        self.lengthscale.copy_(lengthscale.expand_as(self.lengthscale))

    def _scaled(self, x: Tensor) -> Tensor:
        """What is searched: x over the lengthscales in float64, or x itself for a metric of the user's."""
        return x.double() / self.lengthscale.double() if self._metric is None else x

    def _search_index(self, points: Tensor) -> SearchIndex:
        return SearchIndex(
            points, backend=self._backend, metric=self._metric, nprobe=self._nprobe, progress=self._progress
        )

    def _searcher(self) -> tuple[SearchIndex, Tensor]:
        """The search index over the points in their ordering, and the position of each row in it."""
        if self._index is None:
            self._index = self._search_index(self._scaled(self.x)[self.order]), _positions(self.order)
        return self._index

    def _search(self, k: int) -> Tensor:
        index, positions = self._searcher()
        return self._rows(index.predecessors(k)[0])[positions]

    def _rows(self, positions: Tensor) -> Tensor:
        return torch.where(positions < 0, -1, self.order[positions])

    def _forget(self) -> None:
        self._index = self._levels = None

    def _apply(self, fn: Any, recurse: bool = True) -> "NeighborGraph":
        self._forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_index": None, "_levels": None}


def _positions(order: Tensor) -> Tensor:
    """Position of each row in an ordering."""
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    return positions


def _forget_after_loading(graph: NeighborGraph, incompatible_keys: Any) -> None:
    graph._forget()


def _check_neighbors(neighbors: Tensor, order: Tensor, k: int) -> None:
    where, n = "NeighborGraph", len(order)
    if neighbors.shape != (n, k) or neighbors.dtype != torch.int64:
        actual = f"{neighbors.dtype} of shape {tuple(neighbors.shape)}"
        fail(where, "neighbors", f"to be int64 of shape ({n}, {k})", actual, "Give rows of x, padded with -1.")
    check_same_kind(where, ordering=order, neighbors=neighbors)
    rank = _positions(order)
    real = neighbors >= 0
    if neighbors.min() < -1 or neighbors.max() >= n or (real[:, 1:] & ~real[:, :-1]).any():
        fail(where, "neighbors", f"in 0..{n - 1} with -1 at the end of a row only", "other entries", "Pad with -1.")
    late = real & (rank[neighbors.clamp(min=0)] >= rank[:, None])
    if late.any():
        row = int(late.any(-1).nonzero()[0])
        fail(where, "neighbors", "to precede their point in the ordering", f"others in row {row}", "Order first.")
    ordered = neighbors.sort(dim=-1).values
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        fail(where, "neighbors", "without repeats in a row", "a row with repeats", "Give each neighbor once.")
