"""The nearest other points of each point, for leave-one-out densities, which need no ordering.

Cost: one search per row, when a batch first asks for it; O(N (K + D)) memory. Symbols: as in
:mod:`pyro_nngp.neighbors.table`.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.neighbors.table import NeighborTable


class NearestOthers(NeighborTable):
    """The K nearest *other* points of each point.

    Exact duplicates of a point count as others. It does not define a prior (:class:`~pyro_nngp.distributions.NNGP`
    needs predecessors). Of points at equal distance those nearest to the front of a random order are taken, so that
    sorted files do no harm if many rows coincide.

    A row is searched when a batch first asks for it after construction or a refresh, so that neither costs O(N^2) where
    D is large; until then its entries in `neighbors` are -1.

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
        first = self.neighbors[:, 0] if idx is None else self.neighbors[idx, 0]
        new = (first < 0).nonzero()[:, 0]
        if len(new):
            new = new if idx is None else idx[new]
            self.neighbors[new] = self.others(idx=new)
        return super()._neighbors_of(idx)

    def find_neighbors(self, k: int) -> Tensor:
        return torch.full((self.num_points, k), -1, device=self.x.device)
