"""Families of q(u): the latent values at the points of a graph, f less the mean function.

A family is a module of tables or networks alone. Data, neighbors and hyperparameters come with each call, in a
:class:`Given`. Its parameters are param sites in :meth:`Family.at_batch`, which a guide calls, and are read without
Pyro effects everywhere else.

Symbols: N points, K neighbors, B points of a batch, U rows of a batch and its neighbors, P new points, L latent
functions, S draws.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyro_nngp._checks import fail, undefined
from pyro_nngp._indexing import values_at
from pyro_nngp.bound import Bound
from pyro_nngp.coefficients import Trend, posterior_of_coefficients
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions import NNGP, SparseCholeskyNormal
from pyro_nngp.hyperparameters import GPModule
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.neighbors.choice_of_k import MOST_NEIGHBORS, ONE_SCORE
from pyro_nngp.neighbors.table import distinct_rows
from pyro_nngp.rows import Part, Rows
from pyro_nngp.variational.latent_prior import LatentPrior
from pyro_nngp.variational.natural_gradient import gaussian_sites


@runtime_checkable
class Given(Protocol):
    """Arguments of a family at each call.

    Attributes:
        rows: the data.
        graph: the points and the neighbors of their prior.
        bound: the hyperparameters.
    """

    @property
    def rows(self) -> Rows: ...

    @property
    def graph(self) -> NeighborGraph: ...

    @property
    def bound(self) -> Bound: ...


def points_of(given: Given) -> Float[Tensor, "N D"]:
    """The points of the graph, or where these are learned, their present places."""
    z = given.bound.others.get("z")
    return given.graph.x if z is None else z


class Family(GPModule):
    """Base of families; a subclass defines :meth:`at_rows`, or everything that follows from it."""

    batches_sets = True  # whether several sets of hyperparameters are taken at once, as batch dimensions
    needs_neighborhoods = False  # whether q at a point depends on the neighbors of its neighbors
    num_context = 0  # further nodes of each point that it depends on
    can_solve = False  # whether there is an optimum at given hyperparameters

    def at_rows(self, given: Given, rows: Int[Tensor, " U"] | None = None) -> SparseCholeskyNormal:
        """q at some points; None is all."""
        undefined(self, "at_rows", "family")

    def at_batch(self, given: Given, prior: NNGP) -> torch.distributions.Distribution:
        """q at the batch of a prior; parameters are param sites."""
        undefined(self, "at_batch", "family")

    # Predictions.

    def site_precision(self, given: Given) -> Float[Tensor, "*L N"] | None:
        """Precisions of data as Gaussian observations of f, at local rows; None if they are not known yet."""
        bound, rows = given.bound, given.rows
        likelihood, y, mean = rows.likelihood(bound, rows.own), rows.targets(rows.every), rows.mean(bound, rows.own)
        if likelihood.is_gaussian:
            noise = gaussian_observations(likelihood, y, None, rows.x.dtype)[1]
            return (1 / noise).expand(*bound.latent_shape, rows.num_data)
        q = self.at_rows(given, rows.every)
        return gaussian_sites(likelihood, y, mean + q.loc, q.variance, total=rows.total)[1]

    def find_trend(self, given: Given) -> Trend | None:
        """The coefficients of a mean function that is learned and linear in them, under a flat prior."""
        precision, rows, bound = self.site_precision(given), given.rows, given.bound
        if precision is None:
            return None
        mean, prior = bound.mean_function, LatentPrior(bound.covariance, given.graph, bound.jitter)
        gain, information = prior.coefficients(mean.basis(rows.x[rows.own]).mT.to(precision), precision)
        _, root = posterior_of_coefficients(mean, information, torch.zeros_like(information[..., 0]))
        return Trend(mean.basis, root, True, gain)

    def moments(
        self, given: Given, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P K"]
    ) -> tuple[Float[Tensor, "*L P"], Float[Tensor, "*L P"]]:
        """Means and variances of f at new points from the points near them; O(P K^3)."""
        bound = given.bound
        w, var = graph_conditional(bound.at_data, x_new, points_of(given), near, jitter=bound.jitter)
        rows, positions = distinct_rows(near)
        loc, var = through(self.at_rows(given, rows), w, var, positions, bound.mean(x_new))
        trend = bound.trend
        return loc, var if trend is None else var + trend.variance(trend.rest(x_new, w, near, gain_of(trend)))

    def joint(
        self,
        given: Given,
        x_new: Float[Tensor, "P D"],
        near: Int[Tensor, "P K"],
        joint: Int[Tensor, "P k"],
        count: int,
    ) -> Float[Tensor, "S *L P"]:
        """Joint draws of f; `joint` are the nearest among all points and earlier new ones."""
        u, trend = self.at_rows(given).sample(torch.Size((count,))), given.bound.trend
        if trend is None:
            return joint_given(given, x_new, joint, u)
        change = trend.draws(count, given.bound.latent_shape).to(u)
        u = u - (gain_of(trend).to(u) @ change)[..., 0]
        return joint_given(given, x_new, joint, u) + (trend.basis(x_new).to(u) @ change)[..., 0]

    def enough_neighbors(self, given: Given) -> int:
        """The default number of neighbors in predictions: K, doubled up to 512 while that helps.

        q(u) at some points scores what q(u) at others predicts: means that K neighbors have shaped can be wild under
        more, where a lengthscale is far beyond their distances.
        """
        first, most = given.graph.num_neighbors, min(MOST_NEIGHBORS, given.graph.num_rows - 1)
        if first >= most:
            return first
        part = self.trial(given, most)
        return part.places.choose_k(partial(_losses, given, part), first, ONE_SCORE, given.bound.versions)

    def trial(self, given: Given, most: int) -> Part:
        """Points at which numbers of neighbors are compared, with q there; the trial is the part's places."""
        if not hasattr(given.graph, "halo"):
            return Part(given.rows, given.graph, None, given.graph.trial(most), self)
        if not self.keeps_trials:
            cast(Any, given.graph).kept_trial = None  # it has a copy of q(u)
        return self.at_part(given, given.rows.trial(given.graph, most))

    keeps_trials = False  # whether comparisons of numbers of neighbors do not depend on what training changes

    # Several processes: q at rows of others.

    def at_part(self, given: Given, part: Part, x_new: Tensor | None = None, num_neighbors: int = 0) -> Part:
        """A part of the rows of all processes with q there; all processes must call it.

        Args:
            given: data, neighbors and hyperparameters of this process.
            part: the rows.
            x_new: new points that the part is for.
            num_neighbors: of each of them.
        """
        if part.numbers is None:
            return part._replace(q=self)
        return part._replace(q=self.with_tables(given.rows.fetch(part.numbers, self.row_tables())))

    def row_tables(self) -> dict[str, Tensor]:
        """Tables with a row per point, by name; none where a network computes q."""
        return {}

    def with_tables(self, tables: Mapping[str, Tensor]) -> "Family":
        """A copy with the tables of other rows."""
        undefined(self, "with_tables", "family")

    # Changes.

    def solve(self, read: Callable[[], Given], max_steps: int, tolerance: float) -> Any:
        """Put q at its optimum; `read` gives data and hyperparameters anew once coefficients of the mean are set."""
        cure = "Train by gradients."
        fail(type(self).__name__, "model", "with a family whose optimum is known", type(self).__name__, cure)

    def solve_again(self, read: Callable[[], Given]) -> None:
        """Put q at its optimum after points have been appended, at the present coefficients of the mean."""
        self.solve(read, 100, 1e-3)

    def solved_parameters(self, mean: Any) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets, among them the parameters of a mean function."""
        return list(self.parameters())

    def neighbors_changed(self, given: Given) -> None:
        """Update what depends on the neighbors of the graph; on several processes fetch the rows of the halo."""

    def restart(self, given: Given) -> None:
        """Start anew on the points of a graph, none of whose data are known yet."""
        undefined(self, "restart", "family")

    def follow_rows(self, read: Callable[[], Any], solves: bool) -> None:
        """Start anew on other rows, and go to the optimum there.

        Args:
            read: returns data, neighbors and present hyperparameters.
            solves: whether the model has this optimum.
        """
        self.restart(read())
        if solves:
            self.solve_again(read)

    def distributed(self, given: Given) -> None:
        """Start anew on the local rows of one of several processes."""
        self.restart(given)

    def append(self, given: Given, count: int, loc: Float[Tensor, "*L P"], variance: Float[Tensor, "*L P"]) -> None:
        """Append the last points of a graph.

        Args:
            given: data and neighbors with the new points.
            count: P, how many they are.
            loc: means of f there before their data.
            variance: their variances.
        """
        undefined(self, "append", "family")

    def starts_of_leave_one_out(self) -> tuple[Tensor, Tensor] | None:
        """Means of u and variances at the points, from which leave-one-out moments can start; None is the prior."""
        return None


def gain_of(trend: Trend) -> Float[Tensor, "*L N p"]:
    """The gain of the posterior means of u at the points per unit of each coefficient of the mean."""
    assert trend.gain is not None  # families have it
    return trend.gain.mT


def through(
    q: SparseCholeskyNormal, w: Tensor, var: Tensor, positions: Tensor, mean: Tensor
) -> tuple[Float[Tensor, "*L B"], Float[Tensor, "*L B"]]:
    """Moments of f from q(u) through the conditional f | u at `positions` among q's rows."""
    positions = positions.clamp(min=0)
    return mean + (w * values_at(q.loc, positions)).sum(-1), var + q.combined_rows(w, positions)


