"""Neighbor tables: points and their metric, queries, batches, extension by new points.

Rows are numbered as in the x that the user gave, whatever the ordering; ties in distance go to the point that comes
first in the ordering, so that results do not depend on the order of the rows. -1 means no neighbor. Distances are
taken in float64 of the points and lengthscales as they are stored.

Cost: one search at construction and at each refresh; O(N (K + D)) memory. A batch of B points costs O(B K), whatever N.

Symbols: N points in D dimensions, K neighbors, B points of a batch, U points of a batch and its neighbors,
P new points.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from pyro_nngp._checks import (
    check_batch,
    check_choice,
    check_inputs,
    check_lengthscales,
    check_new_inputs,
    check_num_neighbors,
    check_rows,
    check_tensor,
    fail,
    undefined,
)
from pyro_nngp._kinds import check_metric
from pyro_nngp._tape import operation
from pyro_nngp.hyperparameters.description import show_kind
from pyro_nngp.native import rows as compiled
from pyro_nngp.neighbors.choice_of_k import NeighborTrial, rows_to_try
from pyro_nngp.neighbors.ordering import make_ordering, random_ordering
from pyro_nngp.neighbors.search.correlation import CorrelationIndex, FeatureMetric
from pyro_nngp.neighbors.search.index import BACKENDS, SearchIndex
from pyro_nngp.neighbors.search.on_device import Metric

_USUAL = 32  # neighbors to which a table with all others grows when points are appended


@dataclass(frozen=True)
class Batch:
    """A batch of the points of a graph, together with their neighbors.

    Attributes:
        rows: the points and their neighbors, sorted, (U,).
        targets: positions of the points among `rows`, (B,).
        neighbors: positions of their neighbors among `rows`, (B, K), -1 padded.
        scale: N / B, which makes a sum over the batch an unbiased estimate of the sum over all points.
        extra: positions of the `extra` rows requested, in their shape; None if there were none.
    """

    rows: Int[Tensor, " U"]
    targets: Int[Tensor, " B"]
    neighbors: Int[Tensor, "B K"]
    scale: float
    extra: Int[Tensor, "..."] | None = None


class NeighborTable(torch.nn.Module):
    """Points, an ordering, and K neighbors of each point, which a subclass defines by :meth:`find_neighbors`.

    A subclass registers the buffer ``neighbors`` (N, K) after the points.

    Arguments are as in :class:`~pyro_nngp.neighbors.graph.NeighborGraph`, except `neighbors`.

    Attributes:
        x, order, neighbors, lengthscale: buffers, part of the ``state_dict``.

    Raises:
        ValueError, TypeError: for malformed points, or K out of range.
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
        metric: Float[Tensor, " *D"] | Metric | FeatureMetric | None = None,
        backend: str = "auto",
        progress: bool = True,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        check_inputs(where, "x", x)
        check_num_neighbors(where, num_neighbors, len(x) - 1)
        check_choice(where, "backend", backend, BACKENDS, "Use 'auto' if in doubt.")
        check_metric(where, "metric", metric, x.shape[1])
        self._metric: Metric | FeatureMetric | None = None if isinstance(metric, Tensor) else metric
        self._backend, self._progress = backend, progress
        self._shuffled = isinstance(ordering, str) and ordering in ("random", "maximin")
        self._index: tuple[SearchIndex | CorrelationIndex, Tensor] | None = None
        self._trial: NeighborTrial | None = None
        self.register_buffer("x", x.detach().clone())
        self.register_buffer("lengthscale", torch.ones(x.shape[1], dtype=x.dtype, device=x.device))
        if isinstance(metric, Tensor):
            self._set_lengthscale(metric)
        places = cast(FeatureMetric, metric).features(self.x)[0] if self._has_features else self._scaled(self.x)
        self.register_buffer("order", make_ordering(places, ordering, seed).to(x.device, copy=True))
        self.register_load_state_dict_post_hook(_invalidate_after_loading)

    @property
    def num_points(self) -> int:
        """N; on several processes the number of local rows, which come first in x."""
        return len(self.x)

    @property
    def num_rows(self) -> int:
        """N, on all processes."""
        return self.num_points

    def complete(self, local: Shaped[Tensor, "*L n"]) -> Shaped[Tensor, "*L m"]:
        """Values at all rows of x, given the values at the local rows; on one process the two are the same."""
        return local

    def total(self, part: Tensor) -> Tensor:
        """Sum over all processes."""
        return part

    @property
    def num_neighbors(self) -> int:
        """K."""
        return self.neighbors.shape[1]

    @property
    def metric(self) -> Float[Tensor, " D"] | Metric | FeatureMetric:
        """Metric of the search: lengthscales that divide the inputs, the metric of a kernel, or the user's function."""
        return self.lengthscale if self._metric is None else self._metric

    def extra_repr(self) -> str:
        """Sizes, dtype and device, as ``print`` shows them."""
        return f"N={self.num_points}, D={self.x.shape[1]}, K={self.num_neighbors}, {show_kind(self.x)}"

    def refresh(self, metric: Float[Tensor, " *D"] | FeatureMetric | None = None) -> None:
        """Search again, in place, after points have moved or in a new metric. The ordering stays.

        Args:
            metric: lengthscales that divide the inputs, (D,) or scalar, positive; or a
                :class:`~pyro_nngp.kernels.KernelMetric`. None keeps the present metric.

        Raises:
            ValueError, TypeError: for malformed lengthscales, or another metric where the user gave a function.
        """
        if metric is not None:
            self._set_metric(metric)
        self._invalidate()
        self.neighbors.copy_(self.find_neighbors(self.num_neighbors))

    def resize(self, num_neighbors: int) -> None:
        """Search again for another number of neighbors, 1..N-1; the buffer ``neighbors`` becomes a new one.

        Raises:
            ValueError: if K is out of range.
        """
        check_num_neighbors(f"{type(self).__name__}.resize", num_neighbors, self.num_points - 1)
        self._invalidate()
        self.neighbors = self.find_neighbors(num_neighbors)

    def append(self, x_new: Float[Tensor, "P D"]) -> None:
        """Append points at the end of the ordering, in place; each is conditioned on points before it only.

        Among themselves they come in random order under random and maximin orderings, else as given. The sets of the
        old points stay. Where K was limited by the number of points, it grows with them, to at most 32.

        Args:
            x_new: new points, the next rows.

        Raises:
            ValueError, TypeError: for malformed points.

        Cost: O(N log N) for a new index, and a search for the neighbors of the new points.
        """
        check_new_inputs(f"{type(self).__name__}.append", x_new, self.x)
        old, k = self.num_points, self.num_neighbors
        self._invalidate()
        self.x = torch.cat([self.x, x_new.detach()])
        new = random_ordering(x_new, old) if self._shuffled else torch.arange(len(x_new), device=self.x.device)
        self.order = torch.cat([self.order, old + new])
        if k == old - 1:
            k = max(k, min(_USUAL, self.num_points - 1))
        self.neighbors = self._with_appended(old, k)

    def subset(self, rows: Int[Tensor, " S"]) -> "NeighborTable":
        """A table of the same kind of some of the points, two or more, in their order and in the same metric.

        Args:
            rows: distinct row numbers.

        Cost: the search among these points.
        """
        check_batch(f"{type(self).__name__}.subset", "rows", rows, self.num_points)
        if len(rows) < 2:
            fail(f"{type(self).__name__}.subset", "rows", "to be two or more", len(rows), "Give further rows.")
        ordering, k = positions_in(self.order)[rows].argsort(), min(self.num_neighbors, len(rows) - 1)
        search: Any = {"backend": self._backend, "progress": self._progress}
        new = type(self)(self.x[rows], k, ordering=ordering, metric=self.metric, **search)
        new._shuffled = self._shuffled
        return new

    def _with_appended(self, old: int, k: int) -> Int[Tensor, "N k"]:
        """Neighbors after points were appended to the `old` ones; a subclass may keep rows of the present table."""
        return self.find_neighbors(k)

    def query(
        self, x_new: Float[Tensor, "B D"], k: int | None = None, exclude: Int[Tensor, " B"] | None = None
    ) -> Int[Tensor, "B k"]:
        """Rows of the k nearest of all points, nearest first.

        Args:
            x_new: query points.
            k: number of neighbors, 1..N (N-1 with `exclude`); None is K.
            exclude: for each place the row of one point to leave out, -1 for none.

        Raises:
            ValueError, TypeError: for malformed arguments.

        Cost: the search index is built by the first call and kept until points or lengthscales change.
        """
        where = f"{type(self).__name__}.query"
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
        check_rows(f"{type(self).__name__}.others", "idx", idx, self.num_points)
        return self.query(self.x[idx], k, idx)

    def trial(self, most: int) -> NeighborTrial:
        """Trial rows with at most `most` nearest others each, kept until points, metric or K change."""
        most = min(most, self.num_points - 1)
        if self._trial is None or self._trial.near.shape[1] != most:
            rows = rows_to_try(self.num_points, self.x.device)
            self._trial = NeighborTrial(rows, self.others(most, rows))
        return self._trial

    def batch(self, idx: Int[Tensor, " B"] | None = None, extra: Int[Tensor, "..."] | None = None) -> Batch:
        """The batch of the points `idx` (None: all) and their neighbors.

        Args:
            idx: rows, distinct. Under :func:`torch.func.vmap` over them ``Batch.rows`` may repeat rows.
            extra: further rows to include in ``Batch.rows``, of any shape; -1 is passed through.

        Raises:
            ValueError, TypeError: if `idx` is not a vector of distinct row numbers, or `extra` holds others.
        """
        where = f"{type(self).__name__}.batch"
        if idx is not None:
            check_batch(where, "idx", idx, self.num_points)
        if extra is not None:
            check_tensor(where, "extra", extra)
            check_rows(where, "extra", extra.flatten(), self.num_points, extra.numel(), lowest=-1)
        if idx is None:
            every = torch.arange(self.num_points, device=self.x.device)
            return Batch(every, every, self._neighbors_of(None), 1.0, extra)
        neighbors = self._neighbors_of(idx)
        further = idx[:0] if extra is None else extra.flatten()
        parts = [idx, neighbors.flatten(), further]
        rows, positions = _places(torch.cat(parts))
        targets, near, rest = positions.split([len(part) for part in parts])
        rest = None if extra is None else rest.view_as(extra)
        return Batch(rows, targets, near.view_as(neighbors), self.num_points / len(idx), rest)

    def _neighbors_of(self, idx: Tensor | None) -> Tensor:
        """Rows of the neighbors of some points (None: all)."""
        return self.neighbors if idx is None else self.neighbors.index_select(0, idx)

    def extend(
        self, x_new: Float[Tensor, "P D"], k: int | None = None, seed: int = 0
    ) -> tuple[Int[Tensor, " P"], Int[Tensor, "P k"]]:
        """Append new points, in random order, to the ordering.

        Args:
            x_new: new points.
            k: neighbors per new point, 1..N+P-1; None is K.
            seed: seed of the order of the new points.

        Returns:
            The order, and for each new point (in the rows of `x_new`) the rows of the nearest among all old points
            (0..N-1) and the earlier new ones (N plus their row), nearest first, old ones first at equal distance;
            -1 padded.

        Raises:
            ValueError, TypeError: for malformed arguments.

        Cost: one `query` and one search for predecessors among the P new points; O(P k) memory.
        """
        where = f"{type(self).__name__}.extend"
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
        return order, rows.gather(-1, nearest)[positions_in(order)]

    @property
    def _has_features(self) -> bool:
        return hasattr(self._metric, "features")

    def _set_metric(self, metric: Tensor | FeatureMetric) -> None:
        if self._metric is not None and not self._has_features:
            where, cure = type(self).__name__, "Call refresh without lengthscales after the metric has changed."
            fail(where, "lengthscale", "to be None with a metric function", "a tensor", cure)
        if isinstance(metric, FeatureMetric):
            self._metric = metric
        else:
            self._metric = None
            self._set_lengthscale(metric)

    def _set_lengthscale(self, lengthscale: Tensor) -> None:
        check_lengthscales(type(self).__name__, "lengthscale", lengthscale, len(self.lengthscale))
        self.lengthscale.copy_(lengthscale.detach().expand_as(self.lengthscale))

    def _scaled(self, x: Tensor) -> Tensor:
        """Places of points in the search: x over the lengthscales in float64, or x itself for the user's metric."""
        return x.double() / self.lengthscale.double() if self._metric is None else x

    def _search_index(self, points: Tensor) -> SearchIndex | CorrelationIndex:
        options: Any = {"backend": self._backend, "progress": self._progress}
        if self._has_features:
            return CorrelationIndex(points, cast(FeatureMetric, self._metric), **options)
        return SearchIndex(points, metric=cast(Metric | None, self._metric), **options)

    def _searcher(self) -> tuple[SearchIndex | CorrelationIndex, Tensor]:
        """The search index over the points in their ordering, and the position of each row in it."""
        if self._index is None:
            self._index = self._search_index(self._scaled(self.x)[self.order]), positions_in(self.order)
        return self._index

    def find_neighbors(self, k: int) -> Int[Tensor, "N k"]:
        """The k neighbors of each row."""
        undefined(self, "find_neighbors", "subclass", "Return the k neighbors of each row, (N, k).")

    def _rows(self, positions: Tensor) -> Tensor:
        return torch.where(positions < 0, -1, self.order[positions])

    def _invalidate(self) -> None:
        """Invalidate the search index and other results computed from points and neighbors."""
        self._index, self._trial = None, None

    def _apply(self, fn: Any, recurse: bool = True) -> "NeighborTable":
        self._invalidate()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_index": None, "_trial": None}


