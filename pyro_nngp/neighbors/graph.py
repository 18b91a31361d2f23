"""Neighbor graphs: which points each point is conditioned on, kept with the points as a module of buffers.

Cost and symbols: as in :mod:`pyro_nngp.neighbors.table`.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from pyro_nngp._checks import check_same_kind, check_tensor, fail
from pyro_nngp.linalg.coarse_level import CoarseLevel
from pyro_nngp.linalg.level_scheduling import dependency_levels
from pyro_nngp.neighbors.search.correlation import FeatureMetric
from pyro_nngp.neighbors.search.on_device import Metric
from pyro_nngp.neighbors.table import NeighborTable, positions_in


class NeighborGraph(NeighborTable):
    """At most K nearest predecessors of each point in an ordering.

    Args:
        x: points (N, D), finite; exact duplicates are allowed.
        num_neighbors: K, in 1..N-1.
        ordering: "random" | "maximin" | "coordinate" | "principal" | "given", or a permutation (N,): the row at
            each position.
        seed: seed of the random ordering.
        metric: None is the Euclidean distance; a tensor of lengthscales, (D,) or scalar, divides the inputs first; a
            :class:`~pyro_nngp.kernels.KernelMetric` ranks by correlation; a callable (n, D), (m, D) -> (n, m) computes
            other distances (all of them, in blocks).
        neighbors: given rows (N, K) instead of a search: predecessors in the ordering, -1 padded. Such
            a graph cannot be refreshed or resized; the metric serves its queries.
        backend: backend of the search, see :class:`~pyro_nngp.neighbors.search.index.SearchIndex`.
        progress: whether a search of more than three seconds shows a progress bar.

    Attributes:
        x, order, neighbors, lengthscale: buffers, part of the ``state_dict``. Row i of `neighbors` holds the rows of x
            that x[i] is conditioned on, nearest first.

    Raises:
        ValueError, TypeError: for malformed points, K out of range, or neighbors that do not precede their point.
    """

    _levels: list[Tensor] | None = None
    _coarse: CoarseLevel | None = None

    def __init__(
        self,
        x: Float[Tensor, "N D"],
        num_neighbors: int,
        ordering: str | Int[Tensor, " N"] = "random",
        *,
        seed: int = 0,
        metric: Float[Tensor, " *D"] | Metric | FeatureMetric | None = None,
        neighbors: Int[Tensor, "N K"] | None = None,
        backend: str = "auto",
        progress: bool = True,
    ) -> None:
        super().__init__(x, num_neighbors, ordering, seed=seed, metric=metric, backend=backend, progress=progress)
        self._given = neighbors is not None
        if neighbors is None:
            neighbors = self.find_neighbors(num_neighbors)
        else:
            _check_neighbors(neighbors, self.order, num_neighbors)
            neighbors = neighbors.clone()
        self.register_buffer("neighbors", neighbors)

    def levels(self) -> list[Int[Tensor, " _"]]:
        """Rows by dependency level: level 0 has no neighbors; any other row is one level above its highest neighbor."""
        if self._levels is None:
            self._levels = dependency_levels(self.neighbors)
        return self._levels

    def coarse_level(self) -> CoarseLevel:
        """The first points, as a preconditioner."""
        if self._coarse is None:
            self._coarse = CoarseLevel(self.x, self.neighbors)
        return self._coarse

    def find_neighbors(self, k: int) -> Int[Tensor, "N k"]:
        if self._given:
            cure = "Give no neighbors at construction to have them searched."
            fail("NeighborGraph", "neighbors", "to come from a search", "the user's own", cure)
        index, positions = self._searcher()
        return self._rows(index.predecessors(k)[0])[positions]

    def _with_appended(self, old: int, k: int) -> Int[Tensor, "N k"]:
        kept = pad(self.neighbors, (0, k - self.num_neighbors), value=-1)
        return torch.cat([kept, self._neighbors_from(old, k)])

    def _neighbors_from(self, start: int, k: int) -> Int[Tensor, "R k"]:
        """Neighbors of the rows from `start`, which are the last ones of the ordering."""
        index, positions = self._searcher()
        return self._rows(index.predecessors(k, start)[0])[positions[start:] - start]

    def _invalidate(self) -> None:
        super()._invalidate()
        self._levels, self._coarse = None, None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_levels": None, "_coarse": None}


def _check_neighbors(neighbors: Tensor, order: Tensor, k: int) -> None:
    where, n = "NeighborGraph", len(order)
    check_tensor(where, "neighbors", neighbors)
    if neighbors.shape != (n, k) or neighbors.dtype != torch.int64:
        actual = f"{neighbors.dtype} of shape {tuple(neighbors.shape)}"
        fail(where, "neighbors", f"to be int64 of shape ({n}, {k})", actual, "Give rows of x, padded with -1.")
    check_same_kind(where, ordering=order, neighbors=neighbors)
    rank = positions_in(order)
    real = neighbors >= 0
    if neighbors.min() < -1 or neighbors.max() >= n or (real[:, 1:] & ~real[:, :-1]).any():
        fail(where, "neighbors", f"in 0..{n - 1} with -1 at the end of a row only", "other entries", "Pad with -1.")
    late = real & (rank[neighbors.clamp(min=0)] >= rank[:, None])
    if late.any():
        row = int(late.any(-1).nonzero()[0])
        fail(where, "neighbors", "to precede their point in the ordering", f"others in row {row}", "Order first.")
    ordered = neighbors.sort(dim=-1).values
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        fail(where, "neighbors", "without repeats in a row", "a row with repeats", "Give each neighbor once.")
