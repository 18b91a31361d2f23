"""Methods on several processes: own rows with a halo, and ordinary copies of the method on rows of all processes.

A process has its own rows first in x, y and everything else that there is per datum, then the rows of its halo. Model
and guide are called with own rows; the plate of the data has the own rows, so that the sum of the ELBOs over the
processes is that of all rows. Whatever needs other rows (the mean by generalized least squares, the choice of K,
predictions) fetches them, and goes on with a copy that is an ordinary method on these rows with the same
hyperparameters. Methods whose predictions depend on inducing points alone have no halo, and predict as on one process.

Symbols: N rows of all processes, n own rows, h rows of the halo, S rows of a copy, P new points, K neighbors.
"""

import copy
from typing import Any, NamedTuple, TypeVar, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from pyro_nngp._checks import check_num_neighbors, fail
from pyro_nngp.data.tables import BY_ROW
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.table import ShardedGraph, ShardedOthers, ShardedTable
from pyro_nngp.models.base.arguments import check_by_row, check_data
from pyro_nngp.models.tower.sites import DataSites
from pyro_nngp.neighbors import NearestOthers, NeighborGraph
from pyro_nngp.neighbors.choice_of_k import NeighborTrial, rows_to_try
from pyro_nngp.variational import LocalTables

Method = TypeVar("Method", bound="ShardedRows")


class Trial(NamedTuple):
    """A copy of a method on some points and their nearest others, at which numbers of neighbors are compared."""

    view: Any
    trial: NeighborTrial


