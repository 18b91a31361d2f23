r"""Several outputs of any likelihood: a linear model of coregionalization on nearest-neighbor Gaussian processes.

Outputs are sums of L latent functions, :math:`f_p(x) = \mu_p(x) + \sum_l A_{pl}\, u_l(x)`, and each has its own
likelihood: a count and a measurement, at the same sites or at others. The posterior conditions on pseudo-observations,
one for each datum (:mod:`pyro_nngp.variational.coregionalized`): with Gaussian noise the ELBO is the log marginal
likelihood of a block Vecchia approximation, exact with K = N - 1. Other data are trained on the exact evidence of the
pseudo-observations under the priors of the latent functions (:mod:`pyro_nngp.variational.coregionalized_evidence`), as
long as the posterior precision has a small sparse factor: two functions of two inputs up to about 20,000 sites.

Cost: of a step on a batch O(B (K R)^3) with R = min(T, L), independent of N; with a factor, for two functions of two
inputs on one core, 15 evaluations, 1.5 s each at 5,000 sites. Symbols: N sites, D inputs, T outputs, L latent
functions, K neighbors, B rows of a batch, P new points, S draws.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.nn import PyroModule, PyroParam, PyroSample, pyro_method
from torch import Tensor, nn

from pyro_nngp._checks import check_fraction, check_inputs, check_new_inputs, check_same_kind, check_tensor, fail
from pyro_nngp._kinds import check_flags, check_steps
from pyro_nngp.bound import Bound
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributions.coregionalized import CoregionalizedPosterior
from pyro_nngp.distributions.sets import Sets
from pyro_nngp.hyperparameters import scaled, unset_hyperparameters
from pyro_nngp.hyperparameters.values import Values, stacked_sets
from pyro_nngp.kernels import Kernel
from pyro_nngp.kernels.binding import check_covariance
from pyro_nngp.likelihoods import Likelihood, PerOutput
from pyro_nngp.loadings import Correlations, FactorLoadings
from pyro_nngp.models.base import Draw, Method, Program, neighbor_choice
from pyro_nngp.models.base.arguments import check_unshared
from pyro_nngp.models.base.factors import Factors
from pyro_nngp.models.base.latent_functions import LatentFunctions, loading_at
from pyro_nngp.models.base.neighbor_choice import choose_neighbors, first_neighbors
from pyro_nngp.models.base.output_arguments import Mixing, output_kernels, output_likelihoods
from pyro_nngp.models.base.profile import Profile
from pyro_nngp.models.base.targets import SeparateTargets
from pyro_nngp.models.base.trend import bound_for_predictions
from pyro_nngp.neighbors import Batch, NeighborGraph
from pyro_nngp.rows import Part
from pyro_nngp.starts.from_data import Start
from pyro_nngp.starts.outputs import start_outputs
from pyro_nngp.variational.coregionalized import CoregionalizedObservations, latent_priors
from pyro_nngp.variational.mean_coefficients import parameters_but_level

_VALUES = 128  # largest K min(T, L) where K is chosen: each step costs its cube per site


class LMC(Method):
    r"""Linear model of coregionalization with a likelihood for each output.

    Generative model, for an ordering of the N sites and K nearest neighbors:

    .. math::
        u_l &\sim NNGP(0, k_l), \quad l = 1..L, \\
        f_p(x) &= \mu_p(x) + \textstyle\sum_l A_{pl}(x)\, u_l(x), \quad p = 1..T, \\
        y_{ip} \mid f &\sim p_p(y_{ip} \mid f_p(x_i)).

    Sites: ``u`` (L, N), ``f`` and ``y`` (T, N), and one for each hyperparameter that has a prior. Results have the
    outputs first, as of every method with several outputs: moments (T, P), draws (S, T, P).

    Coefficients of the mean functions that are learned are uncertain in predictions and draws, jointly over the
    outputs: universal cokriging. With :class:`~pyro_nngp.loadings.FactorLoadings`, in :meth:`loo`, and where posterior
    draws are given, they are taken as they are.

    Identifiability: the data determine the covariances of the outputs, :meth:`output_covariance`, and predictions
    depend on A through them alone. So kernel variances that are left unset are fixed at 1, and A carries the units of
    the outputs. With kernels of different lengthscales the columns of A are determined up to sign; with one kernel for
    all (intrinsic coregionalization) up to a rotation. Give A a prior to sample it, and summarize covariances.

    Args:
        x: sites (N, D): the union of the sites of all outputs, see :func:`pyro_nngp.data.union_of_sites`.
        y: targets (N, T). NaN are missing values in any pattern, such as outputs at other sites.
        kernels: one kernel, which all latent functions share; or one for each of them; or L for L kernels with one
            lengthscale per column. None is one for all: with a kernel for each function there is little in the data
            that tells the functions apart, and predictions are worse more often than better
            (``benchmarks/results/several_outputs.md``). If `mixing` is a function, None is one for each. They are
            Matern of a learned smoothness, for labels, below 100 rows and with factor loadings Matern52. Unset
            hyperparameters start from the data (:mod:`pyro_nngp.starts.outputs`).
        likelihood: one for each output, such as ``[Poisson(), Gaussian()]``, or one, of which each output gets a copy;
            None is Gaussian.
        num_latents: L where all share one kernel; None is T. Fewer than T tie outputs to each other: then no output
            can vary by itself.
        num_neighbors: K; None is 16, or all others where there are fewer. With Gaussian noise it is then doubled, to at
            most 128 / min(T, L), while that lowers the predictive variance
            (:func:`~pyro_nngp.models.base.neighbor_choice.choose_neighbors`).
        mixing: initial A (T, L), or its prior; None starts from the data. Or a function ``(B, D) -> (B, T, L)`` of
            the inputs, fixed or a module: with covariates z among the columns of x, ``(B, 1, L)`` of z makes the latent
            functions spatially varying coefficients. Kernel variances are then learned. Or
            :class:`~pyro_nngp.loadings.FactorLoadings`: few factors, whose loadings :meth:`solve` finds together with
            q(u) and coefficients of the mean, and whose :meth:`correlations` have intervals.
        mean: mean function ``(B, D) -> (B,)``, ``(B, 1)`` or ``(B, T)``; None is a learnable constant per output.
        ordering: ordering of the sites: "random", "maximin", "coordinate", "principal", "given" or a permutation.
        jitter: relative nugget of the latent functions; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None takes the metric of the kernel.
        offset, weights, trials, limits: of each row, (N,), or of each output, (N, T); see
            :class:`~pyro_nngp.models.base.Method`.
        seed: seed of the ordering.

    Raises:
        ValueError, TypeError: for NaN or infinity in x, wrong shapes, mixed dtypes or devices, K out of range, targets
            outside the support of their likelihood, an output without data.

    Reference: Alvarez, Rosasco, Lawrence (2012), "Kernels for vector-valued functions: a review", section 4.2.
    """

    graph: NeighborGraph

    q: CoregionalizedObservations
    can_solve = True
    _hyperparameters = ("mixing",)
    _targets = SeparateTargets()
    refresh_neighbors = neighbor_choice.refresh_neighbors
    prediction_neighbors = neighbor_choice.prediction_neighbors

    @from_tables
    def __init__(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Float[Tensor, "N T"] | Int[Tensor, "N T"] | Table,
        kernels: Sequence[Any] | Kernel | int | None = None,
        likelihood: Likelihood | Sequence[Likelihood] | None = None,
        *,
        num_latents: int | None = None,
        num_neighbors: int | None = None,
        mixing: Float[Tensor, "T L"] | PyroParam | PyroSample | Callable | None = None,
        mean: Callable | None = None,
        ordering: str | Int[Tensor, " N"] = "random",
        jitter: float | None = None,
        metric: Float[Tensor, " *D"] | Callable | None = None,
        offset: Float[Tensor, "N ..."] | Table | None = None,
        weights: Float[Tensor, "N ..."] | Int[Tensor, "N ..."] | Table | None = None,
        trials: Float[Tensor, "N ..."] | Int[Tensor, "N ..."] | Table | None = None,
        limits: Float[Tensor, "N ..."] | Table | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(y, Tensor) or y.dim() != 2:
            actual = getattr(y, "shape", type(y).__name__)
            fail("LMC", "y", "of shape (N, T)", actual, "Pass y[:, None] for one output.")
        check_inputs("LMC", "x", x)
        loadings = Mixing(mixing, y.shape[1])
        num_latents = loadings.num_latents(kernels) if num_latents is None else num_latents
        likelihoods = output_likelihoods(likelihood, y.shape[1])
        functions, count = output_kernels(x, likelihoods, kernels, num_latents, loadings)
        for each in functions:
            check_unshared("LMC", "kernels", each, x)
        parts = PerOutput(*likelihoods)
        by_row = {"offset": offset, "weights": weights, "trials": trials, "limits": limits}
        super().__init__(x, y, PyroModule[nn.ModuleList](functions), parts, mean, jitter, metric, **by_row)
        for each in functions:
            check_covariance("LMC", each, x)
        empty = y.isnan().all(0).nonzero()[:, 0].tolist() if y.is_floating_point() else []
        if empty:
            fail("LMC", f"y[:, {empty[0]}]", "with values", "NaN in all rows", "Leave the output out.")
        loadings.check(x, count)
        if not loadings.is_parameter:
            self.mixing: Any = mixing
        unset = [each for each in unset_hyperparameters(self.kernel) if each[1] == "variance" and not loadings.varies]
        self._start(partial(self._start_outputs, loadings, count))
        for part, name in unset:
            setattr(part, name, torch.ones_like(getattr(part, name)))
            getattr(part, f"{name}_unconstrained").requires_grad_(False)
        first = first_neighbors("LMC", num_neighbors, x, 16)
        self.graph = NeighborGraph(x, first, ordering, seed=seed, metric=self._neighbor_metric())
        sizes, own_mean = (y.shape[1], count, len(x)), self._modules.get("mean")
        self.q = CoregionalizedObservations(*sizes, own_mean, parameters_but_level(self), self.x)
        if num_neighbors is None and self.likelihood.is_gaussian:  # without it no precision is known at the start
            choose_neighbors(self, _VALUES // min(y.shape[1], count))

    def _start_outputs(
        self, mixing: Mixing, num_functions: int, at: Values, trend: Callable[[Tensor], Tensor] | None
    ) -> Start:
        """Start likelihoods, kernels and loadings from the data; the loadings are in units of the outputs."""
        wanted = mixing.factors is not None or (mixing.is_parameter and mixing.first is None)
        rest = self.jitter, self.offset, self.trials, wanted
        data = self.x, cast(Tensor, self.y), trend, *rest
        outputs = start_outputs(list(self.kernel), num_functions, cast(PerOutput, self.likelihood), *data, at=at)
        if mixing.is_parameter:
            loading = outputs.loading if mixing.first is None else mixing.first
            self.mixing = scaled(loading, outputs.start.spread[:, None])
        elif mixing.factors is not None:
            mixing.factors.start(outputs.loading, outputs.start.spread)
        return outputs.start

    @property
    def _num_functions(self) -> int:
        """L."""
        return len(self.q.loc)

    @property
    def _factors(self) -> Factors | None:
        """The factors, if :meth:`solve` sets their loadings."""
        loadings = self._modules.get("mixing")
        return Factors(self, loadings) if isinstance(loadings, FactorLoadings) else None

    def _show_functions(self) -> str:
        return f", T={self.num_latents}, L={self._num_functions}"

    def loading(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "#B T L"]:
        """A at points, (B, T, L), or (1, T, L) where it is the same at all, at the present values."""
        check_new_inputs(f"{type(self).__name__}.loading", x, self.x)
        return self.posterior(self.bound()).loading(x)

    @torch.no_grad()
    def output_covariance(self, x: Float[Tensor, "P D"] | None = None) -> Float[Tensor, "*P T T"]:
        r"""Prior covariance of the outputs at one site, :math:`\sum_l A_l A_l^\top k_l(x, x)`, at the present values.

        It does not depend on the signs, the order or a rotation of the latent functions.

        Args:
            x: points where loadings vary, or kernels that are not stationary, (P, D); None is the first site.
        """
        if x is not None:
            check_new_inputs(f"{type(self).__name__}.output_covariance", x, self.x)
        cov = self.posterior(self.bound()).output_covariance(self.x[:1] if x is None else x)
        return cov[0] if x is None else cov

    def correlations(self, probability: float = 0.95, *, progress: bool = True) -> Correlations:
        r"""Correlations of the outputs at a site beyond their mean functions, with intervals; of factor loadings.

        Up to 5,000 latent values they are quantiles over draws of loadings, factors and kernels given the sites
        (:mod:`pyro_nngp.variational.loadings_draws`), kept until the method changes; how many correlations the
        intervals cover in simulated data is in ``benchmarks/results/factors.md``. Beyond, the posterior of the loadings
        is normal, with the kernels taken as known (:mod:`pyro_nngp.variational.loadings_information`), which is too
        narrow where ranges are not well known. That normal posterior becomes the guide of the loadings, which until
        then is a point.

        Args:
            probability: of the intervals.
            progress: whether to show a bar while drawing.

        Returns:
            Medians, lower and upper ends, (T, T) each.

        Raises:
            TypeError: unless `mixing` is a :class:`~pyro_nngp.loadings.FactorLoadings`.
            ValueError: unless `probability` is in (0, 1).

        Cost: 900 to 4,400 rounds of the chain, 20 ms each for 2,000 latent values; beyond 5,000 T (P + L) solutions
        with the factor of all latent values, P coefficients per output, and O((L N)^3) for 3,000 of them at a time.
        """
        factors, where = self._factors, "LMC.correlations"
        if factors is None:
            expectation, cure = "to be FactorLoadings", "Build LMC(..., mixing=FactorLoadings(T, F)), and fit it."
            fail(where, "mixing", expectation, type(self._modules.get("mixing")).__name__, cure, TypeError)
        check_fraction(where, "probability", probability, "0.95 is usual.")
        check_flags(where, progress=progress)
        return factors.correlations(probability, progress)

    @pyro_method
    def model(self, idx: Int[Tensor, " I"] | None = None, batch: Batch | None = None) -> Tensor:
        """The generative model on a batch of the sites (None: all); returns y, (T, I).

        Args:
            idx: rows of the data.
            batch: from :meth:`batch_args`, built once for model and guide.
        """
        program, batch = Program.model(self, idx), self._batch(idx) if batch is None else batch
        with poutine.scale(scale=batch.scale):  # u_l ~ NNGP(0, k_l)
            u = pyro.sample(self.site("u"), _each_set(program, lambda bound: self._prior(bound, batch)))
        return program.observe(self._f_given(program, u, batch))

    @pyro_method
    def guide(self, idx: Int[Tensor, " I"] | None = None, batch: Batch | None = None) -> Tensor:
        """q(u) and the hyperparameters' guide, on the batches of :meth:`model`; returns f."""
        program, batch = Program.guide(self, idx), self._batch(idx) if batch is None else batch
        q = _each_set(program, lambda bound: self.q.at_batch(self.posterior(bound), self._prior(bound, batch)))
        with poutine.scale(scale=batch.scale):
            u = pyro.sample(self.site("u"), q)
        return self._f_given(program, u, batch, q)

    def _prior(self, bound: Bound, batch: Batch) -> Any:
        """p(u) on a batch, at one set of hyperparameters."""
        return latent_priors(bound, self.graph, batch, self._num_functions)

    def _f_given(
        self, program: Program, u: Tensor, batch: Batch, q: CoregionalizedPosterior | Sets | None = None
    ) -> Tensor:
        """The site f = mu + A u; in the guide (q given) it has its marginal, for the integrating ELBO."""
        x, positions, u = program.x, cast(Tensor, batch.extra), program.outside(u, 2)
        bounds, sets = program.sets()
        loadings = [loading_at(bound, x, self._num_functions).expand(len(x), -1, -1) for bound in bounds]
        mean, loading = program.mean(), program.outside(stacked_sets(loadings, sets), 3)
        marginal = None
        if q is not None:
            parts, shape = (q.parts, q.batch_shape) if isinstance(q, Sets) else ((q,), torch.Size())
            moments = zip(*(part.outputs() for part in parts), strict=True)
            loc, variance = (program.outside(stacked_sets(list(v), shape), 2)[..., positions] for v in moments)
            marginal = mean + loc, variance
        return program.record_f(mean + torch.einsum("...itl,...li->...ti", loading, u[..., positions]), marginal)

    def _batch(self, idx: Tensor | None) -> Batch:
        """A batch of the graph, with the rows of the data as its `extra`."""
        rows = torch.arange(self.num_data, device=self.x.device) if idx is None else idx
        return self.graph.batch(idx, extra=rows)

    def batch_args(self, idx: Int[Tensor, " I"] | None, generator: torch.Generator) -> tuple[Tensor | None, Batch]:
        """Arguments of model and guide for a minibatch: its rows, and these with their neighbors."""
        return idx, self._batch(idx)

    def posterior(self, bound: Bound, draw: Draw | None = None, part: Part | None = None) -> LatentFunctions:
        """The latent functions under q(u), or given their values in a draw."""
        rows, graph = (self.rows, self.graph) if part is None else (part.rows, part.graph)
        mean = self._modules.get("mean")
        rest = self.site("u"), parameters_but_level(self), mean, self._factors is not None
        return LatentFunctions(rows, graph, bound, self.q, draw, *rest)

    def _neighbors_changed(self) -> None:
        super()._neighbors_changed()
        self.q.neighbors_changed(self.posterior(self.bound()))

    @property
    def profile(self) -> Profile:
        """The largest bound over all q(u) as a function of the hyperparameters."""
        return Profile(self, in_rounds=self._factors is not None)

    @property
    def has_smooth_loss(self) -> bool:
        """Whether the ELBO is a function of the hyperparameters alone, as with Gaussian noise: L-BFGS then suits it."""
        if self._factors is not None:
            return self._factors.has_smooth_loss
        return self.likelihood.is_gaussian and not self.hyper_guide.has_sites

    @torch.no_grad()
    def solve(self, max_steps: int = 100, tolerance: float = 1e-3) -> None:
        """Set q(u), and constants of the mean, to their optimum for the present hyperparameters, without step sizes.

        One step in closed form if all noise is Gaussian, else natural-gradient steps.

        Args:
            max_steps: largest number of steps.
            tolerance: stop when means move by less, in standard deviations of the sites. Factor loadings are solved for
                until a round promises less than .01 nats per loading.

        Cost: O(N (K R)^3) per round, and O(N L K) per iteration of conjugate gradients.
        """
        check_steps("LMC.solve", max_steps, tolerance)
        if self._factors is None:
            self.q.solve(lambda: self.posterior(self.bound()), max_steps, tolerance)
        else:
            self._factors.solve(max_steps)

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets: constants of the mean function, with factors all its coefficients."""
        if self._factors is not None:
            return self._factors.solved_parameters()
        return self.q.solved_parameters(self._modules.get("mean"))

    def _append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        loc, variance = self.forward(x)
        super()._append_rows(x, y, by_row)
        self.graph.append(x)
        self.q.append(self.posterior(self.bound()), len(x), loc, variance)
        self.q.solve_again(lambda: self.posterior(self.bound()))

    def _keep_rows(self, rows: Int[Tensor, " S"]) -> None:
        super()._keep_rows(rows)
        self.graph = cast(NeighborGraph, self.graph.subset(rows))
        self.q.follow_rows(lambda: self.posterior(self.bound()), True)

    def latent_functions(
        self, x_new: Float[Tensor, "P D"], *, num_neighbors: int | None = None
    ) -> tuple[Float[Tensor, "L P"], Float[Tensor, "P L L"]]:
        """Posterior means of the latent functions at new points and their covariances at each point.

        With a function as `mixing` they are the spatially varying coefficients.

        Args:
            x_new: new points.
            num_neighbors: as of every prediction.

        Raises:
            ValueError, TypeError: for malformed arguments.
        """
        self._check_new("latent_functions", x_new)
        posterior = self.posterior(self.bound())
        return posterior.latent_moments(x_new, posterior.neighbors(x_new, num_neighbors))

    def joint_outputs(
        self, x_new: Float[Tensor, "P D"], *, num_neighbors: int | None = None
    ) -> dist.MultivariateNormal:
        """The joint posterior of all outputs f at each new point, of batch shape (P,) and event shape (T,).

        Args:
            x_new: new points.
            num_neighbors: as of every prediction.

        Raises:
            ValueError, TypeError: for malformed arguments.
        """
        self._check_new("joint_outputs", x_new)
        posterior = self.posterior(bound_for_predictions(self))
        return posterior.joint_outputs(x_new, posterior.neighbors(x_new, num_neighbors))

    @torch.no_grad()
    def predict_given(
        self,
        x_new: Float[Tensor, "P D"],
        y_new: Float[Tensor, "P T"],
        *,
        num_neighbors: int | None = None,
        offset: Float[Tensor, "P *T"] | None = None,
    ) -> dist.Distribution:
        """Predictive distribution of all outputs at new points where some outputs are known, of batch shape (T, P).

        The known outputs of a point are observations of its latent functions, replaced by Gaussian sites at their
        variational optimum; with Gaussian noise that is exact. They say nothing of other new points: add rows with
        :meth:`extend` for that.

        Args:
            x_new: new points.
            y_new: known outputs, NaN where an output is to be predicted.
            num_neighbors: as of :meth:`predict`.
            offset: as of :meth:`predict`.

        Raises:
            ValueError, TypeError: for malformed arguments, or known outputs outside the support of their likelihood.

        Cost: O(P (T L^2 + L^3)) per round, after the one of :meth:`latent_functions`.
        """
        where = "LMC.predict_given"
        self._check_new("predict_given", x_new)
        check_tensor(where, "y_new", y_new)
        check_same_kind(where, x_new=x_new, y_new=y_new)
        if y_new.shape != (len(x_new), self.num_latents):
            cure = "Pass a column for each output, with NaN for what is to be predicted."
            fail(where, "y_new", f"of shape ({len(x_new)}, {self.num_latents})", tuple(y_new.shape), cure)
        posterior = self.posterior(bound_for_predictions(self))
        near, added = posterior.neighbors(x_new, num_neighbors), self._new_offset("predict_given", x_new, offset)
        return posterior.response_given(y_new.mT, x_new, near, added, self._new_by_row(x_new, None, None))


def _each_set(program: Program, build: Callable[[Bound], Any]) -> Any:
    """A distribution of u, or one for each set of hyperparameters."""
    bounds, shape = program.sets()
    parts = [build(bound) for bound in bounds]
    return Sets(parts, shape) if shape else parts[0]


__all__ = ["LMC"]
