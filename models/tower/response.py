r"""Base classes of methods that condition on noisy observations of the neighbors: moments, joint draws, refreshing.

The latent function is integrated out. With targets (or pseudo-observations) :math:`\tilde y` and their noise variances
:math:`\delta` at the training points (:mod:`pyro_nngp.likelihoods.augmentation`), mean function :math:`\mu`, and
weights w and variance v from :mod:`pyro_nngp.conditionals.nearest_neighbor` with noise :math:`\delta` on the neighbors,

.. math:: f(x) \mid \tilde y_n \sim N\big(\mu(x) + w^\top (\tilde y_n - \mu(x_n)),\; v\big).

Cost: O(B K^3) per batch, for each latent function whose noise differs. Symbols: N data points, U rows of a batch and
its neighbors, B points, K neighbors, P new points, L latent functions.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from pyro_nngp._checks import check_batch, fail
from pyro_nngp._indexing import values_at
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributions.nngp import draw_appended
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from pyro_nngp.linalg import add_diagonal, cholesky, factor_solve
from pyro_nngp.means import BasisMean, LinearMean, condition_coefficients, trend_variance
from pyro_nngp.models.tower.leave_one_out import Densities, Draw, LeaveOneOutMethod
from pyro_nngp.models.tower.neighbor_choice import NeighborChoice
from pyro_nngp.models.tower.sites import latents_first
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.neighbors.choice_of_k import MOST_NEIGHBORS, WORTHWHILE
from pyro_nngp.neighbors.table import distinct_rows
from pyro_nngp.plausibility.near_duplicates import DuplicateDependence, find_near_duplicates

TREND_POINTS = 4096


class ResponseMethod(NeighborChoice):
    """A method that predicts f from noisy observations of its neighbors, up to N of them per new point.

    A subclass sets ``graph``, defines ``model`` and ``guide``, and overrides :meth:`observations` unless targets are
    Gaussian observations.
    """

    _has_fantasies = False  # whether outputs are fantasies of one output, which have its coefficients of the mean
    generative = False
    solves_coefficients = True
    can_distribute = True

    def distribute(self, data: ShardedData, choose: bool) -> None:
        if self._has_posterior:
            expectation, cure = "without a prior on several processes", "Pass LinearMean(D) without one."
            fail(type(self).__name__, "mean", expectation, type(self.mean).__name__, cure, NotImplementedError)
        super().distribute(data, choose)

    @pyro_entry
    @torch.no_grad()
    def refresh_neighbors(self) -> None:
        """Find the neighbors again under the kernel's present lengthscales.

        Kernels without one lengthscale per input keep the Euclidean metric.
        """
        self.refresh_table()
        if self.shard is not None:
            self.take_rows()

    def append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super().append_rows(x, y, by_row)
        self.graph.append(x)
        if self._has_posterior and isinstance(self.likelihood, Gaussian) and not self._has_fantasies:
            self.solve_mean()

    def repeat_targets(self, where: str, y: Tensor) -> Tensor:
        if not isinstance(self.likelihood, Gaussian) or y.shape[0] < 1:
            return super().repeat_targets(where, y)
        self.latent_shape, self._has_fantasies = (len(y),), True
        self.y = cast(Tensor, self.y)[:, None].expand(-1, len(y))
        return y.mT

    def plan(self, x_new: Tensor, num_neighbors: int | None) -> Tensor:
        """Rows of the nearest training points."""
        self._check_neighbors(num_neighbors, self.num_data)
        return self.graph.query(x_new, self.neighbors_or_default(num_neighbors))

    @pyro_entry
    @torch.no_grad()
    def prediction_neighbors(self) -> int:
        """The default number of neighbors in predictions, at the present hyperparameters.

        It is that of training, doubled up to 512 while that lowers the predictive variance of y at 64 training points,
        given the others, by more than 1 % on average.
        """
        return self._enough_neighbors(MOST_NEIGHBORS, WORTHWHILE)

    @pyro_entry
    @torch.no_grad()
    def log_variances(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]) -> Float[Tensor, "*L B"]:
        self._place_medians()
        own, positions = distinct_rows(near)
        observations = self.observations(self.likelihood_at(own), own, None)
        _, var = self._given_neighbors(self.x[rows], own, positions, *observations)
        return (var + observations[1].mean()).log()

    @property
    def can_solve_mean(self) -> bool:
        """Whether :meth:`solve_mean` applies: a mean that is linear in its coefficients, and Gaussian data.

        Coefficients with normal priors are solved for with any data, given auxiliary variables.
        """
        if not isinstance(self.mean, BasisMean):
            return False
        return self.mean.has_posterior or (isinstance(self.likelihood, Gaussian) and self.mean.is_free)

    @pyro_entry
    @torch.no_grad()
    def solve_mean(self) -> None:
        r"""Set the coefficients of the mean to their generalized least squares estimate, given the neighbors.

        With basis functions b, weights w of preceding neighbors and variances v of the response model,

        .. math:: \sum_j a_j a_j^\top \beta / v_j = \sum_j a_j (y_j - w_j^\top y_{n(j)}) / v_j, \qquad
           a_j = b(x_j) - \textstyle\sum_k w_{jk}\, b(x_{n(j)k}),

        over the first 4,096 points in a random ordering: later points, with neighbors all around, say almost nothing
        about the level. Coefficients with a normal prior get their posterior instead, from all points: the prior's
        precision is added to the left side, whose inverse is the covariance.

        Raises:
            ValueError: unless :attr:`can_solve_mean`.

        Cost: O(K^3) for each of these points.
        """
        if not self.can_solve_mean:
            where, cure = f"{type(self).__name__}.solve", "Train by gradients."
            expectation = "with Gaussian noise and a ConstantMean or LinearMean without prior, or with a normal one"
            fail(where, "model", expectation, f"{type(self.mean).__name__}", cure)
        self._place_medians()
        mean = cast(BasisMean, self.mean)
        view, rows, near = self._preceding()
        x, (obs, noise) = view.x[rows], view._observations_at(rows)
        if view.offset is not None:
            obs = obs - view.offset[rows].movedim(0, -1)
        w, var = graph_conditional(self.kernel, x, x, near, noise, self.jitter)
        near, scale = near.clamp(min=0), (var + noise).double().rsqrt()
        basis, w = mean.basis(x).double(), w.double()
        a = (basis - (w[..., None, :] @ basis[near])[..., 0, :]) * scale[..., None]
        b = (obs - (w * obs[..., near]).sum(-1)).double() * scale
        normal, right = a.mT @ a, (a.mT @ b[..., None])[..., 0]  # (*L, p, p), (*L, p)
        normal = normal.expand(*right.shape, normal.shape[-1])
        if mean.has_posterior:
            condition_coefficients(cast(LinearMean, mean), normal, right)
            return
        if right.dim() > 1 and mean.num_functions is None:  # all outputs have the same mean
            normal, right = normal.sum(0), right.sum(0)
        nugget = 1e-9 * normal.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(torch.float32).tiny)
        tril = cholesky(add_diagonal(normal, nugget), 0.0)
        solution = factor_solve(tril, right[..., None])[..., 0]
        mean.assign(torch.atleast_2d(solution).mT)

    def _solved_mean(self) -> list[torch.nn.Parameter]:
        """The parameters that :meth:`solve_mean` sets."""
        return cast(BasisMean, self.mean).solved_parameters() if self.can_solve_mean else []

    @property
    def _trend_points(self) -> int:
        """How many points :meth:`solve_mean` takes."""
        return self.num_rows if self._has_posterior else min(TREND_POINTS, self.num_rows)

    def _preceding(self) -> tuple["ResponseMethod", Tensor, Tensor]:
        """Some points in a random ordering, and the positions among them of the nearest predecessors of each.

        They are rows of the first value: this method, or a copy on these rows of all processes.
        """
        generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(self.num_rows, generator=generator)[: self._trend_points].to(self.x.device)
        if self.shard is not None:
            view = self.at_numbers(self.shard.numbers_of(rows.cpu()), True, self.neighbor_metric())
            return view, torch.arange(len(rows), device=self.x.device), view.graph.neighbors
        k = min(self.graph.num_neighbors, len(rows) - 1)
        graph = NeighborGraph(self.x[rows], k, "given", metric=self.neighbor_metric(), progress=False)
        return self, rows, graph.neighbors

    def residuals(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        obs, noise = self.observations(self.likelihood_at(rows), rows, None)
        return obs - self._mean_at(self.x[rows], rows), noise

    def moments(self, x_new: Tensor, plan: Tensor, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """O(P K^3) for each latent function whose noise differs."""
        rows, positions = distinct_rows(plan)
        obs, noise = self.observations(self.likelihood_at(rows), rows, draw)
        is_uncertain = draw is None and self._has_posterior
        loc, var = self._given_neighbors(x_new, rows, positions, obs, noise, uncertain_trend=is_uncertain)
        return loc, var.expand(loc.shape)

    def with_neighbors_of(
        self, idx: Tensor | None, num_neighbors: int | None
    ) -> tuple[LeaveOneOutMethod, Tensor | None, int | None]:
        if self.shard is None:
            return self, idx, num_neighbors
        if idx is not None:
            check_batch(f"{type(self).__name__}.loo", "idx", idx, self.num_data)
        k = self.graph.num_neighbors if num_neighbors is None else num_neighbors
        return *self.with_others(idx, k), k

    def leave_one_out(self, rows: Tensor, num_neighbors: int | None, sampled: bool) -> Densities:
        """Given the observations of the nearest other points; O(I K^3)."""
        near = self.graph.others(num_neighbors, rows)
        union, positions = distinct_rows(near)

        def densities(draw: Draw | None) -> Tensor:
            return self._log_density(rows, union, positions, *self.observations(self.likelihood_at(union), union, draw))

        return densities

    def _log_density(self, rows: Tensor, union: Tensor, positions: Tensor, obs: Tensor, noise: Tensor) -> Tensor:
        """Log densities of y at some rows, given observations at `union`, which `positions` index."""
        loc, var = self._given_neighbors(self.x[rows], union, positions, obs, noise, rows)
        bound = self.likelihood_at(rows)
        loc, var = (latents_first(bound, value) for value in torch.broadcast_tensors(loc, var))
        found = self._predictive_of_y(loc, var, self.by_row(rows)).log_prob(self._values(rows))
        return found[..., 0, :] if bound.num_latents is not None and loc.dim() > 2 else found

    @pyro_entry
    @torch.no_grad()
    def duplicate_dependence(self, rows: Int[Tensor, " B"]) -> DuplicateDependence | None:
        """Dependence of the densities of some rows on near duplicates; None for counts, or if no row has one.

        Cost: O(K^3) per row.
        """
        likelihood = cast(Likelihood, self.likelihood)
        duplicates = None if self.shard is not None else find_near_duplicates(self.graph, rows)
        if duplicates is None or not (likelihood.is_gaussian or isinstance(likelihood, Bernoulli | Categorical)):
            return None
        self._place_medians()
        rows = rows[duplicates.rows]
        union, positions = distinct_rows(duplicates.near)
        observed = self.observations(self.likelihood_at(union), union, None)
        losses, square = [], None
        for near in (positions, torch.where(duplicates.among, -1, positions)):
            losses.append(-float(self._log_density(rows, union, near, *observed).mean()))
        if likelihood.is_gaussian:
            obs, noise = self.observations(self.likelihood_at(rows), rows, None)
            loc, var = self._given_neighbors(self.x[rows], union, near, *observed, rows)
            square = float(((obs - loc).square() / (var + noise)).mean())
        return DuplicateDependence(len(rows) / len(duplicates.rows), losses[1] - losses[0], losses[0], square)

    def loo_entries(self, rows: Tensor | None, num_neighbors: int | None) -> int:
        """Those of the weights."""
        size = self.num_data if rows is None else len(rows)
        return size * (self.graph.num_neighbors if num_neighbors is None else num_neighbors)

    def joint_plan(self, x_new: Tensor, num_neighbors: int | None, seed: int) -> Tensor:
        """The nearest training points and earlier new points."""
        self._check_neighbors(num_neighbors, self.num_data + len(x_new) - 1)
        k = self.neighbors_or_default(num_neighbors)
        return self.graph.extend(x_new, k, seed)[1]

    def joint_draws(self, x_new: Tensor, plan: Tensor, count: int, draw: Draw | None) -> Tensor:
        """Each new value given the observations and the earlier new values nearest to it; O(P K^3), O(P K) per draw."""
        every = torch.arange(self.num_data, device=self.x.device)
        obs, noise = self.observations(self.likelihood_at(), every, draw)
        deviation = draws_given_observations(
            self.covariance(),
            self.x,
            x_new,
            plan,
            obs - self._mean_at(self.x, every),
            noise,
            count,
            self.latent_shape,
            self.jitter,
        )
        return deviation + self._mean_at(x_new)

    def _bound(self) -> Likelihood:
        """The likelihood with its hyperparameters read."""
        return cast(Likelihood, self.likelihood).bind()

    def _values(self, rows: Tensor | None = None) -> Tensor:
        """y at some rows (None: all), outputs first."""
        return cast(Tensor, self._targets(rows))

    def observations(self, likelihood: Likelihood, rows: Int[Tensor, " U"], draw: Draw | None) -> tuple[Tensor, Tensor]:
        """Gaussian observations of f at some rows, (*L, U), and their noise variances, (U,) or (L, U).

        Auxiliary variables, if any, are at their guide, or at a posterior draw.
        """
        self.undefined("observations")

    @pyro_entry
    @torch.no_grad()
    def _observations_at(self, rows: Int[Tensor, " U"]) -> tuple[Tensor, Tensor]:
        """:meth:`observations` under the guide, at its medians."""
        self._place_medians()
        return self.observations(self.likelihood_at(rows), rows, None)

    def _given_neighbors(
        self,
        x: Tensor,
        rows: Tensor,
        neighbors: Tensor,
        obs: Tensor,
        noise: Tensor,
        own: Tensor | slice | None = None,
        uncertain_trend: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Moments of f at x, (*L, B) and (B,) or (L, B), given observations at `rows`, which `neighbors` index.

        `own` are the rows of x among the data, whose offset counts; None for new points. With `uncertain_trend` the
        variance is also that of the coefficients of the mean: of their basis less its prediction by neighbors.
        """
        near = self.x.index_select(0, rows)
        w, var = graph_conditional(self.covariance(), x, near, neighbors, noise, self.jitter)
        residual = obs - self._mean_at(near, rows)
        if uncertain_trend:
            mean = cast(LinearMean, self.mean)
            basis = mean.basis(near)[neighbors.clamp(min=0)]
            var = var + trend_variance(mean, mean.basis(x) - (w[..., None, :] @ basis)[..., 0, :])
        return self._mean_at(x, own) + (w * values_at(residual, neighbors)).sum(-1), var


