"""Places of observations, and of the cells that pool them: on one process, or on several.

Symbols: N places of all processes, n local places, M cells, P new points, K neighbors, L latent functions.
"""

from typing import TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._random import shuffled
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.halo import Near
from pyro_nngp.distributed.points import ShardedPoints
from pyro_nngp.distributed.search import ShardedIndex
from pyro_nngp.distributed.table import ShardedTable
from pyro_nngp.neighbors import NearestOthers, NeighborTable


class Members:
    """The cell of each observation.

    Args:
        cell: number of the cell (N,).
        count: M.
    """

    def __init__(self, cell: Int[Tensor, " N"], count: int) -> None:
        self._cell, self._count = cell, count

    def sums(self, values: Float[Tensor, "*L N"]) -> Float[Tensor, "*L M"]:
        """Sums over the members of each cell."""
        return values.new_zeros(*values.shape[:-1], self._count).index_add_(-1, self._cell, values)

    def at(self, values: Float[Tensor, "*L M"]) -> Float[Tensor, "*L N"]:
        """Values of the cell of each observation."""
        return values[..., self._cell]


class WholePlaces:
    """Places on one process.

    Args:
        table: a table of them.
    """

    def __init__(self, table: NeighborTable) -> None:
        self._table = table

    @classmethod
    def at(cls, like: NeighborTable, x: Float[Tensor, "M D"]) -> "WholePlaces":
        """Other places, in the metric of a table."""
        return cls(NearestOthers(x, 1, metric=like.metric, progress=False))

    @property
    def x(self) -> Float[Tensor, "N D"]:
        """The places."""
        return self._table.x

    @property
    def count(self) -> int:
        """N."""
        return self._table.num_points

    def total(self, part: Tensor) -> Tensor:
        """The sum over all processes."""
        return part

    def sample(self, count: int) -> Int[Tensor, " S"]:
        """Random rows; the first ones of a larger sample."""
        order = shuffled(self.count, 0)
        return order[:count].to(self.x.device)

    def rows(self, numbers: Int[Tensor, " S"]) -> Int[Tensor, " R"]:
        """Local ones of some rows."""
        return numbers

    def query(self, x_new: Float[Tensor, "P D"], num_neighbors: int) -> Int[Tensor, "P K"]:
        """The nearest places of new points."""
        return self._table.query(x_new, num_neighbors)

    def assign(self, centers: Int[Tensor, " M"]) -> Members:
        """Cells of the places nearest to some of them; of coinciding centers, only the first has members."""
        cell = WholePlaces.at(self._table, self.x[centers]).query(self.x, 1)[:, 0]
        used, cell = cell.unique(return_inverse=True)
        return Members(cell, len(used))

    def moved(self, members: Members, x: Float[Tensor, "M D"]) -> "WholePlaces":
        """The cells of :meth:`assign` at new places."""
        return WholePlaces.at(self._table, x)


class ShardedPlaces:
    """Places on several processes; all of them must call everything at the same time.

    Args:
        points: the places, in a random ordering.
        index: a search among them.
        lengthscale: what inputs are divided by in searches.
    """

    def __init__(self, points: ShardedPoints, index: ShardedIndex, lengthscale: Float[Tensor, " D"]) -> None:
        self.points, self._index, self._lengthscale = points, index, lengthscale

    @property
    def x(self) -> Float[Tensor, "n D"]:
        """The local places."""
        return self.points.x.to(self._lengthscale.device)

    @property
    def count(self) -> int:
        """N."""
        return self.points.num_rows

    def total(self, part: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.points.world.sum(part)

    def sample(self, count: int) -> Int[Tensor, " S"]:
        """Local rows among the first ones of the ordering."""
        return (self.points.positions < count).nonzero()[:, 0].to(self._lengthscale.device)

    def rows(self, numbers: Int[Tensor, " S"]) -> Int[Tensor, " R"]:
        """Local ones of some rows, given by their places in the data."""
        return torch.isin(cast(ShardedData, self.points).rows, numbers.cpu()).nonzero()[:, 0].to(numbers.device)

    def query(self, x_new: Float[Tensor, "P D"], num_neighbors: int) -> Near:
        """The nearest places of new points."""
        return Near(self.points, self._index.nearest(x_new.cpu(), num_neighbors))

    def fetch(
        self, x_new: Float[Tensor, "P D"], num_neighbors: int, values: Float[Tensor, "*L n"]
    ) -> tuple[Float[Tensor, "S D"], Float[Tensor, "*L S"]]:
        """The places nearest to any of some new points, and values there."""
        count = min(max(2, num_neighbors), self.count)  # two at least, since a table has as many
        numbers = self._index.nearest(x_new.detach().cpu(), count).unique().long()
        x, fetched = self.points.fetch(numbers, self.points.x, values.movedim(-1, 0).contiguous().cpu())
        return x.to(values), fetched.movedim(0, -1).to(values)

    def assign(self, centers: Int[Tensor, " M"]) -> Near:
        """Cells of the places nearest to some of them; of coinciding centers, only the first has members."""
        centers = centers.cpu()
        chosen = ShardedPoints(self.points.world, self.points.x[centers], self.points.positions[centers])
        cell = Near(chosen, ShardedIndex(chosen, self._lengthscale).nearest(self.points.x, 1))
        used = cell.sums(torch.ones(self.points.num_own)) > 0
        kept = ShardedPoints(chosen.world, chosen.x[used], chosen.positions[used])
        return Near(kept, cell.at(kept.first + used.long().cumsum(0) - 1)[:, None])

    def moved(self, members: Near, x: Float[Tensor, "M D"]) -> "ShardedPlaces":
        """The cells of :meth:`assign` at new places."""
        points = ShardedPoints(self.points.world, x.cpu(), members.points.positions)
        return ShardedPlaces(points, ShardedIndex(points, self._lengthscale), self._lengthscale)


Places: TypeAlias = WholePlaces | ShardedPlaces


def places_of(table: NeighborTable) -> Places:
    """The points of a table.

    Args:
        table: of all points, or of local rows on several processes.
    """
    if isinstance(table, ShardedTable):
        return ShardedPlaces(table.data, table.index, table.lengthscale)
    return WholePlaces(table)
