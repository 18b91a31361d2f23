r"""Vecchia's approximation of a Gaussian process, or response nearest-neighbor Gaussian process.

With Gaussian noise the latent function can be integrated out, which leaves only hyperparameters. For an ordering of the
data, with n(j) the at most K nearest predecessors of point j (Vecchia 1988; the response model of Datta et al. 2016;
eq. 14 of Jankowiak and Pleiss 2021),

.. math:: \log p(y) = \sum_j \log p(y_j \mid y_{n(j)}),

a proper density, which for K = N-1 is that of the exact Gaussian process.

Differs from the papers: a mean function.

Cost per step: O(B K^3), independent of N.
"""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.models.base import GaussianResponseMethod, ResponseMethod, first_neighbors, rows_of
from pyro_nngp.neighbors import NeighborGraph


class Vecchia(GaussianResponseMethod):
    r"""Response nearest-neighbor Gaussian process: regression with Gaussian noise, f integrated out.

    Generative model, for an ordering of the data, with weights w and variances v computed from the kernel matrix plus
    noise variances on its diagonal:

    .. math:: y_j \mid y_{n(j)} \sim N\big(\mu(x_j) + w_j^\top (y_{n(j)} - \mu(x_{n(j)})),\, v_j + \sigma^2\big),
       \quad j = 1..N.

    Sites: ``y`` and one for each hyperparameter that has a prior, so NUTS on ``model`` samples the collapsed posterior.

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs of similar spread: independent functions of one kernel, and one noise.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern52 with one
            lengthscale per column. Unset hyperparameters start from the data (:mod:`pyro_nngp.models.base.starts`).
        likelihood: Gaussian; None makes one.
        num_neighbors: K; None is 32, doubled up to 128 where that lowers predictive variances by more than 10 %
            (:meth:`~pyro_nngp.models.base.NeighborChoice.choose_neighbors`).
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant.
        ordering: "random", "maximin", "coordinate", "principal", "given" or a permutation.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None is that of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights: of each row, as in :class:`~pyro_nngp.models.base.GPMethod`.
        seed: seed of the ordering.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, K out of range, a likelihood
            that is not Gaussian.

    Reference: Vecchia (1988), "Estimation and model identification for continuous spatial processes", JRSS B; Datta
    et al. (2016), "Hierarchical nearest-neighbor Gaussian process models for large geostatistical datasets", JASA.
    """

    @from_tables
    def __init__(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Float[Tensor, "N *T"] | Table,
        kernel: Any = None,
        likelihood: Likelihood | None = None,
        *,
        num_neighbors: int | None = None,
        mean: Callable | None = None,
        ordering: str | Int[Tensor, " N"] = "random",
        jitter: float | None = None,
        metric: Float[Tensor, " *D"] | Callable | None = None,
        start: Any = None,
        offset: Float[Tensor, "N *L"] | Table | None = None,
        weights: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(x, y, kernel, likelihood, mean, jitter, metric, start, offset=offset, weights=weights)
        self.graph = NeighborGraph(
            x, first_neighbors("Vecchia", num_neighbors, x), ordering, seed=seed, metric=self.neighbor_metric()
        )
        self.finish(self.choose_neighbors if num_neighbors is None else None)

    @pyro_entry
    def model(self, idx: Int[Tensor, " I"] | None = None) -> Tensor:
        """The densities of a batch of data (None: all) given their neighbors; returns their y."""
        self.start_model(idx)
        batch, (data, latents) = self.graph.batch(idx), self.plates(idx)
        obs, noise = self.observations(self.likelihood_at(batch.rows), batch.rows, None)
        own = rows_of(idx)
        loc, var = self._given_neighbors(self._inputs(idx), batch.rows, batch.neighbors, obs, noise, own)
        y = (
            self._bound().marginal(loc, var)
            if self.weights is None
            else dist.Normal(loc, (var + noise[..., batch.targets]).sqrt())
        )
        with latents, data:
            self.count_weights(batch.rows[batch.targets])
            return pyro.sample(self.site("y"), y, obs=self._values(idx))

    def _preceding(self) -> tuple[ResponseMethod, Tensor, Tensor]:
        """The first points in the ordering, or all of them, and the positions of their neighbors."""
        if self.shard is not None:
            view = self.at_numbers(self.shard.numbers_at(self._trend_points), ordered=True)
            return view, torch.arange(view.num_data, device=self.x.device), view.graph.neighbors
        rows = self.graph.order[: self._trend_points]
        places = torch.full_like(self.graph.order, -1)
        places[rows] = torch.arange(len(rows), device=rows.device)
        near = self.graph.neighbors[rows]
        return self, rows, torch.where(near < 0, -1, places[near])
