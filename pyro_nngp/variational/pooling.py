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

import copy
from collections.abc import Sequence
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
    """Pooled observations: a table of their places, the noise variance of each, and the cell of each observation."""

    table: NeighborTable
    noise: Float[Tensor, "*L M"]
    members: Int[Tensor, " N"]


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
            near = _nearest(self._levels[-1], probes, num_neighbors)
            now = self._given(kernel, probes, self._levels[-1], near).mean()
            if now > _WORSE * least:
                break
            least, centers = torch.minimum(least, now), centers // _FACTOR

    def variance(
        self,
        kernel: Any,
        x_new: Float[Tensor, "P D"],
        nearest: Int[Tensor, "P K"],
        noise: Float[Tensor, "*L N"],
        plan: Sequence[Int[Tensor, "P k"]] | None = None,
    ) -> Float[Tensor, "*L P"]:
        """Posterior variances of f at new points.

        Args:
            kernel: covariance function.
            x_new: new points.
            nearest: rows of their nearest points.
            noise: variances of the observations.
            plan: from :meth:`plan`; None finds it.
        """
        plan = self.plan(x_new, nearest.shape[1]) if plan is None else plan
        _, var = graph_conditional(kernel, x_new, self._table.x, nearest, noise, self._jitter)
        for cells, near in zip(self._levels, plan, strict=True):
            var = torch.minimum(var, self._given(kernel, x_new, cells, near))
        return var

    def plan(self, x_new: Float[Tensor, "P D"], num_neighbors: int) -> list[Int[Tensor, "P k"]]:
        """The nearest cells of new points, at each level: they depend on neither the kernel nor the noise."""
        return [_nearest(cells, x_new, num_neighbors) for cells in self._levels]

    def at_noise(self, kernel: Any, noise: Float[Tensor, "*L N"]) -> "PooledObservations":
        """The same cells at the same places, for other noise variances: no search.

        Args:
            kernel: covariance function.
            noise: variances of the observations.
        """
        found = copy.copy(self)
        found._levels = [_pooled(kernel, self._table, noise, cells.table, cells.members) for cells in self._levels]
        return found

    def _given(self, kernel: Any, x_new: Tensor, cells: Cells, near: Tensor) -> Tensor:
        return graph_conditional(kernel, x_new, cells.table.x, near, cells.noise, self._jitter)[1]


def _cells(kernel: Any, table: NeighborTable, noise: Tensor, centers: Int[Tensor, " M"]) -> Cells:
    """Pool all observations by the nearest of the given centers."""
    cell = _table(table, table.x[centers]).query(table.x, 1)[:, 0]
    used, cell = cell.unique(return_inverse=True)  # of coinciding centers, only the first gets observations
    weight = (1 / noise).reshape(-1, table.num_points).mean(0)  # of the places, common to all latent functions
    place = _sums((weight[:, None] * table.x).mT, cell, len(used)) / _sums(weight, cell, len(used))
    return _pooled(kernel, table, noise, _table(table, place.mT), cell)


def _pooled(kernel: Any, table: NeighborTable, noise: Tensor, places: NeighborTable, cell: Int[Tensor, " N"]) -> Cells:
    """Cells at given places."""
    precision, here, there = 1 / noise, table.x[:, None], places.x[cell][:, None]
    moved = (kernel(here, here) + kernel(there, there) - 2 * kernel(here, there))[:, 0, 0].clamp(min=0)
    count = places.num_points
    return Cells(places, (1 + _sums(precision * moved, cell, count)) / _sums(precision, cell, count), cell)


def _sums(values: Float[Tensor, "*L N"], cell: Int[Tensor, " N"], count: int) -> Float[Tensor, "*L M"]:
    """Sums over the members of each of the cells."""
    return values.new_zeros(*values.shape[:-1], count).index_add_(-1, cell, values)


def _nearest(cells: Cells, x_new: Tensor, num_neighbors: int) -> Int[Tensor, "P k"]:
    return cells.table.query(x_new, min(num_neighbors, cells.table.num_points))


def _table(like: NeighborTable, points: Tensor) -> NearestOthers:
    return NearestOthers(points, 1, metric=like.metric, progress=False)
