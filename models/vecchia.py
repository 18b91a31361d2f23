r"""Vecchia's approximation of a Gaussian process, or response nearest-neighbor Gaussian process.

With Gaussian noise the latent function can be integrated out, which leaves only hyperparameters. For an ordering of the
data, with n(j) the at most K nearest predecessors of point j (Vecchia 1988; the response model of Datta et al. 2016;
eq. 14 of Jankowiak and Pleiss 2021),

.. math:: \log p(y) = \sum_j \log p(y_j \mid y_{n(j)}),

a proper density, which for K = N-1 equals the exact Gaussian process, at the cost of one dense factor.

Differs from the papers: a mean function.

Cost per step: O(B K^3), independent of N; with M inducing points O(B (K^3 + K^2 M + M^2)), and for predictions
O(N (K^3 + K^2 M + M^2)) once (:mod:`pyro_nngp.models.base.low_rank`).
"""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
from jaxtyping import Float, Int
from pyro import poutine
from pyro.nn import pyro_method
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributed import ShardedData
from pyro_nngp.inducing.points import inducing_points
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.models.base.draws import Draw
from pyro_nngp.models.base.information import Information, of_conditionals
from pyro_nngp.models.base.low_rank import with_posterior, with_prior
from pyro_nngp.models.base.method import Method
from pyro_nngp.models.base.neighbor_choice import MOST_EXACT, first_neighbors
from pyro_nngp.models.base.posterior import Observed
from pyro_nngp.models.base.program import Program
from pyro_nngp.models.base.response import ResponseMethod, check_gaussian, count_weights, log_prob_of_rows
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.rows import Part


