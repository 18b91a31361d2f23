"""Posteriors of methods with q(u) at inducing points, or at the data: from the points nearest to a new one.

Cost: O(P K^3) for moments. Symbols: N data, M inducing points, K neighbors, P new points, I scored rows, S draws.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._indexing import values_at
from pyro_nngp.coefficients import Trend, normal_trend
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions import NNGP
from pyro_nngp.models.base.draws import Draw, drawn_values
from pyro_nngp.models.base.neighbor_choice import typical_noise
from pyro_nngp.models.base.posterior import Posterior
from pyro_nngp.rows import Part
from pyro_nngp.variational.factors import prior_factor
from pyro_nngp.variational.family import Family, joint_given, points_of
from pyro_nngp.variational.leave_one_out import InducingLeaveOneOut, LatentLeaveOneOut, scattered

_DRAW_BUDGET = 2**27  # values held at once while joint draws are streamed
_LOO_NEIGHBORS = 64  # for leave-one-out variances: errors of log densities below .02, against .06 with 20


@dataclass(frozen=True)
class LatentPosterior(Posterior):
    """f under q(u), or given values of u.

    Attributes:
        q: the family.
        draw: the values of all sites in one posterior draw, u among them; None integrates over q(u).
        site: name of the site u.
        data_neighbors: the nearest inducing points of each datum; None with inducing points at the data.
        parameters: what the evidence of pseudo-observations depends on.
        mean: the mean function as a module.
    """

    q: Family
    draw: Draw | None = None
    site: str = "u"
    data_neighbors: Any = None
    parameters: Any = ()
    mean: Any = None

    @property
    def u(self) -> Float[Tensor, "*L M"]:
        """Values of u in the draw."""
        assert self.draw is not None
        return drawn_values(self.bound.where, self.draw, self.site, (*self.bound.latent_shape, self.graph.num_points))

    # Neighbors.

    @torch.no_grad()
    def enough_neighbors(self) -> int:
        return self.q.enough_neighbors(self)

    def neighbors_at_draws(self) -> int | None:
        """K, which draws of u follow; q(u) has no part in them, and may be untrained."""
        return None if self.q.keeps_trials else self.graph.num_neighbors

    joint_follows_moments = True

    def variances(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]) -> tuple[Tensor, Tensor]:
        precision, x, bound = self.q.observations(self)[1], self.rows.x, self.bound
        _, var = graph_conditional(bound.at_data, x[rows], x, near, 1 / precision, bound.jitter)
        return var, typical_noise(precision)

    # Several processes: inducing points are the same on all.

    @property
    def needs_part(self) -> bool:
        return self.data_neighbors is None and not self.rows.is_whole

    @property
    def needs_part_of_others(self) -> bool:
        return False

    def part_near(self, x_new: Float[Tensor, "P D"], num_neighbors: int, jointly: bool) -> Part:
        return self.q.at_part(self, super().part_near(x_new, num_neighbors, jointly), x_new, num_neighbors)

    # Values.

    def find_trend(self) -> Trend | None:
        """None with inducing points elsewhere than at the data, and at posterior draws."""
        if self.draw is not None or self.data_neighbors is not None or self.bound.likelihood is None:
            return None
        mean = self.bound.mean_function
        if not mean.has_posterior:
            return self.q.find_trend(self)
        return normal_trend(mean, self.q.gain)  # of pseudo-observations, which set the posterior

    def moments(self, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P K"]) -> tuple[Tensor, Tensor]:
        if self.draw is None:
            return self.q.moments(self, x_new, near)
        bound = self.bound
        w, var = graph_conditional(bound.at_data, x_new, points_of(self), near, jitter=bound.jitter)
        loc = bound.mean(x_new) + (w * values_at(self.u, near)).sum(-1)
        return loc, var.expand(loc.shape)

    def joint(self, x_new: Float[Tensor, "P D"], near: tuple[Tensor, Tensor], count: int) -> Float[Tensor, "S *L P"]:
        """O(P K^3), then O(M + P K) per draw."""
        if self.draw is None:
            return self.q.joint(self, x_new, *near, count)
        u = self.u
        return joint_given(self, x_new, near[1], u.expand(count, *u.shape))

    def most_draws(self, num_new: int) -> int | None:
        return max(1, _DRAW_BUDGET // (self.graph.num_points + num_new))

    def observations_of_u(self, at: Int[Tensor, " U"]) -> tuple[Tensor, Tensor]:
        if not hasattr(self.q, "observations"):
            return super().observations_of_u(at)
        target, precision = self.q.observations(self, at)
        return target, 1 / precision

    # Leave one out.

    def others(self, rows: Int[Tensor, " I"], num_neighbors: int | None) -> tuple[Tensor, Any]:
        """The rows, and the nearest others of each point; with inducing points the rows alone."""
        if self.data_neighbors is not None:
            self._refuse_neighbors(num_neighbors, ".loo")
            return rows, None
        self._check_neighbors(num_neighbors, self.rows.num_rows - 1)
        most = max(self.graph.num_neighbors, _LOO_NEIGHBORS) if num_neighbors is None else num_neighbors
        return rows, self.rows.nearest_others(self.graph, min(most, self.rows.num_rows - 1))

    def leave_one_out(self, others: tuple[Tensor, Any]) -> Float[Tensor, "*T I"]:
        """Densities from pseudo-observations at these hyperparameters; q(u) serves at most as their start."""
        rows, near = others
        if self.data_neighbors is None:
            return self.densities(rows, partial(self._loo_at_data, near))
        return self.densities(rows, self._loo_at_inducing)

    def _loo_at_data(self, near: Any, likelihood: Any, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """O(N K^3) per natural-gradient step, and conjugate gradients for the mean."""
        bound, start, x = self.bound, self.q.starts_of_leave_one_out(), self.rows.x[self.rows.own]
        start = None if start is None else (start[0][..., self.rows.own], start[1][..., self.rows.own])
        prior = prior_factor(bound.covariance, self.graph, bound.jitter)
        leave_one_out = LatentLeaveOneOut(x, near, bound.jitter, start)
        return leave_one_out(likelihood, y, mean, bound.covariance, prior, bound.trend)

    def _loo_at_inducing(self, likelihood: Any, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """O(N M^2 + M^3) per natural-gradient step."""
        bound, x, z = self.bound, self.rows.x, points_of(self)
        prior = NNGP(bound.covariance, self.graph, jitter=bound.jitter, points=z).factor.dense()
        w, var = graph_conditional(bound.covariance, x, z, self.data_neighbors, jitter=bound.jitter)
        blocks = scattered(w, self.data_neighbors, var, self.graph.num_points)
        leave_one_out = InducingLeaveOneOut(self.rows.total)
        return leave_one_out(likelihood, y, mean, blocks, prior, bound.covariance.diag(x), self.draw is not None)


__all__ = ["LatentPosterior"]
