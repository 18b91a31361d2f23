"""Nearest neighbors among the rows of all processes, the same as in one search over all rows.

Each process searches its local rows first. The distance of the k-th of them bounds what is worth asking: a place goes
to every process whose box of points it is nearer to, and the answers are merged by distance, ties by place in the
ordering. Distances are float64 of the same scaled coordinates on each process, and the distance to a box is computed as
distances to points are, so that rounding cannot exclude a neighbor.

Cost: a search among the local rows, and one for each place that is sent; in blocks, so that memory is O(block * k).
Symbols: Q places, k neighbors, R processes, D inputs.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from pyro_nngp.distributed.points import ShardedPoints
from pyro_nngp.distributed.world import Route
from pyro_nngp.neighbors import SearchIndex
from pyro_nngp.neighbors.symmetric import select_parents

_BLOCK = 2**22  # neighbors searched at a time


class ShardedIndex:
    """A search index over the rows of all processes; all of them must build it, and call it, at the same time.

    Args:
        data: the rows.
        lengthscale: what inputs are divided by, (D,).
    """

    def __init__(self, data: ShardedPoints, lengthscale: Float[Tensor, " D"]) -> None:
        self._data, self._lengthscale = data, lengthscale.cpu()
        self._points = self.scaled(data.x)
        if data.num_own:
            self._index = SearchIndex(self._points, backend="auto", progress=False)
            box = torch.stack([self._points.amin(0), self._points.amax(0)])
        else:  # infinitely far from everything
            box = self._points.new_tensor([[torch.inf], [-torch.inf]]).expand(2, self._points.shape[1])
        self._boxes = data.world.gather(box[None])  # (R, 2, D)

    def scaled(self, x: Float[Tensor, "Q D"]) -> Float[Tensor, "Q D"]:
        """Points over the lengthscales, as :class:`~pyro_nngp.neighbors.NeighborTable` divides them."""
        return x.double() / self._lengthscale.double()

    def predecessors(self, k: int) -> Int[Tensor, "n k"]:
        """Numbers of the k nearest rows that precede each local row in the ordering, -1 padded."""
        return self._in_blocks(self._points, k, self._data.positions, None)[0]

    def others(self, k: int, rows: Int[Tensor, " B"] | None = None) -> Int[Tensor, "B k"]:
        """Numbers of the k nearest rows other than each local row, or than each of some local rows."""
        rows = torch.arange(self._data.num_own) if rows is None else rows.cpu()
        return self._in_blocks(self._points[rows], k, None, rows)[0]

    def nearest(self, x: Float[Tensor, "Q D"], k: int) -> Int[Tensor, "Q k"]:
        """Numbers of the k nearest rows of any places, different ones on each process."""
        return self._in_blocks(self.scaled(x), k, None, None)[0]

    def parents(self, k: int) -> Int[Tensor, "n k"]:
        """Numbers of at most k parents of each local row in a symmetric graph of all rows, -1 padded.

        The rule is as in :class:`~pyro_nngp.neighbors.SymmetricGraph`.
        """
        data = self._data
        numbers, distance, near = self._in_blocks(self._points, k, None, torch.arange(data.num_own), True)
        own = torch.arange(data.num_own)[:, None].expand_as(near)
        is_later = near > data.positions[own]  # of the edge from this row, on the process that has it
        route = Route(data.world, data.owners(numbers[is_later]))
        here = own[~is_later], near[~is_later], distance[~is_later]
        there = numbers[is_later].long(), data.positions[own[is_later]], distance[is_later]
        child, parent, length = (route.forward(part) for part in there)
        edges = tuple(map(torch.cat, zip(here, (child - data.first, parent, length), strict=True)))
        earlier, lengths, places = self._in_blocks(self._points, k, data.positions, None, True)
        parents = select_parents(cast(Any, edges), (places, lengths), data.num_rows)
        ends = [(numbers, near), (earlier, places), (route.forward(own[is_later] + data.first), parent)]
        names, keys = (torch.cat([part.flatten() for part in parts]) for parts in zip(*ends, strict=True))
        order = keys.argsort()
        name = names[order][torch.searchsorted(keys[order], parents.clamp(min=0)).clamp(max=len(order) - 1)]
        return torch.where(parents < 0, -1, name)

    def _in_blocks(
        self, places: Tensor, k: int, before: Tensor | None, without: Tensor | None, everything: bool = False
    ) -> list[Tensor]:
        """Numbers searched in blocks, as many on each process; with `everything` also distances and positions."""
        data, size = self._data, max(1, _BLOCK // k)
        nearest = [places.new_empty((len(places), k), dtype=torch.int32 if data.num_rows < 2**31 else torch.int64)]
        if everything:
            nearest += [places.new_empty((len(places), k)), places.new_empty((len(places), k), dtype=torch.int64)]
        for block in range(data.world.max(-(-len(places) // size))):
            rows = slice(block * size, (block + 1) * size)
            parts = (None if part is None else part[rows] for part in (before, without))
            value, positions, numbers = self._search(places[rows], k, *parts)
            for whole, part in zip(nearest, (numbers, value, positions), strict=False):
                whole[rows] = part.to(whole.dtype)
        return nearest

    def _search(self, places: Tensor, k: int, before: Tensor | None, without: Tensor | None) -> list[Tensor]:
        """Distances, positions and numbers of the k nearest rows.

        Args:
            places: scaled places (Q, D).
            k: number of neighbors.
            before: only rows with smaller positions count, (Q,); None is no limit.
            without: local row to leave out for each place, (Q,); None is none.
        """
        world = self._data.world
        best = self._own(places, k, before, without)
        for distance in range(1, world.size):
            other = (world.rank + distance) % world.size
            asked = (self._to_box(places, other) <= best[0][:, -1]).nonzero()[:, 0]
            route = Route(world, torch.full_like(asked, other))
            there = route.forward(places[asked])
            limit = None if before is None else route.forward(before[asked])
            answers = [route.back(part) for part in self._own(there, k, limit, None)]
            merged = _merged([part[asked] for part in best], answers)
            for part, better in zip(best, merged, strict=True):
                part[asked] = better
        return best

    def _own(self, places: Tensor, k: int, before: Tensor | None, without: Tensor | None) -> list[Tensor]:
        """Distances, positions and numbers of the k nearest local rows, (Q, k) each; infinity and -1 for none."""
        data = self._data
        if not data.num_own:
            none = torch.full((len(places), k), -1)
            return [places.new_full(none.shape, torch.inf), none, none.clone()]
        if before is not None:
            limit = torch.searchsorted(data.positions, before)
            index, value = self._index.nearest_before(places, limit, k)
        elif not len(places):
            index, value = places.new_empty((0, k), dtype=torch.int64), places.new_empty((0, k))
        else:
            most = min(k, data.num_own - (without is not None))
            index, value = self._index.nearest(places, most, without) if most else (places[:, :0].long(), places[:, :0])
            index = pad(index, (0, k - most), value=-1)
            value = pad(value, (0, k - most), value=torch.inf)
        positions = torch.where(index < 0, -1, data.positions[index.clamp(min=0)])
        return [value, positions, torch.where(index < 0, -1, index + data.first)]

    def _to_box(self, places: Tensor, rank: int) -> Float[Tensor, " Q"]:
        """Squared distances to the box of the points of a process, summed as distances to points are."""
        low, high = self._boxes[rank]
        total = places.new_zeros(len(places))
        for column, (below, above) in enumerate(zip(low, high, strict=True)):
            gap = torch.maximum(below - places[:, column], places[:, column] - above).clamp(min=0)
            total += gap * gap
        return total


def _merged(one: list[Tensor], two: list[Tensor]) -> list[Tensor]:
    """The k nearest of two sets of neighbors, each with distances, positions and numbers."""
    value, positions, numbers = (torch.cat(parts, -1) for parts in zip(one, two, strict=True))
    by_position = positions.argsort(dim=-1)
    nearest = value.gather(-1, by_position).argsort(dim=-1, stable=True)[:, : one[0].shape[1]]
    order = by_position.gather(-1, nearest)
    return [part.gather(-1, order) for part in (value, positions, numbers)]