def draws_given_observations(
    kernel: Any,
    x: Float[Tensor, "N D"],
    x_new: Float[Tensor, "P D"],
    plan: Int[Tensor, "P K"],
    residual: Float[Tensor, "... N"],
    noise: Float[Tensor, "... N"],
    count: int,
    latent_shape: tuple[int, ...],
    jitter: float,
) -> Float[Tensor, "S ..."]:
    """Joint draws of a zero-mean process at new points, each given nearby observations and earlier new values.

    Args:
        kernel: covariance function.
        x: the observed points.
        x_new: new points.
        plan: from :meth:`~pyro_nngp.neighbors.graph.NeighborGraph.extend`.
        residual: observations minus the mean function; one set for each latent function, or for all; those of sets of
            hyperparameters in front, as of `noise` and the kernel.
        noise: their noise variances.
        count: S.
        latent_shape: () or (L,).
        jitter: relative nugget.

    Cost: O(P K^3) once for each set of noises, then O(P K) per draw.
    """
    n, p = len(x), len(plan)
    w, var = graph_conditional(kernel, x_new, torch.cat([x, x_new]), plan, pad(noise, (0, p)), jitter)
    near = pad(residual, (0, p))[..., plan.clamp(min=0)]  # 0 at new points
    loc = (w * near).sum(-1)
    loc = loc.expand(count, *torch.broadcast_shapes(loc.shape, (*latent_shape, p)))
    return draw_appended(w, var, plan, loc, n)
