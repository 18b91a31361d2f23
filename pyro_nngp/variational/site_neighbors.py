"""Neighbors that moments under Gaussian sites depend on: how many, which, and the observations pooled around them.

Variances at the points of the graph take the 64 nearest pseudo-observations, or K of them if 64 do not lower the
variances by a tenth. Predictions take 64 nearest points, or more where that lowers their variances.

Symbols: N points, K neighbors, L latent functions, B points of a trial.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._versions import Versions
from pyro_nngp.bound import Bound
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.linalg.nested_dissection import Elimination
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.neighbors.choice_of_k import MOST_NEIGHBORS, ONE_SCORE, NeighborTrial, rows_to_try
from pyro_nngp.variational.factored_posterior import FactoredPosterior, elimination_of
from pyro_nngp.variational.natural_gradient import average
from pyro_nngp.variational.pooled_places import places_of
from pyro_nngp.variational.pooling import PooledObservations

_NEIGHBORS = 64  # that moments depend on by default
_LARGER = 3.0  # times as many operations may be too many where there was an order for another graph
_SMALLER = 0.1  # relative decrease of variances that justifies more neighbors


def variance_neighbors(kernel: Covariance, graph: NeighborGraph, noise: Float[Tensor, "*L N"], jitter: float) -> Any:
    """The pseudo-observations that the variance at each point of a graph depends on, as its places return them.

    Args:
        kernel: bound.
        graph: the points.
        noise: variances of the pseudo-observations.
        jitter: relative nugget.
    """
    few, most = graph.num_neighbors, max(graph.num_neighbors, min(graph.num_rows, _NEIGHBORS))
    places = places_of(graph)
    some = places.x[places.rows(rows_to_try(graph.num_rows, graph.x.device))]

    def log_variance(k: int) -> Tensor:
        pooled = PooledObservations(kernel, graph, noise, k, jitter)
        return average(pooled.variance(kernel, some, places.query(some, k), noise).log(), graph.total)

    enough = few == most or log_variance(few) - log_variance(most) < _SMALLER
    return places.query(places.x, few if enough else most)


def prediction_range(graph: NeighborGraph, is_solved: bool) -> tuple[int, int]:
    """Smallest and largest number of nearest points in predictions; before a solution for the sites they are equal."""
    first, most = max(_NEIGHBORS, graph.num_neighbors), min(MOST_NEIGHBORS, graph.num_rows - 1)
    few = min(graph.num_rows, first)
    return (first, most) if first < most and is_solved else (few, few)


def enough_for_predictions(
    trial: NeighborTrial,
    first: int,
    cov: Covariance,
    x: Float[Tensor, "N D"],
    variance: Float[Tensor, "*L B"],
    bound: Bound,
) -> int:
    """Number of nearest points, doubled from `first` while predictive variances fall by more than 1 % on average.

    Args:
        trial: points at which numbers are compared.
        first: the first number.
        cov: covariance function in double precision: many neighbors without noise are ill-conditioned.
        x: all points, in double precision.
        variance: posterior variances at the points of the trial.
        bound: the hyperparameters.
    """

    def scores(near: Int[Tensor, "B k"]) -> tuple[Tensor]:
        left = graph_conditional(cov, x[trial.rows], x, near, jitter=bound.jitter)[1]
        return ((variance + left).log(),)

    return trial.choose_k(scores, first, ONE_SCORE, bound.versions)


class NeighborCache:
    """Results computed from the neighbors of a graph, kept until they change; copies and pickles start empty.

    Attributes:
        last: the posterior of the last evaluation of the bound, for the next one.
    """

    _too_large: tuple[int, ...] | None = None  # N and K of a graph without an order

    def __init__(self) -> None:
        self.last: FactoredPosterior | None = None
        self._nearest: Any = None
        self._plan: tuple[Elimination | None] | None = None
        self._had_plan = False
        self._pooled: tuple[tuple[int, Versions | None], PooledObservations] | None = None

    def forget(self) -> None:
        """Drop everything."""
        self._nearest, self._pooled, self._plan, self.last = None, None, None, None

    def nearest(self, find: Callable[[], Any]) -> Any:
        """The neighbors that `find` returned at the first call since the last :meth:`forget`."""
        if self._nearest is None:
            self._nearest = find()
        return self._nearest

    def plan(self, graph: NeighborGraph, num_coupled: int | None = None) -> Elimination | None:
        """The order of elimination for the posterior precision; None where there is none, see the function.

        Where there was none, there is none for another graph of that size: finding out takes seconds. Where there was
        one, it may take more operations for another graph: training would go on with draws.
        """
        size = tuple(graph.neighbors.shape)
        if self._plan is None:
            larger = _LARGER if self._had_plan else 1.0
            self._plan = (None if size == self._too_large else elimination_of(graph, num_coupled, larger),)
            self._had_plan = self._plan[0] is not None
            self._too_large = None if self._had_plan else size
        return self._plan[0]

    @torch.inference_mode(False)  # later gradients need what is kept
    @torch.no_grad()
    def pooled(
        self, bound: Bound, graph: NeighborGraph, noise: Float[Tensor, "*L N"], num_neighbors: int
    ) -> PooledObservations:
        """Pooled observations, kept while the method and the number of neighbors are unchanged.

        All processes must call it at the same time.

        Args:
            bound: the hyperparameters.
            graph: the points.
            noise: variances of the observations.
            num_neighbors: in the variances.
        """
        key = num_neighbors, bound.versions
        is_new = self._pooled is None or bound.versions is None or self._pooled[0] != key
        if graph.total(torch.tensor(float(is_new))) or self._pooled is None:  # of any process
            pooled = PooledObservations(bind(bound.kernel), graph, noise.clone(), num_neighbors, bound.jitter)
            self._pooled = key, pooled
        return self._pooled[1]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return NeighborCache, ()
