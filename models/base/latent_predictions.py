"""Predictions and scores of methods with q(u): from the inducing values nearest to a point, at the data or elsewhere.

Symbols: N data points, M inducing points, K neighbors, P new points, B points of a batch.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._rows import values_at
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributed import ShardedTable
from pyro_nngp.distributions import NNGP, SparseCholeskyNormal
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.kernels import bind, bind_double
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.models.base.evidence import has_evidence, log_density_given
from pyro_nngp.models.base.leave_one_out import Densities, Draw
from pyro_nngp.models.base.neighbor_choice import NeighborChoice, typical_noise
from pyro_nngp.models.base.response import draws_given_observations
from pyro_nngp.models.base.sharded_latents import ShardedLatents
from pyro_nngp.neighbors import NeighborGraph, distinct_rows
from pyro_nngp.neighbors.numbers import MOST_NEIGHBORS, WORTHWHILE, NeighborTrial
from pyro_nngp.variational import (
    AmortizedGaussian,
    GaussianSites,
    InducingLeaveOneOut,
    LatentLeaveOneOut,
    prior_factor,
    scattered,
)

_DRAW_BUDGET = 2**27  # values held at once while joint draws are streamed
_LOO_NEIGHBORS = 64  # for leave-one-out variances: errors of log densities below .02, against .06 with 20


class LatentPredictions(ShardedLatents, NeighborChoice):
    """A method with q(u) that predicts from the nearest inducing points.

    Attributes:
        graph: of the inducing points.
        learn_inducing: whether these are parameters, `z`.
    """

    graph: NeighborGraph
    learn_inducing: bool

    @property
    def num_inducing(self) -> int:
        """M."""
        return self.graph.num_points

    def _points(self) -> Tensor:
        return self.z if self.learn_inducing else self.graph.x

    @property
    def chooses_neighbors(self) -> bool:
        """For sites of Gaussian data: those of others have no precision yet, and other families gain less by it."""
        return isinstance(self.local, GaussianSites) and cast(Likelihood, self.likelihood).is_gaussian

    @pyro_entry
    @torch.no_grad()
    def log_variances(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]) -> Float[Tensor, "*L B"]:
        self._place_medians()
        precision = cast(GaussianSites, self.local).observations()[1]
        noise, points = 1 / precision, self.graph.x
        _, var = graph_conditional(self.covariance(), points[rows], points, near, noise, self.jitter)
        return (var + typical_noise(precision)).log()

    def _follow_neighbors(self) -> None:
        super()._follow_neighbors()
        self.local.follow(self.graph)

    @pyro_entry
    @torch.no_grad()
    def log_evidence(self, rows: Int[Tensor, " B"]) -> Tensor | None:
        """Mean log density of the data at some rows given those at their predecessors, at the present hyperparameters.

        Vecchia's approximation of the log evidence that the bound of q(u) is of; the exact one for K = N - 1. None
        with sites, on which q(u) does not depend, with inducing points elsewhere, and where
        :func:`~pyro_nngp.models.base.evidence.has_evidence` is False.

        Cost: O(K^3) per row.
        """
        if not self.at_data or isinstance(self.local, GaussianSites) or not has_evidence(self):
            return None
        batch = self.graph.batch(rows)
        noise = self.likelihood_at(batch.rows).variance.expand(len(batch.rows))
        points = self.x[batch.rows]
        residual = cast(Tensor, self._targets(batch.rows)) - self._mean_at(points, batch.rows)
        kernel, targets = bind(self.kernel), batch.targets
        return log_density_given(kernel, points, targets, batch.neighbors, residual, noise, self.jitter).mean()

    def plan(self, x_new: Tensor, num_neighbors: int | None) -> Tensor:
        """Rows of the nearest inducing points."""
        self._check_neighbors(num_neighbors, self.num_inducing)
        return self.graph.query(x_new, self.neighbors_or_default(num_neighbors))

    def moments(self, x_new: Tensor, plan: Tensor, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """O(P K^3)."""
        if draw is None and isinstance(self.local, GaussianSites):
            return self.local.moments(x_new, plan)
        w, var = graph_conditional(self.covariance(), x_new, self._points(), plan, jitter=self.jitter)
        mean = self._mean_at(x_new)
        if draw is not None:
            loc = mean + (w * self._drawn_u(draw)[..., plan]).sum(-1)
            return loc, var.expand(loc.shape)
        rows, positions = distinct_rows(plan)
        return self._through(self.local.distribution(rows), w, var, positions, mean)

    @pyro_entry
    def prediction_neighbors(self) -> int:
        """The default number of neighbors in predictions: K, with sites 64, doubled up to 512 while that helps.

        With sites it helps if it lowers the predictive variance of f at 64 points given the others by more than 1 % on
        average. Otherwise q(u) at these points scores what q(u) at others predicts: means that K neighbors have shaped
        can be wild under more, where a lengthscale is far beyond their distances. With an encoder, which would run at
        all of them, it is K.
        """
        first, most = self.graph.num_neighbors, min(MOST_NEIGHBORS, self.num_inducing - 1)
        if isinstance(self.local, GaussianSites):
            first, most = self.local.prediction_range()
        elif isinstance(self.local, AmortizedGaussian):
            return first
        if first >= most:
            return first
        alone = self.shard is None or not self.at_data
        if not alone and not isinstance(self.local, GaussianSites):
            cast(ShardedTable, self.graph).kept_trial = None  # it has a copy of q(u)
        view, trial = (self, self.graph.trial(most)) if alone else self.neighbor_trial(most)
        return view._enough_for_predictions(trial, first)

    def neighbors_of_draws(self, num_neighbors: int | None) -> int | None:
        """K, which the draws of u follow; q(u) has no part in them, and may be untrained."""
        follow = num_neighbors is None and not isinstance(self.local, GaussianSites)
        return self.graph.num_neighbors if follow else num_neighbors

    @pyro_entry
    @torch.no_grad()
    def _enough_for_predictions(self, trial: NeighborTrial, first: int) -> int:
        self._place_medians()
        if isinstance(self.local, GaussianSites):
            return self.local.enough(trial, first)
        q = self.local.distribution(trial.near.unique())
        return trial.enough(partial(self._losses, trial.rows), first, WORTHWHILE, q.loc)

    def _losses(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]) -> Float[Tensor, "*L B"]:
        """Twice the negative log densities of means of q(u) at some inducing points, as q(u) at others predicts them.

        With Gaussian noise its variance counts, too: below it no difference matters.
        """
        points, (own, positions) = self._points().double(), distinct_rows(near)
        w, var = graph_conditional(
            bind_double(self.kernel, self.x.dtype), points[rows], points, near, jitter=self.jitter
        )
        loc, var = self._through(self.local.distribution(own), w.to(self.x.dtype), var, positions, w.new_zeros(()))
        if self.likelihood is not None and self.likelihood.is_gaussian:
            var = var + self.likelihood.variance.mean()
        return var.log() + (self.local.distribution(rows).loc - loc).square() / var

    def residuals(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(self.local, GaussianSites):
            return super().residuals(rows)
        target, precision = self.local.observations(rows)
        return target, 1 / precision

    def leave_one_out(self, rows: Tensor, num_neighbors: int | None, sampled: bool) -> Densities:
        """Densities from the Gaussian sites at these hyperparameters; q(u) serves at most as their start."""
        if not self.at_data:
            self.refuse_neighbors(num_neighbors)
        self._check_neighbors(num_neighbors, self.num_rows - 1)
        moments = self._loo_at_data(num_neighbors) if self.at_data else self._loo_at_inducing(sampled)
        return self.scores(rows, moments)

    def _loo_at_data(self, num_neighbors: int | None) -> Callable:
        """O(N K^3) per natural-gradient step, and conjugate gradients for the mean."""
        most = max(self.graph.num_neighbors, _LOO_NEIGHBORS) if num_neighbors is None else num_neighbors
        near, own, start = self.nearest_others(min(most, self.num_rows - 1)), slice(self.num_data), None
        if isinstance(self.local, GaussianSites) and self.local.solved:
            start = self.local.loc[..., own], self.local.variance[..., own]
        leave_one_out = LatentLeaveOneOut(self.x[own], near, self.jitter, start)

        def moments(likelihood: Likelihood, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
            kernel = bind(self.kernel)
            return leave_one_out(likelihood, y, mean, kernel, prior_factor(kernel, self.graph, self.jitter))

        return moments

    def _loo_at_inducing(self, sampled: bool) -> Callable:
        """O(N M^2 + M^3) per natural-gradient step."""
        leave_one_out = InducingLeaveOneOut(sampled, self.total)

        def moments(likelihood: Likelihood, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
            kernel, z, near = bind(self.kernel), self._points(), self.data_neighbors
            prior = NNGP(kernel, self.graph, jitter=self.jitter, points=z).factor.dense()
            w, var = graph_conditional(kernel, self.x, z, near, jitter=self.jitter)
            blocks = scattered(w, near, var, self.num_inducing)
            return leave_one_out(likelihood, y, mean, blocks, prior, kernel.diag(self.x))

        return moments

    def joint_plan(self, x_new: Tensor, num_neighbors: int | None, seed: int) -> tuple[Tensor, Tensor]:
        """The nearest inducing points, and the nearest among them and earlier new points."""
        self._check_neighbors(num_neighbors, self.num_inducing + len(x_new) - 1)
        k = self.neighbors_or_default(num_neighbors)
        return self.graph.query(x_new, min(k, self.num_inducing)), self.graph.extend(x_new, k, seed)[1]

    def joint_draws(self, x_new: Tensor, plan: tuple[Tensor, Tensor], count: int, draw: Draw | None) -> Tensor:
        """O(P K^3), O(M + P K) per draw; with sites, draws given the pseudo-observations are centered on the mean."""
        near, joint = plan
        if draw is None and isinstance(self.local, GaussianSites):
            loc, _ = self.local.moments(x_new, near)
            target, precision = self.local.observations()
            residual = torch.zeros_like(target)
            settings = residual, 1 / precision, count, self.latent_shape, self.jitter
            return loc + draws_given_observations(self.kernel, self.x, x_new, joint, *settings)
        if draw is None:
            u = self.local.distribution().sample((count,))
        else:
            u = self._drawn_u(draw)
            u = u.expand(count, *u.shape)
        prior = NNGP(self.covariance(), self.graph, jitter=self.jitter, points=self._points())
        return self._mean_at(x_new) + prior.sample_new(x_new, u, neighbors=joint)

    def _most_draws(self, num_new: int) -> int:
        return max(1, _DRAW_BUDGET // (self.num_inducing + num_new))

    def _drawn_u(self, draw: Draw) -> Tensor:
        return self._drawn(draw, "u", (*self.latent_shape, self.num_inducing))

    def _through(
        self, q: SparseCholeskyNormal, w: Tensor, var: Tensor, positions: Tensor, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Moments of f from q(u) through the conditional f | u at `positions` among q's rows."""
        positions = positions.clamp(min=0)
        return mean + (w * values_at(q.loc, positions)).sum(-1), var + q.combined_rows(w, positions)