def without_parents(near: Int[Tensor, "N C"], parents: Int[Tensor, "N K"]) -> Int[Tensor, "N C"]:
    """The points near each point without its parents, in their order, -1 padded."""
    parts = []
    for some, some_parents in zip(near.split(2**14), parents.split(2**14), strict=True):
        is_parent = (some[:, :, None] == some_parents[:, None, :]).any(-1)
        order = is_parent.to(torch.int8).argsort(dim=-1, stable=True)
        parts.append(torch.where(is_parent, -1, some).gather(-1, order))
    return torch.cat(parts)


def distinct_rows(rows: Int[Tensor, "..."]) -> tuple[Int[Tensor, " U"], Int[Tensor, "..."]]:
    """Distinct row numbers, ascending, and the position of each given number among them."""
    if is_batchedtensor(rows):
        return _sorted(rows)
    return _distinct(rows)


def same_rows(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors hold the same rows; the values of one and the same tensor are not compared."""
    return one is two or torch.equal(one, two)


def positions_in(order: Tensor) -> Tensor:
    """Position of each row in an ordering."""
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    return positions


def _places(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows, and the position of each number among them, -1 for -1.

    Under :func:`torch.func.vmap` rows may repeat: its members differ in how many distinct rows they have.
    """
    if is_batchedtensor(numbers):
        every = torch.arange(len(numbers), device=numbers.device)
        return numbers.clamp(min=0), torch.where(numbers < 0, -1, every)
    return _distinct(numbers, padded=True)


@operation
def _distinct(numbers: Tensor, padded: bool = False) -> tuple[Tensor, Tensor]:
    """Distinct numbers and the position of each; `padded` allows -1, which is left out and has the position -1."""
    result = compiled.distinct(numbers, padded)
    if result is not None:
        return result
    if not padded:
        return _sorted(numbers)
    rows, positions = _sorted(torch.cat([numbers.new_full((1,), -1), numbers]))  # -1 is there without asking
    return rows[1:], positions[1:] - 1


def _sorted(numbers: Tensor) -> tuple[Tensor, Tensor]:
    rows, places = numbers.int().unique(return_inverse=True)  # in two thirds of the time that 64 bits take
    return rows.long(), places


def _invalidate_after_loading(table: NeighborTable, incompatible_keys: Any) -> None:
    table._invalidate()
