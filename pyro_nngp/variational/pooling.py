r"""Posterior variances from pseudo-observations near a point, pooled where single ones are too noisy to suffice.

The variance of f given the K nearest of N noisy observations is an upper bound of that given all of them. It is close
where noise is small, since near observations screen off far ones. Where noise is large, many more than K observations
matter. Pooling combines all observations of a cell into one: their mean, weighted by precisions :math:`\tau_i`,
observes f at the weighted mean z of their inputs with the noise variance

.. math:: \frac{1}{\sum_i \tau_i} + \frac{\sum_i \tau_i E\,(f(x_i) - f(z))^2}{\sum_i \tau_i},

the second term an upper bound (Jensen's inequality) of the variance added by moving to one place. So K cells cover as
much as many times K points. Cells are those of a random subset of the points as centers; the pooling factors are 4, 16,
.., as long as they make variances smaller, and the least of all variances is taken for each new point.

Measured at 200 points among 3,000 on the unit square (Matern-3/2, lengthscale .15, unit variance): with noise variance
5 the standard deviation is 1.04 times the exact one from 60 single neighbors and 1.01 times with pooling; with 1 and
less both are within 2 %.

Cost: O(N log N) to pool, once; O(P K^3) for each pooling factor that is in use.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.neighbors import NearestOthers, NeighborTable

_FACTOR = 4  # points per cell, and its growth from one level to the next
_PROBES = 256  # points at which levels are compared
_WORSE = 1.05  # a level whose average variance exceeds the least one by this factor ends the pooling


@dataclass(frozen=True)
class Cells:
    """Pooled observations: a table of their places, and for each its precision and the variance of the move."""

    table: NeighborTable
    noise: Float[Tensor, "*L M"]


class PooledObservations:
    """Noisy observations of a process at the points of a table, at all useful levels of pooling.

    Args:
        kernel: covariance function, bound.
        table: the points.
        noise: variances of the observations, (N,), or (L, N) for L latent functions.
        num_neighbors: K.
        jitter: relative nugget.
        seed: seed of the cells.
    """

    def __init__(
        self,
        kernel: Any,
        table: NeighborTable,
        noise: Float[Tensor, "*L N"],
        num_neighbors: int,
        jitter: float | None = None,
        seed: int = 0,
    ) -> None:
        self._table, self._jitter = table, jitter
        self._levels: list[Cells] = []
        if table.num_points <= _FACTOR * num_neighbors:
            return
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(table.num_points, generator=generator).to(table.x.device)
        probes = table.x[order[:_PROBES]]
        least = self.variance(kernel, probes, table.query(probes, num_neighbors), noise).mean()
        centers = table.num_points // _FACTOR
        while centers > num_neighbors:
            self._levels.append(_cells(kernel, table, noise, order[:centers]))
            now = self._given(kernel, probes, self._levels[-1], num_neighbors).mean()
            if now > _WORSE * least:
                break
            least, centers = torch.minimum(least, now), centers // _FACTOR

    def variance(
        self, kernel: Any, x_new: Float[Tensor, "P D"], nearest: Int[Tensor, "P K"], noise: Float[Tensor, "*L N"]
    ) -> Float[Tensor, "*L P"]:
        """Posterior variances of f at new points.

        Args:
            kernel: covariance function.
            x_new: new points.
            nearest: rows of their nearest points.
            noise: variances of the observations.
        """
        _, var = graph_conditional(kernel, x_new, self._table.x, nearest, noise, self._jitter)
        for cells in self._levels:
            var = torch.minimum(var, self._given(kernel, x_new, cells, nearest.shape[1]))
        return var

    def _given(self, kernel: Any, x_new: Tensor, cells: Cells, num_neighbors: int) -> Tensor:
        near = cells.table.query(x_new, min(num_neighbors, cells.table.num_points))
        return graph_conditional(kernel, x_new, cells.table.x, near, cells.noise, self._jitter)[1]


def _cells(kernel: Any, table: NeighborTable, noise: Tensor, centers: Int[Tensor, " M"]) -> Cells:
    """Pool all observations by the nearest of the given centers."""
    cell = _table(table, table.x[centers]).query(table.x, 1)[:, 0]
    used, cell = cell.unique(return_inverse=True)  # of coinciding centers, only the first gets observations
    shape, precision = (*noise.shape[:-1], len(used)), 1 / noise
    weight = precision.reshape(-1, table.num_points).mean(0)  # weights of the places, common to all latent functions

    def pooled(values: Tensor, size: tuple[int, ...]) -> Tensor:
        return values.new_zeros(size).index_add_(-1, cell, values)

    place = (pooled((weight[:, None] * table.x).mT, (table.x.shape[1], len(used))) / pooled(weight, shape[-1:])).mT
    here, there = table.x[:, None], place[cell][:, None]
    moved = (kernel(here, here) + kernel(there, there) - 2 * kernel(here, there))[:, 0, 0].clamp(min=0)
    return Cells(_table(table, place), (1 + pooled(precision * moved, shape)) / pooled(precision, shape))


def _table(like: NeighborTable, points: Tensor) -> NearestOthers:
    return NearestOthers(points, 1, metric=like.metric, progress=False)
