r"""Variational nearest-neighbor Gaussian process (Wu, Pleiss, Cunningham 2022).

A nearest-neighbor prior over M inducing values, data points conditioned on their K nearest, and a Gaussian q(u):

.. math:: \mathrm{ELBO} \approx \frac{N}{|I|} \sum_{i \in I} E_{q(f_i)} \log p(y_i \mid f_i)
   - \frac{M}{|J|} \sum_{j \in J} KL_j \qquad\text{(eq. 19)}

Differs from the paper: the minibatch estimate is unbiased for every batch, padded first points included; the expressive
family (appendix B) is a sparse Cholesky factor with the divergence of :mod:`pyro_nngp.distributions.sparse_cholesky`,
since equations 32 and 37-40 are misprinted; neighbors follow the learned lengthscales when refreshed; a mean function;
q(u) may come from a network (:mod:`pyro_nngp.variational.amortized`), which the paper names as future work.

Cost per step: O((|I| + |J|) K^3), independent of N and M.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, cast

import pyro
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.nn import pyro_method
from torch import Tensor, nn

from pyro_nngp._checks import check_num_neighbors, fail, warn
from pyro_nngp._indexing import values_at
from pyro_nngp._kinds import check_flags, check_steps
from pyro_nngp._shared import shared
from pyro_nngp.bound import Bound
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.table import ShardedGraph, ShardedNeighborhoods
from pyro_nngp.distributions import NNGP, SparseCholeskyNormal
from pyro_nngp.hyperparameters import scaled
from pyro_nngp.hyperparameters.values import stacked_sets
from pyro_nngp.inducing.points import inducing_points
from pyro_nngp.kernels.metric import column_scale
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.models.base import neighbor_choice
from pyro_nngp.models.base.arguments import check_family
from pyro_nngp.models.base.draws import Draw
from pyro_nngp.models.base.evidence import has_evidence, log_density_given
from pyro_nngp.models.base.extension import warn_untrained
from pyro_nngp.models.base.information import MOST_ROWS, Information, of_conditionals, of_evidence
from pyro_nngp.models.base.latent import LatentPosterior
from pyro_nngp.models.base.method import Method
from pyro_nngp.models.base.neighbor_choice import USUAL_NEIGHBORS, choose_neighbors, first_neighbors
from pyro_nngp.models.base.profile import Profile
from pyro_nngp.models.base.program import Program
from pyro_nngp.models.base.several_processes import distribute
from pyro_nngp.neighbors import Batch, NeighborGraph, SymmetricGraph
from pyro_nngp.rows import Part
from pyro_nngp.variational import AmortizedGaussian, LocalGaussian, ObservedGaussian
from pyro_nngp.variational.encoders.base import check_encoder
from pyro_nngp.variational.families import Amortized, MeanField, PseudoObservations, SparseCholesky
from pyro_nngp.variational.family import Family, through
from pyro_nngp.variational.mean_coefficients import parameters_but_level

Guide: TypeAlias = PseudoObservations | MeanField | SparseCholesky | Amortized

_ENCODER_JITTER = 0.01  # means computed one neighborhood at a time deviate from a stiffer prior by too much


class VNNGP(Method):
    r"""Variational nearest-neighbor Gaussian process.

    Generative model, for an ordering of M inducing points z and K nearest neighbors:

    .. math::
        u_j \mid u_{n(j)} &\sim N(w_j^\top u_{n(j)}, v_j), \quad j = 1..M, \\
        f_i \mid u_{n(i)} &\sim N(\mu(x_i) + w_i^\top u_{n(i)}, v_i), \quad i = 1..N, \\
        y_i \mid f_i &\sim p(y_i \mid f_i).

    With inducing points at the data (the default) f_i is u_i plus the mean. Sites: ``u``, ``f``, ``y``, and one for
    each hyperparameter that has a prior (:class:`~pyro.nn.PyroSample` attributes of kernel, mean and likelihood,
    assigned before the model is built).

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs of similar spread: independent functions of one kernel, and one noise.
            None where the model returns f for use in a larger program.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern of a
            learned smoothness, for labels and below 100 rows Matern52, with one lengthscale per column. Unset
            hyperparameters start from the data (:mod:`pyro_nngp.starts.from_data`).
        likelihood: p(y | f); None is Gaussian, or without y makes ``model`` return f at the batch.
        num_neighbors: K, for the prior and for the data; None is 32, for pseudo-observations of Gaussian data doubled
            up to 128 where that lowers predictive variances by more than 10 %
            (:func:`~pyro_nngp.models.base.neighbor_choice.choose_neighbors`).
        inducing: None puts the inducing points at the data; an int M < N starts them by k-means; a tensor gives them.
        learn_inducing: whether the inducing points are parameters.
        guide: family of q(u). :class:`~pyro_nngp.variational.PseudoObservations` is the Gaussian posterior of the
            pseudo-observations that :meth:`solve` finds, whose intervals cover f; it needs a likelihood and inducing
            points at the data. :class:`~pyro_nngp.variational.MeanField` is the paper's; its variances come from
            each value given all others, so that 95 % intervals cover a few percent of a smooth f.
            :class:`~pyro_nngp.variational.SparseCholesky` has a sparse factor.
            :class:`~pyro_nngp.variational.Amortized` has a network that computes q(u) from the data around each point,
            in place of one set of parameters per point; it needs what pseudo-observations need. None is
            pseudo-observations where they apply, else mean-field.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``, such as ``torch.nn.Linear(D, 1)``; None is a learnable
            constant.
        ordering: ordering of the inducing points: "random", "maximin", "coordinate", "principal", "given" or a
            permutation.
        jitter: relative nugget; None takes 1e-6, with an encoder 0.01, since no network can follow a stiffer prior.
        metric: metric of neighbors: lengthscales, or a distance function; None takes the metric of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights, trials, limits: of each row, as in :class:`~pyro_nngp.models.base.Method`.
        seed: seed of the ordering and of k-means.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, K out of range, targets
            outside the support of the likelihood.

    Reference: Wu, Pleiss, Cunningham (2022), "Variational nearest neighbor Gaussian process", ICML.
    """

    q: Family
    data_neighbors: Any
    _graph_type: type[NeighborGraph] = NeighborGraph
    _points = ("z",)
    _distribute = distribute

    @from_tables
    def __init__(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Float[Tensor, "N *T"] | Int[Tensor, "N *T"] | Table | None,
        kernel: Any = None,
        likelihood: Likelihood | None = None,
        *,
        num_neighbors: int | None = None,
        inducing: int | Float[Tensor, "M D"] | None = None,
        learn_inducing: bool = False,
        guide: Guide | None = None,
        mean: Callable | None = None,
        ordering: str | Int[Tensor, " M"] = "random",
        jitter: float | None = None,
        metric: Float[Tensor, " *D"] | Callable | None = None,
        start: Any = None,
        offset: Float[Tensor, "N *L"] | Table | None = None,
        weights: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        trials: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        limits: Float[Tensor, " N"] | Table | None = None,
        seed: int = 0,
    ) -> None:
        by_row = {"offset": offset, "weights": weights, "trials": trials, "limits": limits}
        jitter = _ENCODER_JITTER if jitter is None and isinstance(guide, Amortized) else jitter
        super().__init__(x, y, kernel, likelihood, mean, jitter, metric, start, **by_row)
        where = type(self).__name__
        check_flags(where, learn_inducing=learn_inducing)
        if inducing is None and learn_inducing:
            fail(where, "learn_inducing", "False with inducing points at the data", True, "Give `inducing` an M < N.")
        guide = _checked_guide(where, guide, self.likelihood is not None, inducing is None)
        z = x if inducing is None else inducing_points(where, x, inducing, seed)
        if learn_inducing:
            self.z = scaled(z, column_scale(x))
        if inducing is not None:
            self._own_state = ("q", "graph")
        self._start(solves_coefficients=isinstance(guide, PseudoObservations))
        k = first_neighbors(where, num_neighbors, z)
        self.graph = self._graph_type(z, k, ordering, seed=seed, metric=self._neighbor_metric())
        self.register_buffer("data_neighbors", None if inducing is None else self.graph.query(x, k))
        self.q = self._built(guide)
        if num_neighbors is None and self._chooses_neighbors:
            choose_neighbors(self)

    def _built(self, guide: Guide) -> Family:
        """q(u) of a family, at its start."""
        if isinstance(guide, PseudoObservations):
            shape = *self.latent_shape, self.graph.num_points
            return ObservedGaussian(shape, self._modules.get("mean"), parameters_but_level(self), self.x)
        if isinstance(guide, Amortized):
            given = LatentPosterior(self.rows, self.graph, self.bound(), Family())
            return AmortizedGaussian(guide.encoder, given, guide.num_columns or 0)
        pattern = None
        if isinstance(guide, SparseCholesky):
            count = self.graph.num_neighbors if guide.num_columns is None else guide.num_columns
            check_num_neighbors(type(self).__name__, count, self.graph.num_neighbors, "guide.num_columns")
            pattern = self.graph.neighbors[:, :count].clone()
        size, count = self.graph.num_points, self.num_latents
        return LocalGaussian(size, pattern, count, guide.loc, guide.scale, self._unit, like=self.x)

    @property
    def num_inducing(self) -> int:
        """M."""
        return self.graph.num_points

    # The model and its guide.

    @pyro_method
    def model(
        self, idx: Int[Tensor, " I"] | None = None, inducing_idx: Int[Tensor, " J"] | Batch | None = None
    ) -> Tensor:
        """The generative model, on a batch of data points and a batch of inducing points.

        Args:
            idx: rows of the data; None is all.
            inducing_idx: rows of the inducing points that count in log p(u); None is `idx` with inducing points at the
                data, all of them otherwise. Or a batch from :meth:`batch_args`, built once for model and guide.

        Returns:
            y at the batch, or f at the batch when there is no likelihood. Latent dimensions lead: (..., I).
        """
        program, batch = Program.model(self, idx), self._batch(idx, inducing_idx)
        # p(u) = prod_j p(u_j | u_n(j)) (eq. 9), N(w_j^T u_n(j), v_j) each (eq. 17); J counts M / |J| times (eq. 19)
        prior = self._prior(program.bound, batch)
        shape = torch.broadcast_shapes(prior.batch_shape, self.latent_shape)
        with poutine.scale(scale=batch.scale), self._of_all():
            u = pyro.sample(self.site("u"), prior.expand(shape).to_event(len(self.latent_shape)))
        # f_i | u_n(i) ~ N(mu_i + w_i^T u_n(i), v_i) (eq. 9), y_i ~ p(y_i | f_i) (eq. 7); I counts N / |I| times
        return program.observe(self._f_given(program, u, batch))

    @pyro_method
    def guide(
        self, idx: Int[Tensor, " I"] | None = None, inducing_idx: Int[Tensor, " J"] | Batch | None = None
    ) -> Tensor:
        """q(u), q(f | u) = p(f | u) and the hyperparameters' guide, on the batches of :meth:`model`; returns f."""
        program, batch = Program.guide(self, idx), self._batch(idx, inducing_idx)
        q = self._q_at(program, batch)  # mean-field prod_j N(m_j, s_j) (eq. 10), N(m, L L^T) (eq. 29), or another
        with poutine.scale(scale=batch.scale), self._of_all():
            u = pyro.sample(self.site("u"), q.to_event(len(self.latent_shape)))
        return self._f_given(program, u, batch, q)

    def _prior(self, bound: Bound, batch: Batch) -> NNGP:
        """p(u) outside of the plates, with a dimension for latent functions where hyperparameters have batches."""
        kernel, points = bound.covariance.shifted(len(self.latent_shape)), self._inducing(bound)
        return NNGP(kernel, self.graph, batch, jitter=bound.jitter, points=points)

    def _inducing(self, bound: Bound) -> Float[Tensor, "M D"]:
        """The inducing points, at their present places."""
        z = bound.others["z"]
        return self.graph.x if z is None else z

    def _q_at(self, program: Program, batch: Batch) -> Any:
        """q(u) on a batch, at one set of hyperparameters after the other where the family takes one."""
        if self.q.batches_sets:
            return self.q.at_batch(self.posterior(program.bound), self._prior(program.bound, batch))
        bounds, sets = program.sets()
        each: list[Any] = [self.q.at_batch(self.posterior(bound), self._prior(bound, batch)) for bound in bounds]
        if not sets:
            return each[0]
        loc, scale, weights = (stacked_sets([getattr(q, name) for q in each], sets) for name in each[0].batched)
        return SparseCholeskyNormal(loc, scale, weights, each[0].pattern, each[0].rows, each[0].targets)

    def _f_given(self, program: Program, u: Tensor, batch: Batch, q: Any = None) -> Tensor:
        """The site f given u; in the guide (q given) it has its marginal q(f_i) (eq. 11), for the integrating ELBO."""
        bound, positions, event_dim = program.bound, cast(Tensor, batch.extra), 1 + len(self.latent_shape)
        mean, u = program.mean(), program.outside(u, event_dim)
        if self.data_neighbors is None:  # f = mu + u
            marginal = None
            if q is not None:
                loc, variance = (program.outside(value, event_dim) for value in (q.loc, q.variance))
                marginal = mean + values_at(loc, positions), values_at(variance, positions)
            return program.record_f(mean + values_at(u, positions), marginal)
        near, points = self.data_neighbors[program.at], self._inducing(bound)
        w, var = shared(
            (self, "f"), lambda: graph_conditional(bound.at_data, program.x, points, near, jitter=bound.jitter)
        )
        loc = mean + (w * values_at(u, positions)).sum(-1)
        return program.sample_f(loc, var, None if q is None else through(q, w, var, positions, mean))

    def _batch(self, idx: Tensor | None, inducing_idx: Tensor | Batch | None) -> Batch:
        """Inducing batch, with the rows that the data batch needs as its `extra`."""
        if isinstance(inducing_idx, Batch):
            return inducing_idx
        if self.data_neighbors is None:
            rows = torch.arange(self.num_data, device=self.x.device) if idx is None else idx
            return self.graph.batch(idx if inducing_idx is None else inducing_idx, extra=rows)
        return self.graph.batch(inducing_idx, extra=self.data_neighbors if idx is None else self.data_neighbors[idx])

    def batch_args(
        self, idx: Int[Tensor, " I"] | None, generator: torch.Generator
    ) -> tuple[Tensor | None, Batch | None]:
        """Arguments of model and guide for a minibatch: its rows, and the batch of inducing points for both.

        Inducing points that are not the data are drawn at random.
        """
        if self.data_neighbors is None or idx is None or self.num_inducing <= len(idx):
            return idx, self._batch(idx, None)
        drawn = torch.randint(self.num_inducing, (2 * len(idx),), generator=generator, device="cpu")
        drawn = drawn.unique()  # O(|I|), whatever M
        rows = drawn[torch.randperm(len(drawn), generator=generator, device="cpu")[: len(idx)]].to(idx.device)
        return idx, self._batch(idx, rows)

    def _of_all(self) -> AbstractContextManager:
        """On several processes, a context for inducing values that all of them have."""
        return nullcontext() if self.data_neighbors is None else self.rows.shared()

    # The posterior and its optimum.

    def posterior(self, bound: Bound, draw: Draw | None = None, part: Part | None = None) -> LatentPosterior:
        """f under q(u), or given the values of u in a draw."""
        rows, graph, q = (self.rows, self.graph, self.q) if part is None else (part.rows, part.graph, part.q)
        parameters = parameters_but_level(self) if isinstance(q, ObservedGaussian) else ()
        site, mean = self.site("u"), self._modules.get("mean")
        return LatentPosterior(rows, graph, bound, q, draw, site, self.data_neighbors, parameters, mean)

    @property
    def can_solve(self) -> bool:
        """Whether :meth:`solve` applies: with a likelihood, inducing points at the data, and no encoder."""
        return self.likelihood is not None and self.data_neighbors is None and self.q.can_solve

    @torch.no_grad()
    def solve(self, max_steps: int = 100, tolerance: float = 1e-3) -> None:
        """Set :meth:`solved_parameters` to their optimum for the present hyperparameters, without step sizes.

        A Gaussian likelihood takes one step, in closed form; others take natural-gradient steps, until means move by
        less than `tolerance` standard deviations.

        Args:
            max_steps: largest number of steps.
            tolerance: stop when means move by less, see above.

        Raises:
            ValueError: unless there is a likelihood, the inducing points are at the data, and there is no encoder.

        Cost: O(N K^3), then O(N K) per iteration of conjugate gradients and step; with a sparse factor also O(N K^3)
        per step and O(N K^2) memory.
        """
        if not self.can_solve:
            other = "an encoder" if self.data_neighbors is None else "other points"
            actual = "no likelihood" if self.likelihood is None else other
            expectation, cure = "with a likelihood, inducing points at the data and no encoder", "Train by gradients."
            fail(f"{type(self).__name__}.solve", "model", expectation, actual, cure)
        check_steps(f"{type(self).__name__}.solve", max_steps, tolerance)
        self.q.solve(lambda: self.posterior(self.bound()), max_steps, tolerance)

    @property
    def profile(self) -> Profile:
        """The largest bound over all q(u) as a function of the hyperparameters."""
        return Profile(self)

    def _information(self) -> Information | str:
        """Covariance of the estimates of hyperparameters with pseudo-observations.

        For Gaussian data from the information of the conditional densities of the response, as of ``Vecchia``; both are
        approximations of the same evidence. For other data from differences of the gradient of the evidence
        (:attr:`profile`), at most of 10,000 rows, for one to two times the time of a fit.
        """
        if not self.can_solve or not isinstance(self.q, ObservedGaussian):
            return super()._information()
        if self.likelihood.is_gaussian:
            return of_conditionals(self)
        return of_evidence(self) if self.num_data <= MOST_ROWS and self.profile.applies else super()._information()

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets: all of q(u), or the level of a constant mean function."""
        return self.q.solved_parameters(self._modules.get("mean"))

    def _warn_of_intervals(self) -> None:
        """Warn of a mean-field q(u) for data for which no log evidence tells of it."""
        mean_field = isinstance(self.q, LocalGaussian) and self.q.pattern is None
        if mean_field and self.likelihood is not None and not self.likelihood.is_gaussian:
            name, data = type(self).__name__, type(self.likelihood).__name__
            warn(
                f"{name}: intervals of f from {data} data by a mean-field q(u) are not reliable: 95 % ones may cover a "
                "few percent of it, since f may be explained away. Leave guide=MeanField() and `inducing` out."
            )

    @torch.no_grad()
    def log_evidence(self, rows: Int[Tensor, " B"]) -> Tensor | None:
        """Mean log density of the data at some rows given those at their predecessors, at the present hyperparameters.

        Vecchia's approximation of the log evidence that the bound of q(u) is of; the exact one for K = N - 1. None
        with pseudo-observations, on which q(u) does not depend, with inducing points elsewhere, and where
        :func:`~pyro_nngp.models.base.evidence.has_evidence` is False.

        Cost: O(K^3) per row.
        """
        if self.data_neighbors is not None or isinstance(self.q, ObservedGaussian) or not has_evidence(self):
            return None
        bound, batch, data = self.bound(), self.graph.batch(rows), self.rows
        noise = data.likelihood(bound, batch.rows).variance.expand(len(batch.rows))
        residual = data.targets(batch.rows) - data.mean(bound, batch.rows)
        points = self.x[batch.rows], batch.targets, batch.neighbors
        return log_density_given(bound.covariance, *points, residual, noise, bound.jitter).mean()

    # Changes of neighbors and data.

    @property
    def _chooses_neighbors(self) -> bool:
        """For pseudo-observations of Gaussian data: others have no precision yet, other families gain less by it."""
        return isinstance(self.q, ObservedGaussian) and self.likelihood.is_gaussian

    prediction_neighbors = neighbor_choice.prediction_neighbors

    def refresh_neighbors(self) -> None:
        """Find the neighbors again under the kernel's present lengthscales and inducing points.

        Kernels without one lengthscale per input keep the Euclidean metric.
        """
        z = self.bound().others["z"]
        if z is not None:
            self.graph.x.copy_(z.detach())
        neighbor_choice.refresh_neighbors(self)

    def _neighbors_changed(self) -> None:
        super()._neighbors_changed()
        if self.data_neighbors is not None:
            self.data_neighbors = self.graph.query(self.x, self.data_neighbors.shape[1])
        self.q.neighbors_changed(self.posterior(self.bound()))

    def _append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        loc, variance = self.forward(x)
        super()._append_rows(x, y, by_row)
        if self.data_neighbors is not None:
            self.data_neighbors = torch.cat([self.data_neighbors, self.graph.query(x, self.data_neighbors.shape[1])])
            warn_untrained(type(self).__name__)
            return
        self.graph.append(x)
        self.q.append(self.posterior(self.bound()), len(x), loc, variance)
        if self.can_solve:
            self.q.solve_again(lambda: self.posterior(self.bound()))

    @property
    def follows_rows(self) -> bool:
        """Whether a change of the rows needs no training: not with inducing points elsewhere."""
        return self.data_neighbors is None

    def _keep_rows(self, rows: Int[Tensor, " S"]) -> None:
        super()._keep_rows(rows)
        if self.data_neighbors is None:
            self.graph = self.graph.subset(rows)
        else:
            self.data_neighbors = self.data_neighbors[rows]
        self.q.follow_rows(lambda: self.posterior(self.bound()), self.can_solve)

    def _sharded_table(self, data: ShardedData, choose: bool) -> ShardedGraph | None:
        if self.data_neighbors is not None:
            return None
        k = USUAL_NEIGHBORS if choose and self._chooses_neighbors else self.graph.num_neighbors
        symmetric, k = isinstance(self.graph, SymmetricGraph), min(k, data.num_rows - 1)
        if not self.q.needs_neighborhoods:
            return ShardedGraph(data, k, self._neighbor_metric(), symmetric=symmetric)
        context = self.q.num_context
        return ShardedNeighborhoods(data, k, self._neighbor_metric(), symmetric=symmetric, num_context=context)

    def _distributed(self, choose: bool) -> None:
        if self.data_neighbors is not None:
            self.data_neighbors = self.graph.query(self.x, self.data_neighbors.shape[1])
            return
        self.q.distributed(self.posterior(self.bound()))
        if choose and self._chooses_neighbors:
            choose_neighbors(self)

    def _row_tables(self) -> dict[str, Tensor]:
        """Tables of q with a row per datum, by their names in q; none with inducing points elsewhere."""
        return self.q.row_tables() if self.data_neighbors is None else {}


def _checked_guide(where: str, guide: Any, has_likelihood: bool, at_data: bool) -> Guide:
    """The family of q(u), checked against the model; the default where there is none."""
    applies = at_data and has_likelihood
    if guide is None:
        return PseudoObservations() if applies else MeanField()
    check_family(where, guide, PseudoObservations, MeanField, SparseCholesky, Amortized)
    if isinstance(guide, PseudoObservations | Amortized) and not applies:
        expectation = "with a likelihood and inducing points at the data"
        fail(where, f"guide={type(guide).__name__}(...)", expectation, "another model", "Leave `guide` out.")
    if isinstance(guide, Amortized):
        check_encoder(where, guide.encoder)
    return guide
