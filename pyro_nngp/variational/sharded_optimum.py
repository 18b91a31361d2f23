r"""The covariance factor of :mod:`pyro_nngp.variational.sparse_factor` for rows on several processes.

Each process computes the columns of R of its local rows. Column c takes the prior's precision
:math:`\Lambda = \sum_k b_k b_k^\top` on its support :math:`S_c`, the rows that have c in their pattern: so it takes the
conditionals :math:`b_k` of all rows k that are in :math:`S_c`, or have a neighbor there. These rows follow from the
neighbors. Their conditionals are fetched once, then the precisions of the sites before the columns are computed, and
the entries of R go back to the processes of their rows.

Cost: as of one process for the local columns. Symbols: n local rows, m rows that their columns take, K neighbors, P
columns beside the diagonal in each row, L latent functions, R processes.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.distributed.factor import ShardedFactor
from pyro_nngp.distributed.halo import Halo
from pyro_nngp.distributed.world import Route
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.variational.sparse_factor import FactorLimits, FactorOptimum

_PAIRS = 2**22  # pairs of row and process held at once


class ShardedFactorOptimum:
    """Optimal factors on one pattern; all processes must build it, and call it, at the same time.

    Args:
        prior: (I - A, V) of the prior; its graph has the neighbors of the halo's rows as well.
        pattern: places of the columns of R beside the diagonal in local rows (n, P), -1 padded: the first neighbors.
        limits: as of :class:`~pyro_nngp.variational.sparse_factor.FactorOptimum`.
    """

    def __init__(self, prior: ShardedFactor, pattern: Int[Tensor, "n P"], limits: FactorLimits | None = None) -> None:
        graph, self._num_own = prior.graph, prior.num_own
        self._halo = Halo(graph.data, _asked_rows(prior, pattern.shape[1]))
        near, columns = (graph.halo.numbers_at(part.cpu()) for part in (prior.neighbors, pattern))
        parts = prior.w.cpu(), prior.var.cpu(), near, columns
        w, var, near, columns = (self._halo.complete(part) for part in parts)
        columns = self._halo.places(columns)
        columns = torch.where(columns < self._num_own, columns, -1)
        local = VecchiaFactor(w, var, self._halo.places(near))
        self._optimum = FactorOptimum(local, columns, limits, self._num_own)

    def __len__(self) -> int:
        """m."""
        return self._num_own + len(self._halo)

    def __call__(self, tau: Float[Tensor, "*L n"]) -> tuple[Float[Tensor, "*L n"], Float[Tensor, "*L n P"]]:
        """Diagonal and off-diagonal entries of the local rows of R for the precisions of the sites at local rows."""
        every = self._halo.complete(tau.double().cpu().movedim(-1, 0).contiguous()).movedim(0, -1)
        scale, weights = (part.to(tau.device) for part in self._optimum(every))
        weights, n = weights.movedim(-2, 0).contiguous(), self._num_own
        entries = weights[:n] + self._halo.give_back(weights[n:])
        return scale[..., :n], entries.movedim(0, -2)


def _asked_rows(prior: ShardedFactor, num_columns: int) -> Int[Tensor, " h"]:
    """Numbers of the rows of other processes whose conditionals the local columns take.

    A row counts in the columns of its pattern, and in the columns of its neighbors' patterns.
    """
    graph, data = prior.graph, prior.graph.data
    ranks = torch.cat([torch.full((data.num_own,), data.world.rank), data.owners(graph.halo.numbers)])
    own = torch.arange(len(ranks))[:, None]
    columns = torch.cat([own, graph.neighbors[:, :num_columns].cpu()], -1).long()
    there = _distinct(torch.where(columns < 0, -1, ranks[columns.clamp(min=0)]))
    parts, size = [], max(1, _PAIRS // ((1 + prior.neighbors.shape[1]) * there.shape[1]))
    for first in range(0, data.num_own, size):
        rows = own[first : min(first + size, data.num_own)]
        near = torch.cat([rows, prior.neighbors[rows[:, 0]].cpu()], -1)
        reached = torch.where(near[..., None] < 0, -1, there[near.clamp(min=0)]).flatten(1)
        pairs = torch.stack([rows.expand_as(reached), reached], -1)[(reached >= 0) & (reached != data.world.rank)]
        parts.append(pairs.unique(dim=0))
    pairs = torch.cat(parts)
    return Route(data.world, pairs[:, 1]).forward(pairs[:, 0] + data.first)


def _distinct(values: Int[Tensor, "m P"]) -> Int[Tensor, "m Q"]:
    """The distinct values of each row, -1 padded."""
    ordered = values.sort(-1, descending=True).values
    ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]] = -1
    ordered = ordered.sort(-1, descending=True).values
    return ordered[:, : int((ordered >= 0).sum(-1).max())]
