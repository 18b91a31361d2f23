"""Neighbor graphs: which points each point is conditioned on, kept with the points as a module of buffers.

Rows are numbered as in the x that the user gave, whatever the ordering; ties in distance go to the point that comes
first in the ordering, so that results do not depend on the order of the rows. -1 stands for no neighbor.

Cost: one search at construction and at each refresh; O(N (K + D)) memory. A batch of B points costs O(B K), whatever N.

Symbols: N points in D dimensions, K neighbors, B points of a batch, U points of a batch and its neighbors, P new points.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import check_finite, check_inputs, check_num_neighbors, check_same_kind, fail
from pyro_nngp.ordering import make_ordering
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
        neighbors: instead of a search, the user's own rows (N, K): predecessors in the ordering, -1 padded.
        backend: of the search, see :class:`~pyro_nngp.search.SearchIndex`.
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
        progress: bool = True,
    ) -> None:
        super().__init__()
        check_inputs("NeighborGraph", "x", x)
        check_num_neighbors("NeighborGraph", num_neighbors, len(x) - 1)
        self._metric = metric if callable(metric) and not isinstance(metric, Tensor) else None
        self._backend, self._progress = backend, progress
        self._index: SearchIndex | None = None
        self._levels: list[Tensor] | None = None
        self.register_buffer("x", x.detach())
        self.register_buffer("order", make_ordering(x, ordering, seed))
        self.register_buffer("lengthscale", torch.ones(x.shape[1], dtype=x.dtype, device=x.device))
        if isinstance(metric, Tensor):
            self._set_lengthscale(metric)
        if neighbors is None:
            neighbors = self._search(num_neighbors)
        else:
            _check_neighbors(neighbors, self.order, num_neighbors)
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
        """
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
        """
        k = self.num_neighbors if k is None else k
        position = None
        if exclude is not None:
            ranks = torch.empty_like(self.order)
            ranks[self.order] = torch.arange(self.num_points, device=self.order.device)
            position = torch.where(exclude < 0, -1, ranks[exclude.clamp(min=0)])
        return self.order[self._searcher().nearest(x_new / self.lengthscale, k, position)[0]]

    def others(self, k: int | None = None, idx: Int[Tensor, " B"] | None = None) -> Int[Tensor, "B k"]:
        """Rows of the k nearest *other* points of the rows `idx` (None: of all rows); duplicates count as others."""
        rows = torch.arange(self.num_points, device=self.x.device) if idx is None else idx
        return self.query(self.x[rows], k, rows)

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
            ValueError, TypeError: if `idx` is not a vector of distinct row numbers.
        """
        if idx is None:
            every = torch.arange(self.num_points, device=self.x.device)
            return Batch(every, every, self.neighbors, 1.0, extra)
        _check_idx(idx, self.num_points)
        neighbors = self.neighbors[idx]
        parts = [idx, neighbors.flatten()] + ([] if extra is None else [extra.flatten()])
        rows, positions = torch.cat(parts).unique(return_inverse=True)
        if rows[0] < 0:
            rows, positions = rows[1:], positions - 1
        targets, near, rest = positions.split([len(idx), neighbors.numel(), len(positions) - len(idx) - neighbors.numel()])
        rest = None if extra is None else rest.view_as(extra)
        return Batch(rows, targets, near.view_as(neighbors), self.num_points / len(idx), rest)

    def extend(
        self, x_new: Float[Tensor, "P D"], k: int | None = None, seed: int = 0
    ) -> tuple[Int[Tensor, " P"], Int[Tensor, "P k"]]:
        """Append new points, in random order, to the ordering.

        Args:
            x_new: new points.
            k: neighbors per new point; None is K.
            seed: of the order of the new points.

        Returns:
            That order, and for each new point (in the rows of `x_new`) the rows of its nearest points among the old
            ones (0..N-1) and the earlier new ones (N plus their row).
        """
        k = self.num_neighbors if k is None else k
        n, scaled = self.num_points, x_new / self.lengthscale
        order = make_ordering(x_new, "random", seed)
        searcher = SearchIndex(scaled[order], backend=self._backend, metric=self._metric, progress=self._progress)
        among_new, far_new = searcher.predecessors(min(k, len(x_new)))
        among_old, far_old = self._searcher().nearest(scaled[order], min(k, n))
        rows = torch.cat([self.order[among_old], torch.where(among_new < 0, -1, n + order[among_new.clamp(min=0)])], -1)
        nearest = torch.cat([far_old, far_new], -1).sort(dim=-1, stable=True).indices[:, :k]
        neighbors = torch.empty_like(rows[:, : nearest.shape[1]])
        neighbors[order] = rows.gather(-1, nearest)
        return order, neighbors

    def _set_lengthscale(self, lengthscale: Tensor) -> None:
        lengthscale = lengthscale.detach().to(self.lengthscale)
        if lengthscale.shape not in ((), self.lengthscale.shape):
            expectation = f"a scalar or of shape {tuple(self.lengthscale.shape)}"
            fail("NeighborGraph", "lengthscale", expectation, tuple(lengthscale.shape), "Give one per input dimension.")
        check_finite("NeighborGraph", "lengthscale", lengthscale)
        if (lengthscale <= 0).any():
            fail("NeighborGraph", "lengthscale", "> 0", float(lengthscale.min()), "Inputs are divided by it.")
        self.lengthscale.copy_(lengthscale.expand_as(self.lengthscale))

    def _searcher(self) -> SearchIndex:
        if self._index is None:
            points = (self.x / self.lengthscale)[self.order]
            self._index = SearchIndex(points, backend=self._backend, metric=self._metric, progress=self._progress)
        return self._index

    def _search(self, k: int) -> Tensor:
        found, _ = self._searcher().predecessors(k)
        neighbors = torch.empty_like(found)
        neighbors[self.order] = torch.where(found < 0, -1, self.order[found.clamp(min=0)])
        return neighbors

    def _forget(self) -> None:
        self._index = self._levels = None

    def _apply(self, fn: Any, recurse: bool = True) -> "NeighborGraph":
        self._forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_index": None, "_levels": None}