class ShardedRows(DataSites):
    """A method that can have its rows on several processes; a subclass sets :attr:`can_distribute`.

    Attributes:
        can_distribute: whether the method takes :class:`~pyro_nngp.distributed.ShardedData`.
        has_row_tables: whether parameters of ``local`` have a row per datum.
        predicts_from_rows: whether predictions condition on the data, or on latent values at them.
    """

    can_distribute = False
    has_row_tables = True
    predicts_from_rows = True
    graph: Any
    local: Any

    def distribute(self, data: ShardedData, choose: bool) -> None:
        """Replace the sample that the method was built on by the own rows, and find their neighbors among all rows.

        The constructor calls it; all processes must do so at the same time.

        Args:
            data: the rows.
            choose: whether the number of neighbors was not given.

        Raises:
            ValueError: for targets outside the support of the likelihood.
        """
        where = type(self).__name__
        values = data.values
        by_row = {name: values.get(name) for name in BY_ROW}
        check_data(where, values["x"], values["y"], self.likelihood)
        check_by_row(where, values["x"], values["y"], self.likelihood, self.latent_shape, by_row)
        values["y"] = self.coded(values["y"]).to(cast(Tensor, self.y).dtype)
        self.shard = data
        if self.predicts_from_rows:
            k = self._first_neighbors(data.num_rows, self.graph.num_neighbors, choose)
            self.graph = self.sharded_table(data, k)
        self.take_rows(first=True)

    def sharded_table(self, data: ShardedData, num_neighbors: int) -> ShardedTable:
        """The table of neighbors among the rows of all processes."""
        kind = ShardedGraph if isinstance(self.graph, NeighborGraph) else ShardedOthers
        return kind(data, num_neighbors, self.neighbor_metric())

    def _first_neighbors(self, num_rows: int, given: int, choose: bool) -> int:
        """K of the first table."""
        return min(given, num_rows - 1)

    def coded(self, y: Tensor) -> Tensor:
        """Targets in the coding of the method's own."""
        return y

    def take_rows(self, first: bool = False) -> None:
        """Fetch the rows of the halo again, after the neighbors have changed.

        Args:
            first: whether what is kept per datum starts.
        """
        data = cast(ShardedData, self.shard)
        for name, own in data.values.items():
            setattr(self, name, self.complete(own).to(self.x.device))

    def complete(self, own: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "m ..."]:
        """Values of own rows with those of the halo behind them; unchanged where there is no halo."""
        table = getattr(self, "graph", None)
        return table.halo.complete(own) if isinstance(table, ShardedTable) else own

    @property
    def row_buffers(self) -> set[str]:
        """Buffers with a row per datum that follow from the data and the neighbors."""
        return {"data_neighbors"}

    def training_state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of what training changes: "shared" tensors, and "rows" of parameters with a row per own datum.

        The data are not in it, nor is what follows from the rest: neighbors and halo.
        """
        fixed = {*cast(ShardedData, self.shard).values, *self.row_buffers}
        if self.predicts_from_rows:
            fixed |= {"graph.x", "graph.neighbors", "graph.context", "graph.rank"}
        tables = {f"local.{name}": table for name, table in self._row_tables().items()}
        rows = {name: table.detach()[: self.num_data].clone() for name, table in tables.items()}
        fixed |= tables.keys()
        state = {name: value.detach().clone() for name, value in self.state_dict().items() if name not in fixed}
        return {"shared": state, "rows": rows}

    def _row_tables(self) -> dict[str, Tensor]:
        """What q(u) has for each datum, by name, with rows first."""
        local = getattr(self, "local", None)
        return local.row_tables() if self.has_row_tables and isinstance(local, LocalTables) else {}

    @torch.no_grad()
    def load_training_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Restore what :meth:`training_state` returned; all processes must do so at the same time."""
        self.load_state_dict(state["shared"], strict=False)
        tables = self._row_tables()
        for name, value in state["rows"].items():
            tables[name.removeprefix("local.")].data[: self.num_data] = value.to(self.x.device)
        self.find_rows()

    def find_rows(self) -> None:
        """Find the neighbors again in the metric of the state, and fetch the rows of the halo."""
        if self.predicts_from_rows:
            self.graph.refresh()
            self.take_rows()

    def at_numbers(self: Method, numbers: Int[Tensor, " S"], ordered: bool = False, metric: Any = None) -> Method:
        """A copy on some rows of all processes, in this order, which shares all hyperparameters.

        All processes must call it at the same time, each with any numbers.

        Args:
            numbers: of the rows, as in :class:`~pyro_nngp.distributed.ShardedData`; at least one.
            ordered: whether to find the nearest predecessors of each row in the given order.
            metric: of neighbors; None is that of the present neighbors.
        """
        data = cast(ShardedData, self.shard)
        tables = self._row_tables()
        own = [*data.values.values(), *(table.detach()[: self.num_data].cpu() for table in tables.values())]
        found = data.fetch(numbers, *own)
        kept = [*self.parameters(), *self.buffers()]
        new = copy.deepcopy(self, {id(value): value for value in kept})
        new.shard, new.is_part = None, True
        for name, rows in zip(data.values, found, strict=False):
            setattr(new, name, rows.to(self.x))
        metric = self.graph.metric if metric is None else metric
        k = max(1, min(self.graph.num_neighbors, len(numbers) - 1))
        if len(numbers) > 1:
            kind = NeighborGraph if ordered else NearestOthers
            new.graph = kind(new.x, k, ordering="given", metric=metric, progress=False)
        new.place_rows({n: rows.to(self.x) for n, rows in zip(tables, found[len(data.values) :], strict=True)})
        return new

    def place_rows(self, tables: dict[str, Tensor]) -> None:
        """Give a copy what q(u) has for its rows, by name."""
        for name, rows in tables.items():
            setattr(self.local, name, nn.Parameter(rows, requires_grad=False))

    def near(self: Method, x_new: Float[Tensor, "P D"], num_neighbors: int, ordered: bool = False) -> Method:
        """A copy on the rows nearest to some new points, different ones on each process.

        Args:
            x_new: new points, at least one.
            num_neighbors: rows per new point.
            ordered: as of :meth:`at_numbers`.
        """
        data = cast(ShardedData, self.shard)
        check_num_neighbors(type(self).__name__, num_neighbors, data.num_rows)
        numbers = self.graph.index.nearest(x_new.detach().cpu(), max(2, num_neighbors)).unique().long()
        return self.at_numbers(self._ordered(numbers), ordered)

    def with_others(
        self: Method, rows: Int[Tensor, " B"] | None, num_neighbors: int
    ) -> tuple[Method, Int[Tensor, " B"]]:
        """A copy on some own rows (None: all) and the nearest others of each, and the places of these rows in it.

        All processes must call it at the same time, each with any rows.
        """
        data = cast(ShardedData, self.shard)
        check_num_neighbors(type(self).__name__, num_neighbors, data.num_rows - 1)
        rows = torch.arange(data.num_own) if rows is None else rows.cpu()
        near = self.graph.index.others(num_neighbors, rows).long()
        numbers = self._ordered(torch.cat([rows + data.first, near.flatten()]).unique())
        order = numbers.argsort()
        places = order[torch.searchsorted(numbers[order], rows + data.first)]
        return self.at_numbers(numbers), places.to(self.x.device)

    def _ordered(self, numbers: Int[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Numbers in the random ordering of the rows."""
        data = cast(ShardedData, self.shard)
        (positions,) = data.fetch(numbers, data.positions)
        return numbers[positions.argsort()]

    def neighbor_trial(self, most: int) -> Trial:
        """Some rows with that many nearest others, the same on all processes; kept until neighbors change."""
        data, table = cast(ShardedData, self.shard), cast(ShardedTable, self.graph)
        if table.kept_trial is None or table.kept_trial[0] != most:
            tried = data.numbers_of(rows_to_try(data.num_rows, torch.device("cpu")))
            own = tried[data.owners(tried) == data.world.rank]
            near = table.index.others(most, own - data.first).long()
            tried, near = data.world.gather(own), data.world.gather(near)
            numbers = torch.cat([tried, near.flatten()]).unique()
            places = torch.searchsorted(numbers, tried), torch.searchsorted(numbers, near)
            device = self.x.device
            trial = NeighborTrial(places[0].to(device), places[1].to(device))
            table.kept_trial = most, Trial(self.at_numbers(numbers), trial)
        return table.kept_trial[1]

    def check_whole(
        self,
        what: str,
        cure: str = "Copy the hyperparameters by start=gp into a method built on tensors, on one process.",
    ) -> None:
        """Raise for an operation that is not there on several processes.

        Raises:
            TypeError: names the operation and the cure.
        """
        if self.shard is not None:
            fail(f"{type(self).__name__}.{what}", "method", "with all rows", "one of ShardedData", cure, TypeError)