def joint_given(
    given: Given, x_new: Float[Tensor, "P D"], joint: Int[Tensor, "P k"], u: Float[Tensor, "S *L N"]
) -> Float[Tensor, "S *L P"]:
    """Joint draws of f at new points, one for each draw of u."""
    bound, graph = given.bound, given.graph
    prior = NNGP(bound.at_data, graph, jitter=bound.jitter, points=points_of(given))
    return bound.mean(x_new) + prior.sample_new(x_new, u, neighbors=joint)


def _losses(given: Given, part: Part, near: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "*L B"]]:
    """Twice the negative log densities of means of q(u) at some points, as q(u) at others predicts them.

    With Gaussian noise its variance counts, too: below it no difference matters.
    """
    bound, rows = given.bound, part.places.rows
    points = (points_of(given) if part.numbers is None else part.rows.x).double()
    others, positions = distinct_rows(near)
    kernel = bind_double(bound.kernel, given.rows.x.dtype)
    w, var = graph_conditional(kernel, points[rows], points, near, jitter=bound.jitter)
    w = w.to(given.rows.x.dtype)
    loc, var = through(part.q.at_rows(given, others), w, var, positions, w.new_zeros(()))
    if bound.likelihood is not None and bound.likelihood.is_gaussian:
        var = var + bound.likelihood.variance.mean()
    return (var.log() + (part.q.at_rows(given, rows).loc - loc).square() / var,)


__all__ = ["Family", "Given", "joint_given", "points_of", "through"]
