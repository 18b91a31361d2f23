"""The rows of a method on one of several processes: local rows with a halo, and rows of others where they are needed.

Local rows come first in x, y and everything else that there is per datum, then the rows of the halo. A computation that
needs other rows (the mean by generalized least squares, the choice of K, predictions, scores) fetches them; all
processes do so at the same time, each for itself.

Symbols: N rows of all processes, n local rows, S fetched rows, P new points, K neighbors.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from pyro import poutine
from torch import Tensor

from pyro_nngp._checks import check_num_neighbors
from pyro_nngp._random import shuffled
from pyro_nngp.distributed.data import ShardedData
from pyro_nngp.distributed.halo import Near
from pyro_nngp.neighbors import NearestOthers, NeighborGraph
from pyro_nngp.neighbors.choice_of_k import NeighborTrial, rows_to_try
from pyro_nngp.rows import Part, Rows


@dataclass(frozen=True, eq=False)
class ShardedRows(Rows):
    """Local rows and rows of the halo.

    Attributes:
        shard: the rows of all processes.
    """

    shard: Any = None

    @property
    def num_data(self) -> int:
        return self.shard.num_own

    @property
    def num_rows(self) -> int:
        return self.shard.num_rows

    @property
    def is_whole(self) -> bool:
        return False

    def total(self, part: Tensor) -> Tensor:
        return self.shard.world.sum(part)

    def complete(self, graph: Any, own: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "m ..."]:
        return graph.halo.complete(own) if hasattr(graph, "halo") else own

    def with_halo(self, graph: Any) -> Mapping[str, Tensor]:
        return {name: self.complete(graph, own).to(self.x.device) for name, own in self.shard.values.items()}

    def fetch(self, numbers: Int[Tensor, " S"] | None, tables: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if numbers is None:
            return tables
        own = [table.detach()[: self.num_data].cpu() for table in tables.values()]
        rows = self.shard.fetch(numbers, *own)
        return {name: value.to(self.x) for name, value in zip(tables, rows, strict=True)}

    def shared(self) -> AbstractContextManager:
        return poutine.scale(scale=self.num_data / self.num_rows)

    def near(self, graph: Any, x_new: Float[Tensor, "P D"], num_neighbors: int, *, ordered: bool = False) -> Part:
        check_num_neighbors("near", num_neighbors, self.num_rows)
        numbers = graph.index.nearest(x_new.detach().cpu(), max(2, num_neighbors)).unique().long()
        return self.at_numbers(graph, self._ordered(numbers), ordered=ordered)

    def others(self, graph: Any, rows: Int[Tensor, " B"], num_neighbors: int | None) -> Part:
        data: ShardedData = self.shard
        num_neighbors = graph.num_neighbors if num_neighbors is None else num_neighbors
        check_num_neighbors("loo", num_neighbors, data.num_rows - 1)
        rows = rows.cpu()
        near = graph.index.others(num_neighbors, rows).long()
        numbers = self._ordered(torch.cat([rows + data.first, near.flatten()]).unique())
        order = numbers.argsort()
        places = order[torch.searchsorted(numbers[order], rows + data.first)]
        return self.at_numbers(graph, numbers)._replace(places=places.to(self.x.device))

    def nearest_others(self, graph: Any, num_neighbors: int) -> Near:
        return Near(self.shard, graph.index.others(num_neighbors).long())

    def trial(self, graph: Any, most: int) -> Part:
        """The same rows on all processes; kept until the neighbors change."""
        if graph.kept_trial is None or graph.kept_trial[0] != most:
            data: ShardedData = self.shard
            tried = data.numbers_of(rows_to_try(data.num_rows, torch.device("cpu")))
            own = tried[data.owners(tried) == data.world.rank]
            near = graph.index.others(most, own - data.first).long()
            tried, near = data.world.gather(own), data.world.gather(near)
            numbers = torch.cat([tried, near.flatten()]).unique()
            places = (torch.searchsorted(numbers, rows).to(self.x.device) for rows in (tried, near))
            graph.kept_trial = most, self.at_numbers(graph, numbers)._replace(places=NeighborTrial(*places))
        return graph.kept_trial[1]

    def preceding(self, graph: Any, count: int, metric: Any) -> Part:
        data: ShardedData = self.shard
        if isinstance(graph, NeighborGraph):
            part = self.at_numbers(graph, data.numbers_at(count), ordered=True)
        else:
            rows = shuffled(data.num_rows, 0)[:count]
            part = self.at_numbers(graph, data.numbers_of(rows), ordered=True, metric=metric)
        return part._replace(graph=part.graph.neighbors, places=part.rows.every)

    def at_numbers(self, graph: Any, numbers: Int[Tensor, " S"], *, ordered: bool = False, metric: Any = None) -> Part:
        """Some rows of all processes in this order, with their neighbors among each other.

        Args:
            graph: the present neighbors.
            numbers: of the rows; at least one.
            ordered: whether to find the nearest predecessors of each row in the given order.
            metric: metric of neighbors; None keeps the present one.
        """
        values: Any = self.fetch(numbers, self.shard.values)
        rows = Rows(**values)
        table = None
        if len(numbers) > 1:
            kind = NeighborGraph if ordered else NearestOthers
            k = max(1, min(graph.num_neighbors, len(numbers) - 1))
            metric = graph.metric if metric is None else metric
            table = kind(rows.x, k, ordering="given", metric=metric, progress=False)
        return Part(rows, table, numbers)

    def _ordered(self, numbers: Int[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Numbers in the random ordering of the rows."""
        (positions,) = self.shard.fetch(numbers, self.shard.positions)
        return numbers[positions.argsort()]


__all__ = ["ShardedRows"]
