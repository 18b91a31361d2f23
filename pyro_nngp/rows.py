"""The data of a method, one row per datum.

:class:`Rows` are all rows, on one process; :class:`~pyro_nngp.distributed.rows.ShardedRows` are the local rows of one
of several processes with a halo. What differs between the two is in these classes alone.

Symbols: N rows of all processes, n local rows, B rows, D inputs, T outputs, L latent functions, P new points, K
neighbors.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._random import shuffled
from pyro_nngp.bound import Bound
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.neighbors import NeighborGraph, NeighborTable

At: TypeAlias = Tensor | slice
"""Row numbers, or a slice of them."""

EVERY = slice(None)
VALUES = ("x", "y", "offset", "weights", "trials", "limits")


def at(idx: Tensor | None) -> At:
    """Rows of a batch; None is all."""
    return EVERY if idx is None else idx


class Part(NamedTuple):
    """Some rows of all processes, at hand on this one.

    Attributes:
        rows: the rows.
        graph: a table of their neighbors.
        numbers: their numbers among the rows of all processes; None for the rows themselves, where they are all.
        places: places among the rows of what was asked for.
        q: the distribution of latent values there, of a method that has one.
    """

    rows: "Rows"
    graph: Any
    numbers: Int[Tensor, " S"] | None
    places: Any = None
    q: Any = None


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs (N, D), targets (N,) or (N, T), and what else belongs to single rows."""

    x: Float[Tensor, "N D"]
    y: Any = None
    offset: Float[Tensor, "N ..."] | None = None
    weights: Float[Tensor, "N ..."] | None = None
    trials: Float[Tensor, "N ..."] | None = None
    limits: Float[Tensor, "N ..."] | None = None

    @property
    def num_data(self) -> int:
        """Number of rows of this process, n."""
        return len(self.x)

    @property
    def num_rows(self) -> int:
        """Number of rows of all processes, N."""
        return len(self.x)

    @property
    def own(self) -> slice:
        """The rows of this process among those at hand."""
        return slice(self.num_data)

    @property
    def every(self) -> Int[Tensor, " n"]:
        """Numbers of the rows of this process."""
        return torch.arange(self.num_data, device=self.x.device)

    @property
    def is_whole(self) -> bool:
        """Whether all rows are on this process."""
        return True

    @property
    def differs_by_row(self) -> bool:
        """Whether rows have weights, trials or limits."""
        return any(value is not None for value in (self.weights, self.trials, self.limits))

    def total(self, part: Tensor) -> Tensor:
        """The sum over the rows of all processes from that over the rows of this one; all processes must call it."""
        return part

    def complete(self, graph: Any, own: Tensor) -> Tensor:
        """Values at all rows at hand, from those at the rows of this process."""
        return own

    def with_halo(self, graph: Any) -> Mapping[str, Tensor]:
        """Values at all rows at hand, by name, where the neighbors decide which rows these are."""
        return {}

    def fetch(self, numbers: Int[Tensor, " S"] | None, tables: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Some rows of tables with a row per datum, by their numbers among the rows of all processes; None is all.

        All processes must call it.
        """
        return tables if numbers is None else {name: table[numbers] for name, table in tables.items()}

    def shared(self) -> AbstractContextManager:
        """A context for sites that do not belong to rows; on several processes each counts its fraction of them."""
        return nullcontext()

    # Values at some rows.

    def inputs(self, idx: Tensor | None) -> Float[Tensor, "B D"]:
        """x at a batch; None is all."""
        return self.x if idx is None else self.x.index_select(0, idx.to(self.x.device))

    def targets(self, idx: Tensor | None = None) -> Any:
        """y at a batch (None: all), outputs first; None without targets."""
        if self.y is None or idx is None:
            return None if self.y is None else self.y.movedim(0, -1)
        return self.y.index_select(0, idx.to(self.y.device)).movedim(0, -1)

    def likelihood(self, bound: Bound, rows: At = EVERY) -> Likelihood:
        """The likelihood of some rows."""
        weights = None if self.weights is None else self.weights.movedim(0, -1)[..., rows]
        return bound.likelihood.for_rows(weights, **self.by_row(rows))

    def mean(self, bound: Bound, rows: At = EVERY, x: Tensor | None = None) -> Float[Tensor, "*L B"]:
        """The mean function at some rows plus their offset; `x` are their inputs, where these are at hand."""
        mean = bound.mean(self.x[rows] if x is None else x)
        return mean if self.offset is None else mean + self.offset[rows].movedim(0, -1)

    def by_row(self, rows: At = EVERY) -> Mapping[str, Tensor]:
        """Numbers of trials and limits of some rows, if there are any, outputs first."""
        given = {"trials": self.trials, "limits": self.limits}
        return {name: value.movedim(0, -1)[..., rows] for name, value in given.items() if value is not None}

    # Rows of all processes that a computation needs; on one process they are at hand.

    def near(
        self, graph: NeighborTable, x_new: Float[Tensor, "P D"], num_neighbors: int, *, ordered: bool = False
    ) -> Part:
        """The rows nearest to some new points.

        Args:
            graph: the neighbors of the rows.
            x_new: new points.
            num_neighbors: rows per new point.
            ordered: whether the part's graph must have predecessors.
        """
        return Part(self, graph, None)

    def others(self, graph: NeighborTable, rows: Int[Tensor, " B"], num_neighbors: int | None) -> Part:
        """The nearest others of some rows; the part's places are these rows."""
        return Part(self, graph, None, rows)

    def nearest_others(self, graph: NeighborTable, num_neighbors: int) -> Any:
        """The nearest other points of each row of this process."""
        return graph.others(num_neighbors)

    def trial(self, graph: NeighborTable, most: int) -> Part:
        """Some rows with at most that many nearest others, at which numbers of neighbors are compared, as places."""
        return Part(self, graph, None, graph.trial(most))

    def preceding(self, graph: NeighborTable, count: int, metric: Any) -> Part:
        """The first rows of the ordering, or of a random one where there is none.

        The part's graph are the positions among them of the nearest predecessors of each, its places are the rows.
        """
        if isinstance(graph, NeighborGraph):
            rows = graph.order[:count]
            places = torch.full_like(graph.order, -1)
            places[rows] = torch.arange(len(rows), device=rows.device)
            near = graph.neighbors[rows]
            return Part(self, torch.where(near < 0, -1, places[near]), None, rows)
        rows = shuffled(self.num_rows, 0, self.x.device)[:count]
        k = min(graph.num_neighbors, len(rows) - 1)
        first = NeighborGraph(self.x[rows], k, "given", metric=metric, progress=False)
        return Part(self, first.neighbors, None, rows)


__all__ = ["EVERY", "At", "Part", "Rows", "at"]
