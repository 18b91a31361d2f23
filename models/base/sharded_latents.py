"""Variational methods with latent values on several processes: q(u) at own rows and the halo, or at inducing points.

q(u) of inducing points is the same on all processes; a table of q(u) at the data has own rows and those of the halo; an
encoder computes q(u) of the rows that it is asked for.

Symbols: n own rows, S rows of a copy.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.distributed import Near, Route, ShardedData, ShardedGraph, ShardedNeighborhoods, ShardedTable
from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.models.base.predictive import PredictiveMethod
from pyro_nngp.neighbors import SymmetricGraph
from pyro_nngp.variational import AmortizedGaussian, GaussianSites, GivenGaussian, LocalGaussian

Method = TypeVar("Method", bound="ShardedLatents")


class ShardedLatents(PredictiveMethod):
    """A method with q(u) at the data or at inducing points, whose rows may be on several processes.

    Attributes:
        at_data: whether u are the latent values at the data.
        local: q(u).
    """

    local: LocalGaussian | AmortizedGaussian | GaussianSites
    data_neighbors: Any
    at_data: Any
    _amortized: Callable[..., AmortizedGaussian]
    _sites: Callable[[], GaussianSites]

    @property
    def row_buffers(self) -> set[str]:
        found = super().row_buffers | {f"local.{name}" for name in ("y", "response", "rank", "context")}
        return found | {"local.pattern"} if self.at_data else found

    @property
    def has_factor(self) -> bool:
        """Whether q(u) has parameters of each point with a factor."""
        return isinstance(self.local, LocalGaussian) and self.local.pattern is not None

    def of_all(self) -> AbstractContextManager:
        """On several processes, a context for inducing values that all of them have."""
        return nullcontext() if self.at_data else self.shared_sites()

    def sharded_table(self, data: ShardedData, num_neighbors: int) -> ShardedTable:
        symmetric = isinstance(self.graph, SymmetricGraph)
        if self.has_row_tables and not self.has_factor:
            return ShardedGraph(data, num_neighbors, self.neighbor_metric(), symmetric=symmetric)
        num_context = self.local.encoder.num_context if isinstance(self.local, AmortizedGaussian) else 0
        settings: dict[str, Any] = {"symmetric": symmetric, "num_context": num_context}
        return ShardedNeighborhoods(data, num_neighbors, self.neighbor_metric(), **settings)

    def take_rows(self, first: bool = False) -> None:
        super().take_rows(first)
        if not self.at_data:
            self.find_rows()
        elif isinstance(self.local, LocalGaussian):
            if self.has_factor:
                self.local.pattern = self.graph.neighbors[:, : self.local.pattern.shape[1]].long()
            if first:
                for table in self.local.parameters():
                    table.data = table.detach()[:1].expand(self.num_data, -1)
            self.complete_tables()
        elif isinstance(self.local, GaussianSites):
            if first:
                self.local = self._sites()
                return
            tables = {name: self.complete(table[: self.num_data]) for name, table in self.local.row_tables().items()}
            self.local.place_rows(tables, cast(Tensor, self.y))
        elif first:
            self.local = self._amortized(self.local.encoder, self.local.num_columns)
        else:
            self.local.take(cast(Tensor, self.y))
            self.local.follow(self.graph)

    def nearest_others(self, num_neighbors: int) -> Int[Tensor, "N K"] | Near:
        """The nearest other points of each datum, of own rows on several processes."""
        if self.shard is None:
            return self.graph.others(num_neighbors)
        return Near(self.shard, self.graph.index.others(num_neighbors).long())

    def complete_tables(self) -> None:
        """Fetch q(u) of the halo's rows, where it has a table of parameters."""
        for table in self.local.parameters():
            table.data = self.complete(table.detach()[: self.num_data].clone())

    def refresh_rows(self) -> None:
        """Find the neighbors of own rows again, and fetch the rows of the halo.

        Entries of q(u) follow their columns.
        """
        before = self._columns() if self.has_factor else None
        self.refresh_table()
        if before is not None:
            cast(LocalGaussian, self.local).move_entries(before, self._columns())
        self.take_rows()
        if not isinstance(self.local, LocalGaussian):
            self.local.follow(self.graph)

    def _columns(self) -> Int[Tensor, "n P"]:
        """Numbers of the rows that are columns of the own rows of the factor of q(u)."""
        places = self.graph.neighbors[: self.num_data, : cast(Tensor, self.local.pattern).shape[1]]
        return self.graph.halo.numbers_at(places)

    def find_rows(self) -> None:
        if self.at_data:
            super().find_rows()
        else:
            self.data_neighbors = self.graph.query(self.x, self.data_neighbors.shape[1])

    @pyro_entry
    @torch.no_grad()
    def at_numbers(self: Method, numbers: Int[Tensor, " S"], ordered: bool = False, metric: Any = None) -> Method:
        new = super().at_numbers(numbers, ordered, metric)
        if not isinstance(self.graph, ShardedNeighborhoods):
            return new
        data = cast(ShardedData, self.shard)
        route = Route(data.world, data.owners(numbers))
        arrived = route.forward(numbers) - data.first
        asked, places = torch.cat([arrived, arrived.new_zeros(1)]).unique(return_inverse=True)  # at least one
        self._place_medians()
        q, of_halo = self.local.distribution(asked.to(self.x.device)), self.graph.halo
        pattern = of_halo.numbers_at(q.pattern)
        parts = q.loc.movedim(-1, 0), q.scale.movedim(-1, 0), q.weights.movedim(-2, 0), pattern
        loc, scale, weights, pattern = (route.back(part.cpu()[places[:-1]]).to(self.x.device) for part in parts)
        rows = numbers.to(self.x.device)
        q = SparseCholeskyNormal(loc.movedim(0, -1), scale.movedim(0, -1), weights.movedim(0, -2), pattern, rows)
        new.local = cast(LocalGaussian, GivenGaussian(q))  # a table of these rows
        return new

    def place_rows(self, tables: dict[str, Tensor]) -> None:
        if isinstance(self.local, GaussianSites):
            solved = self.local.solved
            self.local = self._sites()
            self.local.place_rows(tables, cast(Tensor, self.y))
            self.local.solved = solved
        else:
            super().place_rows(tables)

    def near(self: Method, x_new: Float[Tensor, "P D"], num_neighbors: int, ordered: bool = False) -> Method:
        new = super().near(x_new, num_neighbors, ordered)
        if isinstance(self.local, GaussianSites):
            cast(GaussianSites, new.local).place_near(self.local, x_new, num_neighbors)
        return new
