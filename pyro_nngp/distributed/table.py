"""Tables of neighbors of the local rows of a process, with the rows of others that they need as a halo.

Rows are numbered on each process: local ones 0 .. n-1 in the order of the ordering, then the halo. A batch is made of
local rows; its neighbors may be in the halo. Neighbors are as in the table over all rows, and are kept in 32 bits.

Cost: :mod:`pyro_nngp.distributed.search` at construction and at each refresh, and O(n K) memory, 4 bytes per
neighbor. Symbols: N rows of all processes, n local rows, h rows of the halo, K neighbors.
"""

from typing import Any, NoReturn

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from pyro_nngp._checks import check_num_neighbors, fail, undefined
from pyro_nngp.distributed.data import ShardedData
from pyro_nngp.distributed.halo import Halo
from pyro_nngp.distributed.search import ShardedIndex
from pyro_nngp.distributed.triangle import Round, find_rounds
from pyro_nngp.neighbors import NearestOthers, NeighborGraph, NeighborTable
from pyro_nngp.neighbors.table import without_parents


def _refused(what: str) -> Any:
    """A method of a table that raises ``TypeError``."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``TypeError``: the operation needs the rows of all processes."""
        cure = "Build the method on tensors, on one process."
        fail(type(self).__name__, what, "on a table of all rows", "one of several processes", cure, TypeError)

    return refuse


