"""The nearest other points of each point, for leave-one-out densities, which need no ordering.

Cost: one search per row, when batches ask for it; O(N (K + D)) memory. Symbols: as in
:mod:`pyro_nngp.neighbors.table`.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.neighbors.table import NeighborTable

QUICK = 2**20  # number of coordinates up to which all rows are searched at once, in about a second
_FRACTION = 8  # all rows are searched once one in this many has been


class NearestOthers(NeighborTable):
    """The K nearest *other* points of each point.

    Exact duplicates of a point count as others. It does not define a prior (:class:`~pyro_nngp.distributions.NNGP`
    needs predecessors). Of points at equal distance those nearest to the front of a random order are taken, so that
    sorted files do no harm if many rows coincide.

    After construction or a refresh all entries of `neighbors` are -1. Up to 2^20 coordinates, the first batch has all
    rows searched: rows that lie close together share the search, which takes down to a third of the time of separate
    batches. Of larger tables only the rows that a batch asks for are searched, so that a short run on many rows does
    not cost O(N^2) where D is large; once they are an eighth of all, the rest follows at once.

    Args:
        x: points (N, D), finite; exact duplicates are allowed.
        num_neighbors: K, in 1..N-1.
        seed: seed of the order that breaks ties.
        options: further arguments of :class:`NeighborTable`, such as `metric` and `backend`.
    """

    def __init__(self, x: Float[Tensor, "N D"], num_neighbors: int, *, seed: int = 0, **options: Any) -> None:
        super().__init__(x, num_neighbors, seed=seed, **options)
        self.register_buffer("neighbors", self.find_neighbors(num_neighbors))

    def _neighbors_of(self, idx: Tensor | None) -> Tensor:
        first = self.neighbors[:, 0] if idx is None else self.neighbors[:, 0].index_select(0, idx)
        missing = first < 0
        if missing.any():
            new = missing.nonzero()[:, 0]
            new = self._worth_searching(new if idx is None else idx[new])
            self.neighbors[new] = self.others(idx=new)
        return super()._neighbors_of(idx)

    def _worth_searching(self, new: Tensor) -> Tensor:
        """Rows to search now: the ones asked for, or all that have no neighbors yet."""
        missing = (self.neighbors[:, 0] < 0).nonzero()[:, 0]
        searched = self.num_points - len(missing) + len(new)
        return missing if self.x.numel() <= QUICK or _FRACTION * searched >= self.num_points else new

    def find_neighbors(self, k: int) -> Tensor:
        return torch.full((self.num_points, k), -1, device=self.x.device)