def dependency_levels(neighbors: Int[Tensor, "N K"]) -> list[Int[Tensor, " _"]]:
    """Rows grouped so that all neighbors of a row are in earlier groups; the first group has no neighbors.

    Args:
        neighbors: rows that each row depends on, -1 padded.

    Raises:
        ValueError: if the dependencies form a cycle.

    Cost: O(N K), in as many vectorised passes as there are groups.
    """
    table = neighbors.cpu().numpy()
    n = len(table)
    child, slot = np.nonzero(table >= 0)
    parent = table[child, slot]
    children = child[np.argsort(parent, kind="stable")]
    start = np.searchsorted(np.sort(parent), np.arange(n + 1))
    waiting = np.bincount(child, minlength=n)
    level, levels = np.flatnonzero(waiting == 0), []
    while len(level):
        levels.append(torch.from_numpy(level).to(neighbors.device))
        count = start[level + 1] - start[level]
        offset = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        freed, times = np.unique(children[np.repeat(start[level], count) + offset], return_counts=True)
        waiting[freed] -= times
        level = freed[waiting[freed] == 0]
    placed = sum(map(len, levels))
    if placed < n:
        cure = "Each row may depend on rows before it in some ordering only."
        fail("dependency_levels", "neighbors", "to form no cycle", f"a cycle among {n - placed} rows", cure)
    return levels


def _forget_after_loading(graph: NeighborGraph, incompatible_keys: Any) -> None:
    graph._forget()


def _check_idx(idx: Any, num_points: int) -> None:
    where = "NeighborGraph.batch"
    if not isinstance(idx, Tensor) or idx.dtype != torch.int64:
        fail(where, "idx", "to be an int64 tensor", getattr(idx, "dtype", type(idx)), "Give row numbers.", TypeError)
    if idx.dim() != 1 or len(idx) == 0:
        fail(where, "idx", "of shape (B,) with B >= 1", tuple(idx.shape), "Give at least one row.")
    if idx.min() < 0 or idx.max() >= num_points:
        fail(where, "idx", f"in 0..{num_points - 1}", (int(idx.min()), int(idx.max())), "Give rows of x.")
    if len(idx.unique()) < len(idx):
        fail(where, "idx", "without repeats", f"{len(idx) - len(idx.unique())} repeats", "Draw without replacement.")


def _check_neighbors(neighbors: Tensor, order: Tensor, k: int) -> None:
    where, n = "NeighborGraph", len(order)
    if neighbors.shape != (n, k) or neighbors.dtype != torch.int64:
        actual = f"{neighbors.dtype} of shape {tuple(neighbors.shape)}"
        fail(where, "neighbors", f"to be int64 of shape ({n}, {k})", actual, "Give rows of x, padded with -1.")
    check_same_kind(where, ordering=order, neighbors=neighbors)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(n, device=order.device)
    real = neighbors >= 0
    if neighbors.min() < -1 or neighbors.max() >= n or (real[:, 1:] & ~real[:, :-1]).any():
        fail(where, "neighbors", f"in 0..{n - 1} with -1 at the end of a row only", "other entries", "Pad with -1.")
    late = real & (rank[neighbors.clamp(min=0)] >= rank[:, None])
    if late.any():
        row = int(late.any(-1).nonzero()[0])
        fail(where, "neighbors", "to precede their point in the ordering", f"others in row {row}", "Order, then search.")
    ordered = neighbors.sort(dim=-1).values
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        fail(where, "neighbors", "without repeats in a row", "a row with repeats", "Give each neighbor once.")
