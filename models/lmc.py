r"""Several outputs of any likelihood: a linear model of coregionalization on nearest-neighbor Gaussian processes.

Outputs are sums of L latent functions, :math:`f_p(x) = \mu_p(x) + \sum_l A_{pl}\, u_l(x)`, and each has its own
likelihood: a count and a measurement, at the same sites or at others. The posterior is that of Gaussian sites, one for
each datum (:mod:`pyro_nngp.variational.coregionalized_sites`): with Gaussian noise the ELBO is the log marginal
likelihood of a block Vecchia approximation, exact with K = N - 1.

Cost per step: O(B (K T)^3), independent of N. Symbols: N sites, D inputs, T outputs, L latent functions, K neighbors, B
rows of a batch, P new points, S draws.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn

from pyro_nngp._checks import check_inputs, check_same_kind, check_tensor, fail
from pyro_nngp.conditionals.coregionalized import outputs_of
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.coregionalized import CoregionalizedPosterior, NNGPs
from pyro_nngp.distributions.sets import Sets
from pyro_nngp.hyperparameters import each_set, pyro_entry, scaled, stacked, unset_hyperparameters
from pyro_nngp.hyperparameters.batches import placed
from pyro_nngp.kernels import Kernel, bind
from pyro_nngp.kernels.base import check_covariance
from pyro_nngp.likelihoods import Likelihood, PerOutput
from pyro_nngp.models.base.arguments import check_unshared
from pyro_nngp.models.base.output_arguments import check_loading, output_kernels, output_likelihoods
from pyro_nngp.models.tower import Densities, Draw, NeighborChoice, Plates, first_neighbors, rows_of
from pyro_nngp.models.tower.neighbor_choice import typical_noise
from pyro_nngp.neighbors import Batch, NeighborGraph
from pyro_nngp.starts.from_data import Start
from pyro_nngp.starts.outputs import start_outputs
from pyro_nngp.variational.coregionalized_sites import CoregionalizedSites

_VALUES = 128  # largest K T where K is chosen: each step costs (K T)^3 per site


class LMC(NeighborChoice):
    r"""Linear model of coregionalization with a likelihood for each output.

    Generative model, for an ordering of the N sites and K nearest neighbors:

    .. math::
        u_l &\sim NNGP(0, k_l), \quad l = 1..L, \\
        f_p(x) &= \mu_p(x) + \textstyle\sum_l A_{pl}(x)\, u_l(x), \quad p = 1..T, \\
        y_{ip} \mid f &\sim p_p(y_{ip} \mid f_p(x_i)).

    Sites: ``u`` (L, N), ``f`` and ``y`` (T, N), and one for each hyperparameter that has a prior. Results have the
    outputs first, as of every method with several outputs: moments (T, P), draws (S, T, P).

    Identifiability: the data determine the covariances of the outputs, :meth:`output_covariance`, and predictions
    depend on A through them alone. So kernel variances that are left unset are fixed at 1, and A carries the units of
    the outputs. With kernels of different lengthscales the columns of A are determined up to sign; with one kernel for
    all (intrinsic coregionalization) up to a rotation. Give A a prior to sample it, and summarize covariances.

    Args:
        x: sites (N, D): the union of the sites of all outputs, see :func:`pyro_nngp.data.union_of_sites`.
        y: targets (N, T). NaN are missing values in any pattern, such as outputs at other sites.
        kernels: one kernel, which all latent functions share; or one for each of them; or L for L kernels of Matern52
            with one lengthscale per column. None is one Matern52 for all: with a kernel for each function there is
            little in the data that tells the functions apart, and predictions are worse more often than better
            (``benchmarks/results/several_outputs.md``). If `mixing` is a function, None is one for each. Unset
            hyperparameters start from the data (:mod:`pyro_nngp.starts.outputs`).
        likelihood: one for each output, such as ``[Poisson(), Gaussian()]``, or one, of which each output gets a copy;
            None is Gaussian.
        num_latents: L where all share one kernel; None is T. Fewer than T tie outputs to each other: then no output
            can vary by itself.
        num_neighbors: K; None is 16, or all others where there are fewer. With Gaussian noise it is then doubled, to at
            most 128 / T, while that lowers the predictive variance
            (:meth:`~pyro_nngp.models.tower.NeighborChoice.choose_neighbors`).
        mixing: initial A (T, L), or a prior of it; None starts from the data. Or a function ``(B, D) -> (B, T, L)`` of
            the inputs, fixed or a module: with covariates z among the columns of x, ``(B, 1, L)`` of z makes the latent
            functions spatially varying coefficients. Kernel variances are then learned.
        mean: mean function ``(B, D) -> (B,)``, ``(B, 1)`` or ``(B, T)``; None is a learnable constant per output.
        ordering: ordering of the sites: "random", "maximin", "coordinate", "principal", "given" or a permutation.
        jitter: relative nugget of the latent functions; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None is that of the kernels.
        offset, weights, trials, limits: of each row, (N,), or of each output, (N, T); see
            :class:`~pyro_nngp.models.tower.GPMethod`.
        seed: seed of the ordering.

    Raises:
        ValueError, TypeError: for NaN or infinity in x, wrong shapes, mixed dtypes or devices, K out of range, targets
            outside the support of their likelihood, an output without data.

    Reference: Alvarez, Rosasco, Lawrence (2012), "Kernels for vector-valued functions: a review", section 4.2.
    """

    graph: NeighborGraph

    has_own_kernels = takes_missing = vectorizes = draws_together = True
    own_hyperparameters = ("mixing",)
    shares_scale = False

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
        if not (mixing is None or isinstance(mixing, Tensor | PyroParam | PyroSample) or callable(mixing)):
            expectation, cure = "to be a tensor (T, L) or a function of x", "Convert an array with torch.as_tensor."
            fail("LMC", "mixing", expectation, type(mixing).__name__, cure, TypeError)
        varies = callable(mixing) and not isinstance(mixing, PyroParam | PyroSample)
        functions, count = output_kernels("LMC", x, y.shape[1], kernels, num_latents, varies)
        for each in functions:
            check_unshared("LMC", "kernels", each, x)
        parts = PerOutput(*output_likelihoods("LMC", likelihood, y.shape[1]))
        by_row = {"offset": offset, "weights": weights, "trials": trials, "limits": limits}
        super().__init__(x, y, PyroModule[nn.ModuleList](functions), parts, mean, jitter, metric, **by_row)
        self.num_functions, self.varies = count, varies
        for each in functions:
            check_covariance("LMC", each, x)
        empty = y.isnan().all(0).nonzero()[:, 0].tolist() if y.is_floating_point() else []
        if empty:
            fail("LMC", f"y[:, {empty[0]}]", "with values", "NaN in all rows", "Leave the output out.")
        shape = y.shape[1], self.num_functions
        if self.varies:
            self.mixing: Any = mixing
            check_loading("LMC", cast(Callable, mixing)(x[:2]), (min(2, len(x)), *shape))
        elif isinstance(mixing, Tensor):
            check_tensor("LMC", "mixing", mixing)
            check_same_kind("LMC", x=x, mixing=mixing)
            check_loading("LMC", mixing, shape)
        self._needs_loading = mixing is None
        unset = [] if self.varies else [part for part in unset_hyperparameters(self.kernel) if part[1] == "variance"]
        self.begin()
        for part, name in unset:
            setattr(part, name, torch.ones_like(getattr(part, name)))
            getattr(part, f"{name}_unconstrained").requires_grad_(False)
        if mixing is None or isinstance(mixing, Tensor):
            self.mixing = scaled(self._loading if mixing is None else mixing, self._units[:, None])
        elif not self.varies:
            self.mixing = mixing
        first = first_neighbors("LMC", num_neighbors, x, 16)
        self.graph = NeighborGraph(x, first, ordering, seed=seed, metric=self.neighbor_metric())
        settings = self._mean_at, self.loading, self.num_functions, self.jitter, self.parameters, self.mean
        at_rows = self.likelihood_at if self.differs_by_row else None
        self.build_guide()
        self.local = CoregionalizedSites(cast(Tensor, self.y), parts, self.kernel, self.graph, *settings, at_rows)
        self.finish(self.choose_neighbors if num_neighbors is None and self.chooses_neighbors else None)

    def show_functions(self) -> str:
        return f", T={self.num_latents}, L={self.num_functions}"

    @pyro_entry
    @torch.no_grad()
    def start_hyperparameters(self) -> Start:
        """Start likelihoods, kernels and loadings from the data."""
        self.hyper_guide.median()
        rest = self.known_trend(), self.jitter, self.offset, self.trials, self._needs_loading
        data = self.x, cast(Tensor, self.y), *rest
        found = start_outputs(list(self.kernel), self.num_functions, cast(PerOutput, self.likelihood), *data)
        self._loading, self._units = found.loading, found.start.spread
        return found.start

    @pyro_entry
    def loading(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "*S #B T L"]:
        """A at points, (B, T, L), or (1, T, L) where it is the same at all; batches of a prior's values lead."""
        if not self.varies:
            mixing = self.outside(self.mixing.to(x.dtype), 2)
            batch = placed(mixing.shape[:-2])
            return mixing.reshape(*batch, 1, self.latent_shape[0], self.num_functions)
        found = self.mixing(x)
        check_loading("LMC", found, (len(x), self.latent_shape[0], self.num_functions))
        return found

    @pyro_entry
    @torch.no_grad()
    def output_covariance(self, x: Float[Tensor, "P D"] | None = None) -> Float[Tensor, "*P T T"]:
        r"""Prior covariance of the outputs at one site, :math:`\sum_l A_l A_l^\top k_l(x, x)`, at the present values.

        It does not depend on the signs, the order or a rotation of the latent functions.

        Args:
            x: points where loadings vary, or kernels that are not stationary, (P, D); None is the first site.
        """
        self._place_medians()
        at = self.x[:1] if x is None else x
        own = torch.stack([kernel.bind().diag(at) for kernel in self.kernel], -1)
        loading = self.loading(at)
        found = (loading * own[:, None]) @ loading.mT
        return found[0] if x is None else found

    @pyro_entry
    def model(self, idx: Int[Tensor, " I"] | None = None, batch: Batch | None = None) -> Tensor:
        """The generative model on a batch of the sites (None: all); returns y, (T, I).

        Args:
            idx: rows of the data.
            batch: from :meth:`batch_args`, built once for model and guide.
        """
        self.start_model(idx)
        batch = self._batch(idx) if batch is None else batch
        with poutine.scale(scale=batch.scale):
            u = pyro.sample(self.site("u"), self._each_set(lambda: self._prior(batch)))
        plates = self.plates(idx)
        return self.observe(plates, self._f_given(plates, u, batch, idx), idx)

    @pyro_entry
    def guide(self, idx: Int[Tensor, " I"] | None = None, batch: Batch | None = None) -> Tensor:
        """q(u) and the hyperparameters' guide, on the batches of :meth:`model`; returns f."""
        self.start_guide(idx)
        batch = self._batch(idx) if batch is None else batch
        q = self._each_set(lambda: self.local.distribution(self._prior(batch)))
        with poutine.scale(scale=batch.scale):
            u = pyro.sample(self.site("u"), q)
        return self._f_given(self.plates(idx), u, batch, idx, q)

    def batch_args(self, idx: Int[Tensor, " I"] | None, generator: torch.Generator) -> tuple[Tensor | None, Batch]:
        """Arguments of model and guide for a minibatch: its rows, and these with their neighbors."""
        return idx, self._batch(idx)

    @pyro_entry
    @torch.no_grad()
    def refresh_neighbors(self) -> None:
        """Find the neighbors again under the present lengthscales of all kernels."""
        self.refresh_table()
        self.local.follow(self.graph)

    @property
    def chooses_neighbors(self) -> bool:
        """With Gaussian noise: without it no precision is known at the start."""
        return self.local.is_exact

    def _most_neighbors(self) -> int:
        return _VALUES // self.latent_shape[0]

    @pyro_entry
    @torch.no_grad()
    def log_variances(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]) -> Float[Tensor, "T B"]:
        self._place_medians()
        x, noise = self.x[rows], typical_noise(self.local.observations()[1])
        return (outputs_of(self.loading(x), *self.local.given_sites(x, near))[1] + noise).log()

    def _follow_neighbors(self) -> None:
        super()._follow_neighbors()
        self.local.follow(self.graph)

    can_solve = True

    @property
    def has_smooth_loss(self) -> bool:
        """Whether the ELBO is a function of the hyperparameters alone, as with Gaussian noise: L-BFGS then suits it."""
        return self.local.is_exact and not self.hyper_guide.has_sites

    @pyro_entry
    @torch.no_grad()
    def solve(self, max_steps: int = 100, tolerance: float = 1e-3) -> None:
        """Set q(u), and constants of the mean, to their optimum for the present hyperparameters, without step sizes.

        One step in closed form if all noise is Gaussian, else natural-gradient steps.

        Args:
            max_steps: largest number of steps.
            tolerance: stop when means move by less, in standard deviations of the sites.

        Cost: O(N (K T)^3) per round, and O(N L K) per iteration of conjugate gradients.
        """
        self._place_medians()
        self.local.solve(max_steps, tolerance)
        with torch.enable_grad():
            self._place_medians()
            self.local.correct()

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets: constants of the mean function."""
        return self.local.solved_parameters()

    @pyro_entry
    def append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        loc, variance = self.forward(x)
        super().append_rows(x, y, by_row)
        self._place_medians()
        self.graph.append(x)
        added = by_row["offset"].movedim(0, -1) if "offset" in by_row else 0
        self.local.append(cast(Tensor, self.y), loc + added, variance)
        self.local.solve(level=False)

    def plan(self, x_new: Tensor, num_neighbors: int | None) -> Tensor:
        """Rows of the nearest sites."""
        self._check_neighbors(num_neighbors, self.num_data)
        return self.graph.query(x_new, self.neighbors_or_default(num_neighbors))

    def prediction_neighbors(self) -> int:
        """The default number of neighbors in predictions: K, or more for up to 96 data."""
        return self.local.prediction_neighbors()

    def moments(self, x_new: Tensor, plan: Tensor, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """O(P (K T)^3)."""
        loc, variance = outputs_of(self.loading(x_new), *self._latent_moments(x_new, plan, draw))
        return self._mean_at(x_new) + loc, variance

    @pyro_entry
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
        plan = self.plan(x_new, num_neighbors)
        self._place_medians()
        return self._latent_moments(x_new, plan, None)

    @pyro_entry
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
        loc, cov = self.latent_functions(x_new, num_neighbors=num_neighbors)
        loading = self.loading(x_new)
        mean = self._mean_at(x_new) + outputs_of(loading, loc, cov)[0]
        total = loading @ cov @ loading.mT
        own = total.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(total.dtype).tiny)
        return dist.MultivariateNormal(mean.mT, total + torch.diag_embed(own * max(self.jitter, 1e-6)))

    def leave_one_out(self, rows: Tensor, num_neighbors: int | None, sampled: bool) -> Densities:
        """Each output at a site given the sites of all others; O(I (K T)^3)."""
        self._check_neighbors(num_neighbors, self.num_data - 1)
        few = min(self.num_data - 1, self.prediction_neighbors())
        near = self.graph.others(few if num_neighbors is None else num_neighbors, rows)
        y = cast(Tensor, self._targets(rows))

        def densities(draw: Draw | None) -> Tensor:
            if sampled or not bool(self.local.solved):
                self.local.solve()
            loc, variance = outputs_of(self.loading(self.x[rows]), *self.local.given_sites(self.x[rows], near))
            return self.likelihood_at(rows).marginal(self._mean_at(self.x[rows], rows) + loc, variance).log_prob(y)

        return densities

    def joint_plan(self, x_new: Tensor, num_neighbors: int | None, seed: int) -> tuple[Tensor, Tensor]:
        """The nearest sites, and the nearest among them and earlier new points."""
        self._check_neighbors(num_neighbors, self.num_data + len(x_new) - 1)
        k = self.neighbors_or_default(num_neighbors)
        return self.graph.query(x_new, min(k, self.num_data)), self.graph.extend(x_new, k, seed)[1]

    def joint_draws(self, x_new: Tensor, plan: tuple[Tensor, Tensor], count: int, draw: Draw | None) -> Tensor:
        """O(P (K T)^3), O(P K L^2) per draw."""
        near, joint = plan
        if draw is None:
            u = self._latent_moments(x_new, near, None)[0] + self.local.joint_deviations(x_new, joint, count)
        else:
            given = self._drawn(draw, "u", (self.num_functions, self.num_data))
            kernels = [bind(kernel).shifted(-self.num_plates) for kernel in self.kernel]
            priors = [NNGP(kernel, self.graph, jitter=self.jitter) for kernel in kernels]
            each = zip(priors * self.num_functions if len(priors) == 1 else priors, given.unbind(-2), strict=True)
            new = [prior.sample_new(x_new, row.expand(count, *row.shape), neighbors=joint) for prior, row in each]
            u = torch.stack(new, -2)
        return self._mean_at(x_new) + torch.einsum("...ptl,...lp->...tp", self._loading_at(x_new), u)

    def _loading_at(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "*S B T L"]:
        """A at each point."""
        found = self.loading(x)
        return found.expand(*found.shape[:-3], len(x), -1, -1)

    def _latent_moments(self, x_new: Tensor, plan: Tensor, draw: Draw | None) -> tuple[Tensor, Tensor]:
        if draw is None:
            return self.local.moments(x_new, plan)
        given = self._drawn(draw, "u", (self.num_functions, self.num_data))
        return self.local.given_values(x_new, plan, given)

    def _prior(self, batch: Batch | None) -> NNGPs:
        """p(u) on a batch of the graph, at one set of hyperparameters."""
        batch = self.graph.batch() if batch is None else batch
        return NNGPs([NNGP(k, self.graph, batch, jitter=self.jitter) for k in self.kernel], self.num_functions)

    def _each_set(self, build: Callable[[], Any]) -> Any:
        """A distribution of u, or one for each set of hyperparameters."""
        parts, batch = each_set(self, build)
        return Sets(parts, batch) if batch else parts[0]

    def _f_given(
        self,
        plates: Plates,
        u: Tensor,
        batch: Batch,
        idx: Tensor | None,
        q: CoregionalizedPosterior | Sets | None = None,
    ) -> Tensor:
        """The site f given u; in the guide (q given) it has its marginal, for the integrating ELBO."""
        x, positions, u = self._inputs(idx), cast(Tensor, batch.extra), self.outside(u, 2)
        loadings, sets = each_set(self, lambda: self.loading(x).expand(len(x), -1, -1))
        mean, loading = self._mean_at(x, rows_of(idx)), self.outside(stacked(loadings, sets), 3)
        marginal = None
        if q is not None:
            parts, shape = (q.parts, q.batch_shape) if isinstance(q, Sets) else ((q,), torch.Size())
            moments = zip(*(part.outputs() for part in parts), strict=True)
            loc, variance = (self.outside(stacked(list(v), shape), 2)[..., positions] for v in moments)
            marginal = mean + loc, variance
        return self.record_f(plates, mean + torch.einsum("...itl,...li->...ti", loading, u[..., positions]), marginal)

    def _batch(self, idx: Tensor | None) -> Batch:
        """A batch of the graph, with the rows of the data as its `extra`."""
        rows = torch.arange(self.num_data, device=self.x.device) if idx is None else idx
        return self.graph.batch(idx, extra=rows)