class ShardedTable(NeighborTable):
    """The K neighbors of each local row among the rows of all processes; all of them must build it at the same time.

    Args:
        data: the rows of all processes.
        num_neighbors: K, in 1..N-1.
        metric: lengthscales that divide the inputs, (D,) or scalar.

    Attributes:
        data: the rows of all processes.
        halo: the rows of others, exchanged when values change.
        index: the search over all rows, for predictions.
        x: inputs of local rows and halo (n + h, D).
        neighbors: places of the neighbors among these (n, K), int32 where N allows it.

    Raises:
        ValueError: if K is out of range.
        TypeError: for a metric that is not one of lengthscales.
    """

    data: ShardedData
    halo: Halo
    kept_trial: tuple[int, Any] | None  # numbers of neighbors tried by a method, and at which rows

    def __init__(self, data: ShardedData, num_neighbors: int, metric: Any = None) -> None:
        nn.Module.__init__(self)
        check_num_neighbors(type(self).__name__, num_neighbors, data.num_rows - 1)
        x = data.values["x"]
        self.data, self._metric, self._trial, self._index = data, None, None, None
        self.register_buffer("x", x)
        self.register_buffer("lengthscale", torch.ones(x.shape[1], dtype=x.dtype))
        self.register_buffer("neighbors", torch.empty(0, num_neighbors, dtype=torch.int32))
        self.refresh(torch.ones(()) if metric is None else metric)

    @property
    def num_points(self) -> int:
        """n."""
        return self.data.num_own

    @property
    def num_rows(self) -> int:
        """N."""
        return self.data.num_rows

    def complete(self, own: Shaped[Tensor, "*L n"]) -> Shaped[Tensor, "*L m"]:
        """Values at local rows and halo from values at local rows; all processes must call it."""
        return self.halo.complete(own.movedim(-1, 0)).movedim(0, -1)

    def total(self, part: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.data.world.sum(part)

    def refresh(self, metric: Any = None) -> None:
        """Search again in a metric, None in the present one. The halo becomes another one."""
        if metric is not None:
            if not isinstance(metric, Tensor):
                cure = "Pass metric=torch.ones(D), or a stationary kernel."
                fail(type(self).__name__, "metric", "to be lengthscales", type(metric).__name__, cure, TypeError)
            self._set_lengthscale(metric)
        self._find(self.num_neighbors)

    def resize(self, num_neighbors: int) -> None:
        """Search again for another number of neighbors."""
        check_num_neighbors(f"{type(self).__name__}.resize", num_neighbors, self.data.num_rows - 1)
        self._find(num_neighbors)

    def _find(self, k: int) -> None:
        self.index, self.kept_trial = ShardedIndex(self.data, self.lengthscale), None
        numbers = self.search(k)
        self.halo = Halo(self.data, numbers)
        device = self.x.device
        self.neighbors = self.halo.places(numbers).to(device)
        own = self.data.values["x"]
        self.x = torch.cat([own, self.halo.fetch(own)]).to(device)

    def search(self, k: int) -> Int[Tensor, "n k"]:
        """Numbers of the k neighbors of each local row."""
        undefined(self, "search", "table")

    def _neighbors_of(self, idx: Tensor | None) -> Tensor:
        return (self.neighbors if idx is None else self.neighbors[idx]).long()

    # Rows stay as they were distributed, and predictions of the method fetch those that they need.
    append, query, extend, trial, others = map(_refused, ("append", "query", "extend", "trial", "others"))

    def _invalidate(self) -> None:
        self.kept_trial = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTable":
        return self  # processes have to build it together


class ShardedGraph(ShardedTable, NeighborGraph):
    """At most K nearest predecessors of each local row in the random ordering of the rows of all processes.

    Args:
        data: the rows of all processes.
        num_neighbors: K, in 1..N-1.
        metric: lengthscales that divide the inputs, (D,) or scalar.
        symmetric: whether neighbors are the parents of a :class:`~pyro_nngp.neighbors.SymmetricGraph`.
    """

    def __init__(self, data: ShardedData, num_neighbors: int, metric: Any = None, *, symmetric: bool = False) -> None:
        self._symmetric = symmetric
        self._rounds: list[Round] | None = None
        super().__init__(data, num_neighbors, metric)

    def search(self, k: int) -> Int[Tensor, "n k"]:
        return self.index.parents(k) if self._symmetric else self.index.predecessors(k)

    def rounds(self) -> list[Round]:
        """The rounds of substitution in which processes wait for each other; once per set of neighbors."""
        if self._rounds is None:
            self._rounds = find_rounds(self.data, self.halo, self.neighbors[: self.num_points].long().cpu())
        return self._rounds

    def _find(self, k: int) -> None:
        super()._find(k)
        self._rounds = None

    levels = _refused("levels")  # of the factor of all rows, which is on no process


class ShardedNeighborhoods(ShardedGraph):
    """A graph that has the neighbors of the halo's rows as well, and further nodes of each row, for encoders.

    Args:
        data: the rows of all processes.
        num_neighbors: K, in 1..N-1.
        metric: lengthscales that divide the inputs, (D,) or scalar.
        symmetric: whether neighbors are the parents of a :class:`~pyro_nngp.neighbors.SymmetricGraph`.
        num_context: C, further nodes of each row: of its C nearest others those that are not its neighbors.

    Attributes:
        neighbors: of local rows, of rows that these are conditioned on, and -1 for those that only these need (n + h,
            K).
        context: places of the further nodes, -1 padded (n + h, C).
        rank: places in the random ordering (n + h,).
    """

    context: Tensor
    rank: Tensor

    def __init__(
        self, data: ShardedData, num_neighbors: int, metric: Any = None, *, symmetric: bool, num_context: int
    ) -> None:
        self._num_context = min(num_context, data.num_rows - 1)
        super().__init__(data, num_neighbors, metric, symmetric=symmetric)

    def _find(self, k: int) -> None:
        super()._find(k)
        first, near = self.halo, self.halo.numbers_at(self.neighbors.cpu())
        context = near[:, :0]
        if self._num_context:
            context = without_parents(self.index.others(self._num_context).long(), near)
        parts = first.complete(torch.cat([near, context], -1))
        self.halo = Halo(self.data, parts)
        table = parts.new_full((self.data.num_own + len(self.halo), parts.shape[1]), -1)
        table[: self.data.num_own] = parts[: self.data.num_own]
        table[self.halo.places(first.numbers)] = parts[self.data.num_own :]
        places = self.halo.places(table).to(self.x.device)
        self.neighbors = places[:, :k]
        self.register_buffer("context", places[:, k:])
        own = self.data.values["x"]
        self.x = self.halo.complete(own).to(self.x.device)
        self.register_buffer("rank", self.halo.complete(self.data.positions).to(self.x.device))


class ShardedOthers(ShardedTable, NearestOthers):
    """The K nearest other rows of each local row, among the rows of all processes."""

    def search(self, k: int) -> Int[Tensor, "n k"]:
        return self.index.others(k)

    def others(self, k: int | None = None, idx: Int[Tensor, " B"] | None = None) -> Int[Tensor, "B k"]:
        """Places of the K nearest other rows of local rows; of no other number than K."""
        if k not in (None, self.num_neighbors):
            super().others(k, idx)
        return self._neighbors_of(idx)

    def _neighbors_of(self, idx: Tensor | None) -> Tensor:
        return ShardedTable._neighbors_of(self, idx)
