r"""Posteriors of f at given hyperparameters: what predictions need of a method.

:class:`Posterior` is the base, :class:`Observed` that from Gaussian observations of the neighbors, f integrated out.
With targets (or pseudo-observations) :math:`\tilde y` and their noise variances :math:`\delta` at the data
(:mod:`pyro_nngp.likelihoods.augmentation`), mean function :math:`\mu`, and weights w and variance v from
:mod:`pyro_nngp.conditionals.nearest_neighbor` with noise :math:`\delta` on the neighbors,

.. math:: f(x) \mid \tilde y_n \sim N\big(\mu(x) + w^\top (\tilde y_n - \mu(x_n)),\; v\big).

Cost: O(B K^3) per batch, for each latent function whose noise differs. Symbols: N data, B points, K neighbors, U rows
of a batch and its neighbors, P new points, L latent functions, S draws.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution, Normal

from pyro_nngp._checks import check_num_neighbors, fail, undefined
from pyro_nngp._indexing import values_at
from pyro_nngp.bound import Bound
from pyro_nngp.coefficients import Trend, normal_trend, posterior_of_coefficients
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.likelihoods import Bernoulli, Categorical, Likelihood
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.models.base.neighbor_choice import USUAL_NEIGHBORS
from pyro_nngp.models.base.program import latents_first
from pyro_nngp.models.base.trend import normal_equations
from pyro_nngp.neighbors.choice_of_k import FOR_F, FOR_Y, Rule, Veto, loses_density
from pyro_nngp.neighbors.table import distinct_rows
from pyro_nngp.plausibility.near_duplicates import DuplicateDependence, find_near_duplicates
from pyro_nngp.rows import At, Part, Rows
from pyro_nngp.variational.joint_draws import draws_given_observations

Kind = TypeVar("Kind", bound="Posterior")


@dataclass(frozen=True)
class Posterior:
    """p(f | data) or q(f) at given hyperparameters, or at those and latent values of a posterior draw.

    Methods that do not depend on hyperparameters search neighbors once for all posterior draws; all others run
    under ``torch.vmap``, unless they say that they cannot by None as their number of entries.

    Attributes:
        rows: the data.
        graph: neighbors of the points that predictions condition on; None with inducing points that have none.
        bound: the hyperparameters.
    """

    rows: Rows
    graph: Any
    bound: Bound

    def on(self: Kind, part: Part) -> Kind:
        """The posterior on some rows of all processes, which take the place of the data."""
        return replace(self, rows=part.rows, graph=part.graph)

    # Neighbors.

    def enough_neighbors(self) -> int:
        """The default number of neighbors in predictions."""
        return self.graph.num_neighbors

    def worthwhile_neighbors(self, rules: Sequence[Rule], veto: Veto | None = None) -> int:
        """K of the graph, doubled while that lowers variances at some rows, given the others, enough for a rule.

        With all neighbors in the graph it begins at 32.
        """
        first = self.graph.num_neighbors
        if first == self.rows.num_rows - 1:  # the exact process, which says nothing of how many are enough
            first = min(first, USUAL_NEIGHBORS)
        most = min(max(rule.most for rule in rules), self.rows.num_rows - 1)
        if first >= most:
            return first
        part = self.rows.trial(self.graph, most)
        posterior, trial = self.on(part), part.places
        versions = self.bound.versions
        return trial.choose_k(lambda near: posterior.variances(trial.rows, near), first, rules, versions, veto)

    def variances(
        self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]
    ) -> tuple[Float[Tensor, "*L B"], Float[Tensor, "..."], *tuple[Tensor, ...]]:
        """Variances of f at some rows given their neighbors, a typical variance of the noise of y; more for a veto."""
        undefined(self, "variances", "posterior")

    def neighbors_at_draws(self) -> int | None:
        """The default number at posterior draws; None takes the number of other predictions."""
        return None

    def neighbors(self, x_new: Float[Tensor, "P D"], num_neighbors: int | None) -> Any:
        """Rows of the nearest points, for :meth:`moments`."""
        self._check_neighbors(num_neighbors, self.graph.num_points)
        return self.graph.query(x_new, self.enough_neighbors() if num_neighbors is None else num_neighbors)

    joint_follows_moments = False  # whether joint draws need the points nearest to each new one as well, for q(u)

    def joint_neighbors(self, x_new: Float[Tensor, "P D"], num_neighbors: int | None, seed: int) -> Any:
        """Rows of the nearest points and earlier new points, whose order has a seed, for :meth:`joint`.

        Behind rows of the nearest points alone if `joint_follows_moments`.
        """
        self._check_neighbors(num_neighbors, self.graph.num_points + len(x_new) - 1)
        k = self.enough_neighbors() if num_neighbors is None else num_neighbors
        joint = self.graph.extend(x_new, k, seed)[1]
        return (self.graph.query(x_new, min(k, self.graph.num_points)), joint) if self.joint_follows_moments else joint

    def others(self, rows: Int[Tensor, " I"], num_neighbors: int | None) -> Any:
        """Some rows of the data, and all that hyperparameters do not change, for :meth:`leave_one_out`."""
        return rows

    # Several processes: rows of others that predictions condition on.

    @property
    def needs_part(self) -> bool:
        """Whether predictions condition on rows that other processes may have."""
        return self.graph is not None and not self.rows.is_whole

    @property
    def needs_part_of_others(self) -> bool:
        """Whether leave-one-out densities do, and do not fetch them themselves."""
        return self.needs_part

    def part_near(self, x_new: Float[Tensor, "P D"], num_neighbors: int, jointly: bool) -> Part:
        """The rows of all processes that are nearest to new points of this one; `jointly` they are in a graph."""
        return self.rows.near(self.graph, x_new, num_neighbors, ordered=jointly)

    # Values.

    def find_trend(self) -> Trend | None:
        """The coefficients of the mean to integrate over in predictions; None takes them as they are.

        The mean function is linear in them, and they are learned, or have a posterior that the method sets.
        """
        return None

    def moments(self, x_new: Float[Tensor, "P D"], near: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance of f, (*L, P) each."""
        undefined(self, "moments", "posterior")

    def response_moments(self, x_new: Float[Tensor, "P D"], near: Any) -> tuple[Tensor, Tensor]:
        """Moments for :meth:`response`, :meth:`moments` by default."""
        return self.moments(x_new, near)

    def response(self, loc: Tensor, spread: Tensor, by_row: Mapping[str, Tensor]) -> Distribution:
        """Predictive distribution of y, from :meth:`response_moments` plus the offset."""
        return self.bound.likelihood.for_rows(**by_row).marginal(loc, spread)

    def given_f(self, f: Tensor, by_row: Mapping[str, Tensor]) -> Distribution:
        """The distribution of y given f."""
        return self.response(f, torch.zeros_like(f), by_row)

    def shifted(self, loc: Tensor, offset: Tensor) -> Tensor:
        """Means of :meth:`response_moments` with the offset of f, (*L, P) or 0."""
        return loc + offset

    def joint(self, x_new: Float[Tensor, "P D"], near: Any, count: int) -> Float[Tensor, "S *L P"]:
        """Joint draws of f."""
        undefined(self, "joint", "posterior")

    def leave_one_out(self, others: Any) -> Float[Tensor, "*T I"]:
        """Log densities of some data given all others, latent values integrated out."""
        undefined(self, "leave_one_out", "posterior")

    @property
    def loo_kind(self) -> str:
        """Description of the densities of :meth:`leave_one_out`, for exports."""
        return "leave-one-out, latent values integrated out"

    @property
    def has_leave_one_out(self) -> bool:
        """Whether :meth:`leave_one_out` is defined."""
        return type(self).leave_one_out is not Posterior.leave_one_out

    def densities(
        self, rows: Int[Tensor, " I"], moments: Callable[[Likelihood, Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> Float[Tensor, "*T I"]:
        """Log densities of some data from leave-one-out means and variances of f at all rows of this process.

        Args:
            rows: rows of the data.
            moments: maps the likelihood, y (outputs first) and the mean function, of the shape of f, to the moments.
        """
        bound, data = self.bound, self.rows
        likelihood, y = data.likelihood(bound, data.own), data.targets(data.every)
        mean = data.mean(bound, data.own).expand(*bound.latent_shape, -1)
        return likelihood.marginal(*moments(likelihood, y, mean)).log_prob(y)[..., rows]

    def observations_of_u(self, at: Int[Tensor, " U"]) -> tuple[Float[Tensor, "*L U"], Float[Tensor, "*L U"]]:
        """Gaussian observations of f less the mean function at some rows, and their noise variances."""
        cure = "Take a method such as Vecchia or VNNGP."
        fail(self.bound.where, "method", "with Gaussian observations of f at the data", "another", cure, TypeError)

    def entries(self, x_new: Float[Tensor, "P D"], near: Any) -> int | None:
        """Entries of temporaries of :meth:`moments` and :meth:`joint` at one draw; None if they look at values."""
        return (near[-1] if isinstance(near, tuple) else near).numel()

    def loo_entries(self, others: Any) -> int | None:
        """Entries of temporaries of :meth:`leave_one_out` at one draw; None if it looks at values."""
        return None

    def most_draws(self, num_new: int) -> int | None:
        """The largest number of joint draws made at once; None is all of them."""
        return None

    def _check_neighbors(self, num_neighbors: int | None, limit: int) -> None:
        if num_neighbors is not None:
            check_num_neighbors(self.bound.where, num_neighbors, limit)

    def _refuse_neighbors(self, num_neighbors: int | None, entry: str = "") -> None:
        """Raise if a number of neighbors is given where all data count, through inducing points."""
        if num_neighbors is not None:
            where, cure = f"{self.bound.where}{entry}", "All other data count, through the inducing points."
            fail(where, "num_neighbors", "to be None with inducing points", num_neighbors, cure)


@dataclass(frozen=True)
class Observed(Posterior):
    """f given Gaussian observations of its neighbors; the targets, unless a subclass has others."""

    def observations(self, rows: At) -> tuple[Float[Tensor, "*L U"], Tensor]:
        """Observations of f at some rows, and their noise variances, (U,) or (L, U)."""
        return self._observed(rows, None)

    def _observed(self, rows: At, omega: Tensor | None) -> tuple[Float[Tensor, "*L U"], Tensor]:
        """Observations and noise variances at some rows, given auxiliary variables if the likelihood has them."""
        y = self.rows.targets(rows if isinstance(rows, Tensor) else None)
        return gaussian_observations(self.rows.likelihood(self.bound, rows), y, omega, self.rows.x.dtype)

    def given_neighbors(
        self,
        x: Float[Tensor, "B D"],
        rows: Int[Tensor, " U"],
        near: Int[Tensor, "B K"],
        own: At | None = None,
        observed: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Float[Tensor, "... B"], Float[Tensor, "... B"]]:
        """Moments of f at x given observations at some rows, at the present coefficients of the mean.

        Args:
            x: points.
            rows: the rows that are observed.
            near: neighbors of each point, positions among these rows, -1 padded.
            own: the rows of x among the data, whose offset counts; None for new points.
            observed: what :meth:`observations` returns at the rows, or takes its place.
        """
        return self._conditional(x, rows, near, own, observed)[:2]

    def features_given_neighbors(
        self, targets: Int[Tensor, " B"], rows: Int[Tensor, " U"], near: Int[Tensor, "B K"], own: At
    ) -> tuple[Float[Tensor, "... B"], Float[Tensor, " B"], Float[Tensor, "B p"]]:
        """Moments of f as of :meth:`given_neighbors`, and what they change by per unit of each coefficient.

        Args:
            targets: positions of the points among the rows.
            rows: the rows, observed or not.
            near: neighbors of each point, positions among these rows, -1 padded.
            own: the rows of the points.
        """
        return self._conditional(self.rows.x[own], rows, near, own, targets=targets)

    def _conditional(
        self,
        x: Tensor,
        rows: Tensor,
        near: Tensor,
        own: At | None = None,
        observed: Any = None,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Any]:
        """Moments as of :meth:`given_neighbors`, and their :meth:`~Trend.rest` if coefficients are integrated over.

        `targets` are the positions of x among the rows, if it is known to be among them.
        """
        bound, points = self.bound, self.rows.x.index_select(0, rows)
        obs, noise = self.observations(rows) if observed is None else observed
        among = bound.inputs(points)
        at = bound.inputs(x) if targets is None else among[targets]
        w, var = graph_conditional(bound.at_data, at, among, near, noise, bound.jitter)
        residual = obs - self.rows.mean(bound, rows, points)
        mean = bound.mean(x) if own is None else self.rows.mean(bound, own, x)
        rest = None if bound.trend is None else bound.trend.rest(at, w, near, bound.trend.basis(among))
        return mean + (w * values_at(residual, near)).sum(-1), var, rest

    def find_trend(self) -> Trend | None:
        mean = self.bound.mean_function
        if mean.has_posterior:
            return normal_trend(mean)
        _, root = posterior_of_coefficients(mean, *normal_equations(self))
        return Trend(mean.basis, root, True)

    def enough_neighbors(self) -> int:
        return self.worthwhile_neighbors(FOR_Y + FOR_F, loses_density)

    @torch.no_grad()
    def variances(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]) -> tuple[Tensor, Tensor, Tensor]:
        """Also the log densities of the observations of f at the rows."""
        at, positions = distinct_rows(near)
        observed, (obs, noise) = self.observations(at), self.observations(rows)
        loc, var = self.given_neighbors(self.rows.x[rows], at, positions, rows, observed)
        return var, observed[1].mean(), Normal(loc, (var + noise).sqrt(), validate_args=False).log_prob(obs)

    def moments(self, x_new: Float[Tensor, "P D"], near: Any) -> tuple[Tensor, Tensor]:
        """O(P K^3)."""
        at, positions = distinct_rows(near)
        loc, var, rest = self._conditional(x_new, at, positions)
        if self.bound.trend is not None:
            var = var + self.bound.trend.variance(rest)
        return loc, var.expand(torch.broadcast_shapes(loc.shape, var.shape))

    def joint(self, x_new: Float[Tensor, "P D"], near: Any, count: int) -> Float[Tensor, "S *L P"]:
        """Each new value given the observations and the earlier new values nearest to it; O(P K^3), O(P K) per draw."""
        bound, (obs, noise) = self.bound, self.observations(self.rows.own)
        residual = obs - self.rows.mean(bound)
        return bound.mean(x_new) + draws_given_observations(bound, self.rows.x, x_new, near, residual, noise, count)

    def observations_of_u(self, at: Int[Tensor, " U"]) -> tuple[Tensor, Tensor]:
        obs, noise = self.observations(at)
        return obs - self.rows.mean(self.bound, at), noise

    # Leave one out.

    def others(self, rows: Int[Tensor, " I"], num_neighbors: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """The rows, the distinct rows among the nearest others of all, and the positions of these among them."""
        self._check_neighbors(num_neighbors, self.rows.num_rows - 1)
        return rows, *distinct_rows(self.graph.others(num_neighbors, rows))

    def leave_one_out(self, others: tuple[Tensor, Tensor, Tensor]) -> Float[Tensor, "*T I"]:
        """Given the observations of the nearest others; O(I K^3).

        Coefficients of the mean are integrated over given these others as well: with all of them, as under the exact
        process (:mod:`pyro_nngp.coefficients`).
        """
        return self.log_density(*others)

    def loo_entries(self, others: tuple[Tensor, Tensor, Tensor]) -> int | None:
        return others[2].numel()

    def log_density(
        self, rows: Tensor, at: Tensor, positions: Tensor, observed: tuple[Tensor, Tensor] | None = None
    ) -> Float[Tensor, "*T I"]:
        """Log densities of y at some rows, given observations `at` rows, which `positions` index.

        If coefficients of the mean are integrated over, the row's observation is left out of their posterior.
        """
        loc, var = torch.broadcast_tensors(*self._left_out(rows, at, positions, observed))
        likelihood: Likelihood = self.bound.likelihood
        loc, var = (latents_first(likelihood, value) for value in (loc, var))
        density = self.response(loc, var, self.rows.by_row(rows)).log_prob(self.rows.targets(rows))
        return density[..., 0, :] if likelihood.num_latents is not None and loc.dim() > 2 else density

    def _left_out(self, rows: Tensor, at: Tensor, positions: Tensor, observed: Any = None) -> tuple[Tensor, Tensor]:
        """Moments of f at some rows, given observations as in :meth:`log_density`."""
        loc, var, rest = self._conditional(self.rows.x[rows], at, positions, rows, observed)
        if self.bound.trend is None:
            return loc, var
        obs, noise = self.observations(rows)
        shift, added = self.bound.trend.left_out(rest, obs - loc, var, noise)
        return loc + shift, var + added

    @torch.no_grad()
    def standardized_residuals(self, rows: Int[Tensor, " B"]) -> tuple[Tensor, Tensor] | None:
        """Residuals of y from its mean given the nearest others, over their standard deviations; None unless Gaussian.

        Returns:
            The residuals, (*T, B), and the parts of their variances that are noise. O(K^3) per row.
        """
        if not (self.rows.is_whole and self.bound.likelihood.is_gaussian):
            return None
        obs, noise = self.observations(rows)
        loc, var = self._left_out(*self.others(rows, None))
        return (obs - loc) / (var + noise).sqrt(), noise / (var + noise)

    @torch.no_grad()
    def duplicate_dependence(self, rows: Int[Tensor, " B"]) -> DuplicateDependence | None:
        """Part of the densities of some rows that near copies of them explain; None for counts, or without copies.

        Cost: O(K^3) per row.
        """
        likelihood = self.bound.likelihood
        duplicates = find_near_duplicates(self.graph, rows) if self.rows.is_whole else None
        if duplicates is None or not (likelihood.is_gaussian or isinstance(likelihood, Bernoulli | Categorical)):
            return None
        rows = rows[duplicates.rows]
        at, positions = distinct_rows(duplicates.near)
        observed = self.observations(at)
        without = torch.where(duplicates.among, -1, positions)
        losses = [-float(self.log_density(rows, at, near, observed).mean()) for near in (positions, without)]
        square = None
        if likelihood.is_gaussian:
            obs, noise = self.observations(rows)
            loc, var = self.given_neighbors(self.rows.x[rows], at, without, rows, observed)
            square = float(((obs - loc).square() / (var + noise)).mean())
        return DuplicateDependence(len(rows) / len(duplicates.rows), losses[1] - losses[0], losses[0], square)


__all__ = ["Observed", "Posterior"]
