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
from typing import Any, Literal, TypeAlias, cast

import pyro
import torch
from jaxtyping import Float, Int
from pyro import poutine
from torch import Tensor, nn

from pyro_nngp._checks import check_choice, check_int, check_num_neighbors, fail
from pyro_nngp._rows import values_at
from pyro_nngp._shared import shared
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributions import NNGP, SitePosterior, SparseCholeskyNormal
from pyro_nngp.hyperparameters import each_set, pyro_entry, scaled, stacked
from pyro_nngp.inducing import inducing_points
from pyro_nngp.kernels import bind, column_scale
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.models.base import LatentPredictions, Plates, first_neighbors, rows_of, warn_untrained
from pyro_nngp.neighbors import Batch, NeighborGraph
from pyro_nngp.variational import AmortizedGaussian, GaussianSites, LocalGaussian, prior_factor, variational_optimum

Posterior: TypeAlias = Literal["sites", "mean-field", "factor"]

_ENCODER_JITTER = 0.01  # means computed one neighborhood at a time deviate from a stiffer prior by too much


class VNNGP(LatentPredictions):
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
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern52 with one
            lengthscale per column. Unset hyperparameters start from the data (:mod:`pyro_nngp.models.base.starts`).
        likelihood: p(y | f); None is Gaussian, or without y makes ``model`` return f at the batch.
        num_neighbors: K, for the prior and for the data; None is 32, for sites of Gaussian data doubled up to 128 where
            that lowers predictive variances by more than 10 %
            (:meth:`~pyro_nngp.models.base.NeighborChoice.choose_neighbors`).
        inducing: None puts the inducing points at the data; an int M < N starts them by k-means; a tensor gives them.
        learn_inducing: whether the inducing points are parameters.
        posterior: family of q(u). "sites" is the Gaussian posterior of the pseudo-observations that :meth:`solve` finds
            (:mod:`pyro_nngp.variational.sites`), whose intervals cover f. "mean-field" is the paper's; its variances
            are those of each value given all others, so that 95 % intervals cover a few percent of a smooth f.
            "factor" needs `guide_neighbors`. None is "sites" where it applies (a likelihood, inducing points at the
            data, none of `guide_neighbors`, `encoder`, `loc`, `scale`).
        guide_neighbors: off-diagonal entries per row of the Cholesky factor of q(u); 0 selects another family.
        encoder: a network of :mod:`pyro_nngp.variational.encoders` that computes q(u) from the data around each point,
            in place of one set of parameters per point; needs a likelihood and inducing points at the data, and no
            `loc`.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``, such as ``torch.nn.Linear(D, 1)``; None is a learnable
            constant.
        ordering: ordering of the inducing points: "random", "maximin", "coordinate", "principal", "given" or a
            permutation.
        loc: initial mean of q(u), without the mean function, (M,) or (M, L); None is zero.
        scale: initial standard deviation of q(u); None is a tenth of the spread of f in the data.
        jitter: relative nugget; None takes 1e-6, with an encoder 0.01, since no network can follow a stiffer prior.
        metric: metric of neighbors: lengthscales, or a distance function; None is that of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights, trials, limits: of each row, as in :class:`~pyro_nngp.models.base.GPMethod`.
        seed: seed of the ordering and of k-means.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, K out of range, targets
            outside the support of the likelihood.

    Reference: Wu, Pleiss, Cunningham (2022), "Variational nearest neighbor Gaussian process", ICML.
    """

    graph_type: type[NeighborGraph] = NeighborGraph
    draws_together = vectorizes = can_distribute = True

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
        posterior: Posterior | None = None,
        guide_neighbors: int = 0,
        encoder: nn.Module | None = None,
        mean: Callable | None = None,
        ordering: str | Int[Tensor, " M"] = "random",
        loc: Float[Tensor, "M *L"] | None = None,
        scale: float | None = None,
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
        jitter = _ENCODER_JITTER if jitter is None and encoder is not None else jitter
        super().__init__(x, y, kernel, likelihood, mean, jitter, metric, start, **by_row)
        where = type(self).__name__
        self.at_data = inducing is None
        if self.at_data and learn_inducing:
            fail(where, "learn_inducing", "False with inducing points at the data", True, "Give `inducing` an M < N.")
        if not self.at_data:
            self.own_state = (*self.own_state, "graph")
        z = x if inducing is None else inducing_points(where, x, inducing, seed)
        choose, num_neighbors = num_neighbors is None, first_neighbors(where, num_neighbors, z)
        self.graph = self.graph_type(z, num_neighbors, ordering, seed=seed, metric=self.neighbor_metric())
        if learn_inducing:
            self.z = scaled(z, column_scale(x))
        self.learn_inducing = learn_inducing
        self.register_buffer("data_neighbors", None if self.at_data else self.graph.query(x, num_neighbors))
        check_int(where, "guide_neighbors", guide_neighbors, 0)
        if guide_neighbors:
            check_num_neighbors(where, guide_neighbors, num_neighbors, "guide_neighbors")
        if encoder is not None and not isinstance(encoder, nn.Module):
            cure = "Pass an instance such as SiteEncoder(D)."
            fail(where, "encoder", "to be a torch module", f"{encoder!r:.60}", cure, TypeError)
        likelihood, kernel = self.likelihood, self.kernel  # with defaults filled in
        own_family = guide_neighbors > 0 or any(part is not None for part in (encoder, loc, scale))
        applicable = self.at_data and likelihood is not None and not own_family
        if posterior is None:
            posterior = "sites" if applicable else "factor" if guide_neighbors else "mean-field"
        check_choice(where, "posterior", posterior, ("sites", "mean-field", "factor"))
        if posterior == "sites" and not applicable:
            expectation = (
                "without guide_neighbors, encoder, `loc` and `scale`, with a likelihood and inducing points at the data"
            )
            fail(where, 'posterior="sites"', expectation, "other settings", "Leave `posterior` out.")
        if encoder is None and (posterior == "factor") != (guide_neighbors > 0):
            cure = "Give guide_neighbors >= 1 for a factor, and none for a mean-field family."
            fail(where, "posterior", "'factor' with guide_neighbors alone", repr(posterior), cure)
        if scale is not None and scale <= 0:
            fail(where, "scale", "> 0", scale, "It is the initial standard deviation.")
        self.solves_coefficients = posterior == "sites"
        self.build_guide()
        if posterior == "sites":
            self.local = self._sites()
        elif encoder is None:
            pattern = self.graph.neighbors[:, :guide_neighbors].clone() if guide_neighbors else None
            self.local = LocalGaussian(len(z), pattern, self.num_latents, loc, scale, self.unit, like=x)
        elif likelihood is None or y is None or not self.at_data or loc is not None:
            expectation = "with a likelihood, inducing points at the data and no `loc`"
            fail(where, "encoder", expectation, "other settings", "Leave the encoder out.")
        else:
            self.local = self._amortized(encoder, guide_neighbors)
        self.predicts_from_rows = self.at_data
        self.has_row_tables = self.at_data and encoder is None
        self.finish(self.choose_neighbors if choose and self.chooses_neighbors else None)

    @pyro_entry
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
        self.start_model(idx)
        batch = self._batch(idx, inducing_idx)
        prior = self._prior(batch)
        shape = torch.broadcast_shapes(prior.batch_shape, self.latent_shape)
        with poutine.scale(scale=batch.scale), self.of_all():
            u = pyro.sample(self.site("u"), prior.expand(shape).to_event(len(self.latent_shape)))
        plates = self.plates(idx)
        return self.observe(plates, self._f_given(plates, u, batch, idx), idx)

    @pyro_entry
    def guide(
        self, idx: Int[Tensor, " I"] | None = None, inducing_idx: Int[Tensor, " J"] | Batch | None = None
    ) -> Tensor:
        """q(u), q(f | u) = p(f | u) and the hyperparameters' guide, on the batches of :meth:`model`; returns f."""
        self.start_guide(idx)
        batch = self._batch(idx, inducing_idx)
        q: SitePosterior | SparseCholeskyNormal
        if isinstance(self.local, GaussianSites):
            q = self.local.distribution(self._prior(batch))
            q = q.expand(torch.broadcast_shapes(q.batch_shape, self.latent_shape))
        elif isinstance(self.local, AmortizedGaussian):
            q = self._encoded(self.local, batch)
        else:
            q = self.local.distribution(batch.rows, batch.targets)
        with poutine.scale(scale=batch.scale), self.of_all():
            u = pyro.sample(self.site("u"), q.to_event(len(self.latent_shape)))
        return self._f_given(self.plates(idx), u, batch, idx, q)

    def _encoded(self, local: AmortizedGaussian, batch: Batch) -> SparseCholeskyNormal:
        """q(u) of the encoder, which reads one set of hyperparameters after the other."""
        found, sets = each_set(self, lambda: local.distribution(batch.rows, batch.targets))
        q = found[0]
        if not sets:
            return q
        loc, scale, weights = (stacked([getattr(one, name) for one in found], sets) for name in q.batched)
        return SparseCholeskyNormal(loc, scale, weights, q.pattern, q.rows, q.targets)

    def batch_args(
        self, idx: Int[Tensor, " I"] | None, generator: torch.Generator
    ) -> tuple[Tensor | None, Batch | None]:
        """Arguments of model and guide for a minibatch: its rows, and the batch of inducing points for both.

        Inducing points that are not the data are drawn at random.
        """
        if self.at_data or idx is None or self.num_inducing <= len(idx):
            return idx, self._batch(idx, None)
        drawn = torch.randint(self.num_inducing, (2 * len(idx),), generator=generator).unique()  # O(|I|), whatever M
        rows = drawn[torch.randperm(len(drawn), generator=generator)[: len(idx)]].to(idx.device)
        return idx, self._batch(idx, rows)

    @pyro_entry
    @torch.no_grad()
    def refresh_neighbors(self) -> None:
        """Find the neighbors again under the kernel's present lengthscales and inducing points.

        Kernels without one lengthscale per input keep the Euclidean metric.
        """
        if self.learn_inducing:
            self.graph.x.copy_(self.z)
        if self.shard is not None and self.at_data:
            self.refresh_rows()
            return
        self.refresh_table()
        if not self.at_data:
            self.data_neighbors.copy_(self.graph.query(self.x, self.data_neighbors.shape[1]))
        self.local.follow(self.graph)

    @property
    def can_solve(self) -> bool:
        """Whether :meth:`solve` applies: with a likelihood, inducing points at the data, and no encoder."""
        return self.likelihood is not None and self.at_data and not isinstance(self.local, AmortizedGaussian)

    @pyro_entry
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

        Cost: O(N K^3), then O(N K) per iteration of conjugate gradients and step; with `guide_neighbors` also O(N K^3)
        per step and O(N K^2) memory, for the factor.
        """
        if self.likelihood is None or not self.can_solve:
            actual = "no likelihood" if self.likelihood is None else "an encoder" if self.at_data else "other points"
            expectation, cure = "with a likelihood, inducing points at the data and no encoder", "Train by gradients."
            fail(f"{type(self).__name__}.solve", "model", expectation, actual, cure)
        self._place_medians()
        if not isinstance(self.local, LocalGaussian):
            self.local.solve(max_steps, tolerance)
            with torch.enable_grad():
                self._place_medians()
                self.local.correct()
            return
        factor = prior_factor(bind(self.kernel), self.graph, self.jitter)
        own, every = slice(self.num_data), torch.arange(self.num_data, device=self.x.device)
        likelihood, mean = self.likelihood_at(own), self._mean_at(self.x[own], own)
        y, q = cast(Tensor, self._targets(every)), self.local.distribution(every)
        found = variational_optimum(likelihood, y, mean, factor, q, max_steps, tolerance, total=self.total)
        self.local.assign(found)
        if self.shard is not None:
            self.complete_tables()

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets: all of q(u); with sites, the level of a constant mean function."""
        if isinstance(self.local, GaussianSites):
            return self.local.solved_parameters()
        return list(self.local.parameters())

    @pyro_entry
    def append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        loc, variance = self.forward(x)
        super().append_rows(x, y, by_row)
        if not self.at_data:
            self.data_neighbors = torch.cat([self.data_neighbors, self.graph.query(x, self.data_neighbors.shape[1])])
            warn_untrained(type(self).__name__)
            return
        self._place_medians()
        self.graph.append(x)
        if isinstance(self.local, GaussianSites):
            added = by_row["offset"].movedim(0, -1) if "offset" in by_row else 0
            self.local.append(cast(Tensor, self.y), loc + added, variance)
            self.local.solve(level=False)
        elif isinstance(self.local, LocalGaussian):
            self._append_to(self.local, loc - self._mean_at(x), variance)
            if self.can_solve:
                self.solve()
        else:
            self.local = self._amortized(self.local.encoder, self.local.num_columns)

    def _append_to(self, local: LocalGaussian, loc: Tensor, variance: Tensor) -> None:
        """Append rows to q(u), with these moments of u."""
        size = loc.shape[-1]
        pattern = None if local.pattern is None else self.graph.neighbors[-size:, : local.pattern.shape[1]].clone()
        new = LocalGaussian(size, pattern, self.num_latents, unit=self.unit, like=self.x)
        weights = None if pattern is None else loc.new_zeros(*loc.shape, pattern.shape[1])
        new.assign(SparseCholeskyNormal(loc, variance.sqrt(), weights, pattern))
        local.append(new)

    def _likelihood_by_row(self) -> Callable[..., Likelihood] | None:
        return self.likelihood_at if self.differs_by_row else None

    def _sites(self) -> GaussianSites:
        """q(u) of Gaussian sites, without any solution."""
        return GaussianSites(
            cast(Tensor, self.y),
            cast(Likelihood, self.likelihood),
            self.kernel,
            self.graph,
            self._mean_at,
            self.latent_shape,
            self.jitter,
            self.parameters,
            self.mean,
            self._likelihood_by_row(),
        )

    def _amortized(self, encoder: nn.Module, num_columns: int) -> AmortizedGaussian:
        """q(u) by an encoder of the data around each point."""
        y, likelihood = cast(Tensor, self.y), cast(Likelihood, self.likelihood)
        return AmortizedGaussian(
            encoder,
            y,
            likelihood,
            self.kernel,
            self.graph,
            self._mean_at,
            num_columns,
            self.jitter,
            self._likelihood_by_row(),
        )

    def _prior(self, batch: Batch) -> NNGP:
        """p(u) outside of the plates, with a dimension for latent functions where hyperparameters have batches."""
        kernel = bind(self.kernel).shifted(len(self.latent_shape))
        return NNGP(kernel, self.graph, batch, jitter=self.jitter, points=self._points())

    def _f_given(self, plates: Plates, u: Tensor, batch: Batch, idx: Tensor | None, q: Any = None) -> Tensor:
        """The site f given u; in the guide (q given) it has its marginal, for the integrating ELBO."""
        x, positions = self._inputs(idx), cast(Tensor, batch.extra)
        mean, u = self._mean_at(x, rows_of(idx)), self.outside(u, 1 + len(self.latent_shape))
        if not self.at_data:
            rows = self.data_neighbors if idx is None else self.data_neighbors[idx]
            w, var = shared(
                (self, "f"), lambda: graph_conditional(self.covariance(), x, self._points(), rows, jitter=self.jitter)
            )
            loc = mean + (w * values_at(u, positions)).sum(-1)
            return self.sample_f(plates, loc, var, None if q is None else self._through(q, w, var, positions, mean))
        marginal = None
        if q is not None:
            loc, variance = (self.outside(value, 1 + len(self.latent_shape)) for value in (q.loc, q.variance))
            marginal = mean + values_at(loc, positions), values_at(variance, positions)
        return self.record_f(plates, mean + values_at(u, positions), marginal)

    def _batch(self, idx: Tensor | None, inducing_idx: Tensor | Batch | None) -> Batch:
        """Inducing batch, with the rows that the data batch needs as its `extra`."""
        if isinstance(inducing_idx, Batch):
            return inducing_idx
        if self.at_data:
            rows = torch.arange(self.num_data, device=self.x.device) if idx is None else idx
            return self.graph.batch(idx if inducing_idx is None else inducing_idx, extra=rows)
        return self.graph.batch(inducing_idx, extra=self.data_neighbors if idx is None else self.data_neighbors[idx])