class Vecchia(ResponseMethod):
    r"""Response nearest-neighbor Gaussian process: regression with Gaussian noise, f integrated out.

    Generative model, for an ordering of the data, with weights w and variances v computed from the kernel matrix plus
    noise variances on its diagonal:

    .. math:: y_j \mid y_{n(j)} \sim N\big(\mu(x_j) + w_j^\top (y_{n(j)} - \mu(x_{n(j)})),\, v_j + \sigma^2\big),
       \quad j = 1..N.

    Sites: ``y`` and one for each hyperparameter that has a prior, so NUTS on ``model`` samples the collapsed posterior.

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs of similar spread: independent functions of one kernel, and one noise.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern of a
            learned smoothness, for labels and below 100 rows Matern52, with one lengthscale per column. Unset
            hyperparameters start from the data (:mod:`pyro_nngp.starts.from_data`).
        likelihood: Gaussian; None makes one.
        num_neighbors: K; None is N - 1, the exact process, up to 300 rows, else 32, doubled up to 128 where that lowers
            predictive variances by more than 10 %, of y or, in a few thousand rows at most, of f
            (:func:`~pyro_nngp.models.base.neighbor_choice.choose_neighbors`).
        inducing: number of inducing points of a low-rank part beside the neighbors, which then condition what it leaves
            (:mod:`pyro_nngp.models.base.low_rank`), at centers of k-means; or the points themselves. For functions
            that are smooth over long distances, or of many inputs. None or 0 is none. Of one output.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant.
        ordering: "random", "maximin", "coordinate", "principal", "given" or a permutation.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None takes the metric of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights: of each row, as in :class:`~pyro_nngp.models.base.Method`.
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
        inducing: int | Float[Tensor, "M D"] | None = None,
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
        check_gaussian(self)
        if inducing is not None and not (isinstance(inducing, int) and inducing == 0):
            self._take_inducing(inducing_points("Vecchia", x, inducing, seed))
        self._start(solves_coefficients=True)
        k = first_neighbors("Vecchia", num_neighbors, x, self._usual_neighbors(len(x)))
        self.graph = NeighborGraph(x, k, ordering, seed=seed, metric=self._neighbor_metric())
        if num_neighbors is None:
            self._choose_neighbors()

    @pyro_method
    def model(self, idx: Int[Tensor, " I"] | None = None) -> Tensor:
        """The densities of a batch of data (None: all) given their neighbors; returns their y.

        With inducing points the joint density of the batch.
        """
        program, batch = Program.model(self, idx), self.graph.batch(idx)
        if self._has_inducing:
            return self._joint_model(program, batch)
        posterior = self.posterior(program.bound)
        loc, var = posterior.given_neighbors(program.x, batch.rows, batch.neighbors, program.at)
        rows, (data, latents) = batch.rows[batch.targets], program.plates
        if self.weights is None:
            y: Any = program.bound.likelihood.marginal(loc, var)
        else:  # the noise variance of a row is the common one divided by its weight
            y = dist.Normal(loc, (var + posterior.observations(rows)[1]).sqrt())
        with latents, data:
            count_weights(program, rows)
            return pyro.sample(self.site("y"), y, obs=program.y, infer={"given_data": True})

    def _joint_model(self, program: Program, batch: Any) -> Tensor:
        """The density of the errors of a batch given their neighbors, which share the low-rank part."""
        errors, rows = Observed(self.rows, self.graph, with_prior(program.bound)), batch.rows[batch.targets]
        loc, var, features = errors.features_given_neighbors(batch.targets, batch.rows, batch.neighbors, program.at)
        spread = var + errors.observations(rows)[1]
        loc = loc.double() if loc.dim() == 1 else loc.double().unsqueeze(-2)  # the data are the event
        y = dist.LowRankMultivariateNormal(loc, features.double(), spread.double())
        with program.plates[0]:
            count_weights(program, rows)
        with poutine.scale(scale=self.num_data / len(rows)):
            return pyro.sample(self.site("y"), y, obs=program.y.double(), infer={"given_data": True})

    @pyro_method
    def guide(self, idx: Int[Tensor, " I"] | None = None) -> None:
        """The guide of the hyperparameters; nothing else is latent."""
        Program.guide(self, idx)

    def posterior(self, bound: Any, draw: Draw | None = None, part: Part | None = None) -> Observed:
        """f given the observations of its neighbors, and with inducing points of all data."""
        if bound.others.get("z") is not None:
            bound = with_posterior(self, bound)
        return super().posterior(bound, draw, part)

    def _information(self) -> Information | str:
        """Covariance of the estimates of hyperparameters, from the information of the conditional densities."""
        if self._has_inducing:
            return "no interval with inducing points"
        return of_conditionals(self)

    def log_prob(self, batch_size: int = 1024) -> Float[Tensor, ""]:
        """Log density of all data, with hyperparameters that have a prior at the median of their guide.

        Args:
            batch_size: number of rows at a time; with inducing points all rows are taken at once.

        Returns:
            The sum over all rows, of all processes, of the log density that ``model`` gives them.

        Cost: O(N K^3); with M inducing points O(N (K^3 + K^2 M + M^2)).
        """
        return log_prob_of_rows(self, self.num_data if self._has_inducing else batch_size)

    def _take_inducing(self, z: Float[Tensor, "M D"]) -> None:
        """Take inducing points, which are not trained."""
        if self.latent_shape:
            cure = "Build one model per output."
            fail("Vecchia", "inducing", "None with several outputs", tuple(z.shape), cure, NotImplementedError)
        self.register_buffer("z", z.detach().clone())
        self._points = ("z",)

    @property
    def _has_inducing(self) -> bool:
        return bool(self._points)

    @property
    def _maps_draws(self) -> bool:
        return not self._has_inducing and super()._maps_draws

    def _usual_neighbors(self, num_rows: int) -> int:
        is_exact = num_rows <= MOST_EXACT and not self._has_inducing
        return MOST_EXACT if is_exact else super()._usual_neighbors(num_rows)

    def _distribute(self, data: ShardedData, choose: bool) -> None:
        if self._has_inducing:
            cure = "Train on one process, or leave inducing out."
            fail("Vecchia", "inducing", "None on several processes", tuple(self.z.shape), cure, NotImplementedError)
        super()._distribute(data, choose)

    def _repeat_targets(self, where: str, y: Tensor) -> Tensor:
        if self._has_inducing:
            return Method._repeat_targets(self, where, y)  # raises
        return super()._repeat_targets(where, y)
