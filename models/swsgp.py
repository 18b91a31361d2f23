r"""Sparse within sparse Gaussian process (Tran, Milios, Michiardi, Filippone 2021).

Each data point depends on only the H nearest, w(i), of M inducing points:

.. math:: \mathrm{ELBO} \approx \frac{N}{|I|} \sum_{i \in I} E_{q(f_i)} \log p(y_i \mid f_i)
   - \frac{1}{|I|} \sum_{i \in I} KL\big[q(u_{w(i)}) \,\|\, N(0, K_{w(i)})\big] \qquad\text{(eq. 9, 10)}

.. math:: q(f_i) = N\big(\mu(x_i) + a_i^\top m_w,\; v_i + a_i^\top S_w a_i\big), \qquad
   a_i = K_w^{-1} k_w(x_i), \quad v_i = k(x_i, x_i) - k_w(x_i)^\top a_i

Differs from the paper: equation 3 lacks a transpose; neighbors follow the learned lengthscales when refreshed; a mean
function. A known weakness remains, shown by Wu et al. (2022, section 4.1): the local divergences are averaged, not
added, so that many inducing points cost too little: q(u) follows single data, the learned noise is too small, with an
inducing point at each data point 0, and intervals are too narrow; `fit` warns where the loss is above the log evidence.
For labels, f becomes far too large: at M = 200 and N = 500, 95 % intervals cover .57 of the function
(docs/intervals.md); predictions from other than Gaussian data warn of that.

Cost per step: O(|I| H^3) with fixed inducing points, independent of N and M; with learned ones also a search for
the H nearest of M, and with a full covariance O(M min(M, |I| H)^2). Memory O(N H + M); O(M^2) for a full covariance.
"""

from collections.abc import Callable
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import check_num_neighbors, fail, warn
from pyro_nngp._indexing import values_at
from pyro_nngp._shared import shared
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributions.zero_mean_normal import ZeroMeanNormal
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.inducing.points import inducing_points, nearest_inducing
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.linalg import cholesky, factor_inverse, in_blocks
from pyro_nngp.models.tower import Densities, Draw, Plates, PredictiveMethod, rows_of, warn_untrained
from pyro_nngp.models.tower.evidence import has_evidence, log_density_given, nearest_predecessors
from pyro_nngp.neighbors.table import distinct_rows
from pyro_nngp.variational import DenseGaussian, InducingLeaveOneOut, LocalGaussian, combined_variance, scattered

LARGEST_FULL = 10_000  # inducing points: their covariance and its gradient then take 0.8 GB in float32

_LEAST, _MOST, _ROWS = 64, 1024, 32  # inducing points where none are given, one for so many rows
_USUAL_NEIGHBORS = 32
_EVIDENCE_NEIGHBORS = 32


class SWSGP(PredictiveMethod):
    r"""Sparse within sparse Gaussian process.

    Generative model: each data point has its own copy of the values at its H nearest inducing points,

    .. math::
        u_i &\sim N(0, K_{w(i)})^{1/N}, \quad u_i \in R^H, \\
        f_i \mid u_i &\sim N(\mu(x_i) + a_i^\top u_i, v_i), \quad i = 1..N, \\
        y_i \mid f_i &\sim p(y_i \mid f_i).

    This is the model that the paper's bound belongs to. It is not a Gaussian process: data points that share inducing
    points have separate copies of their values, and only the guide ties the copies together, by giving them the
    marginals of one q(u). The power 1/N is the paper's average over data points in place of a sum. Draws of y from
    ``model`` have the right distribution at each data point, and no correlation between them; for joint draws use
    :meth:`sample`, which takes one draw of u at all inducing points. Values at two points are correlated through the
    inducing values that they share. The remainder, of variance v, is drawn independently: the method does not model its
    correlation. Predictions are from the guide only, since posterior draws of the copies do not determine u elsewhere.
    Sites: ``u``, ``f``, ``y``, and one for each hyperparameter that has a prior (:class:`~pyro.nn.PyroSample`
    attributes of kernel, mean and likelihood, assigned before the model is built).

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs of similar spread: independent functions of one kernel, and one noise.
            None where the model returns f for use in a larger program.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern52 with one
            lengthscale per column. Unset hyperparameters start from the data (:mod:`pyro_nngp.starts.from_data`).
        likelihood: p(y | f); None is Gaussian, or without y makes ``model`` return f at the batch.
        num_neighbors: H, at most M; None is 32, or M if that is less. With H = M the bound is that of SVGP.
        inducing: an int M starts the inducing points by k-means; a tensor (M, D) gives them; None is one for each 32
            rows, at least 64 and at most 1,024: with more of them q(u) follows single data.
        learn_inducing: whether the inducing points are parameters. The neighbors of fixed ones are found once.
        mean_field: whether q(u) is diagonal; otherwise it has a dense Cholesky factor, for M up to 10,000.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``, such as ``torch.nn.Linear(D, 1)``; None is a learnable
            constant.
        loc: initial mean of q(u), without the mean function, (M,) or (M, L); None is zero, with Gaussian noise and no
            `scale` what the H nearest data say.
        scale: initial standard deviation of q(u); None is a tenth of the spread of f in the data, with Gaussian noise
            and no `loc` what the H nearest data say.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None is that of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights, trials, limits: of each row, as in :class:`~pyro_nngp.models.tower.GPMethod`.
        seed: seed of k-means.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, H or M out of range, targets
            outside the support of the likelihood.

    Reference: Tran, Milios, Michiardi, Filippone (2021), "Sparse within sparse Gaussian processes using neighbor
    information", ICML.
    """

    lengthscale: Tensor
    data_neighbors: Any

    vectorizes = True
    can_distribute = True
    has_row_tables = False
    predicts_from_rows = False
    sites_determine_f = False
    bounds_evidence = False

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
        learn_inducing: bool = True,
        mean_field: bool = True,
        mean: Callable | None = None,
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
        super().__init__(x, y, kernel, likelihood, mean, jitter, metric, start, **by_row)
        z = inducing_points("SWSGP", x, inducing, seed, min(_MOST, max(_LEAST, len(x) // _ROWS)))
        num_neighbors = min(_USUAL_NEIGHBORS, len(z)) if num_neighbors is None else num_neighbors
        check_num_neighbors("SWSGP", num_neighbors, len(z))
        if not mean_field and len(z) > LARGEST_FULL:
            fail("SWSGP", "mean_field", f"True beyond M = {LARGEST_FULL}", f"False at M = {len(z)}", "It takes M x M.")
        self.num_neighbors, self.mean_field = num_neighbors, mean_field
        self.register_buffer("lengthscale", torch.ones_like(x[0]))
        self.search_metric: Any = None  # used where lengthscales do not determine the correlation
        self._set_metric()
        self._place_inducing(z, learn_inducing)
        self.register_buffer("data_neighbors", None if learn_inducing else self._nearest(x))
        self.local: LocalGaussian | DenseGaussian
        if mean_field:
            self.local = LocalGaussian(len(z), None, self.num_latents, loc, scale, self.unit, like=x)
        else:
            self.local = DenseGaussian(len(z), self.num_latents, False, loc, scale, self.unit, like=x)
        unset = loc is None and scale is None and self.y is not None
        self.finish(self._start_q if unset and isinstance(self.likelihood, Gaussian) else None)

    @pyro_entry
    @torch.no_grad()
    def _start_q(self) -> None:
        """Put q(u) at the posterior of each inducing value given its H nearest data; O(M H^3).

        A batch moves the values beside its rows alone, so that training takes long to get there from zero.
        """
        self._place_medians()
        near = nearest_inducing(self.z, self.x, min(self.num_neighbors, self.num_rows), self._searched())
        y, likelihood = cast(Tensor, self._targets(None)), self.likelihood_at(slice(None))
        target, noise = gaussian_observations(likelihood, y, None, self.x.dtype)
        noise = noise.expand(torch.broadcast_shapes(noise.shape, y.shape[-1:]))
        w, var = graph_conditional(bind(self.kernel), self.z, self.x, near, noise, self.jitter)
        loc = (w * values_at(target - self._mean_at(self.x, rows_of(None)), near)).sum(-1)
        self.local.assign(dist.Normal(loc, var.sqrt().expand(loc.shape)))

    @property
    def num_inducing(self) -> int:
        """M."""
        return len(self.z)

    @pyro_entry
    def model(self, idx: Int[Tensor, " I"] | None = None, neighbors: Int[Tensor, "I H"] | None = None) -> Tensor:
        """The generative model, on a batch of data points.

        Args:
            idx: rows of the data; None is all.
            neighbors: the nearest inducing points of the batch; None finds them.

        Returns:
            y at the batch, or f at the batch when there is no likelihood. Latent dimensions lead: (..., I).
        """
        self.start_model(idx)
        plates = self.plates(idx)
        return self.observe(plates, self._u_and_f(plates, idx, neighbors), idx)

    @pyro_entry
    def guide(self, idx: Int[Tensor, " I"] | None = None, neighbors: Int[Tensor, "I H"] | None = None) -> Tensor:
        """q(u_i) for each data point, q(f | u) = p(f | u) and the hyperparameters' guide; returns f."""
        self.start_guide(idx)
        neighbors = self.neighbors(idx) if neighbors is None else neighbors
        return self._u_and_f(self.plates(idx), idx, neighbors, self._local(neighbors))

    def batch_args(self, idx: Int[Tensor, " I"] | None, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """Arguments of model and guide for a minibatch: its neighbors, found once for both."""
        return idx, self.neighbors(idx)

    @pyro_entry
    @torch.no_grad()
    def refresh_neighbors(self) -> None:
        """Find neighbors in the present metric of the kernel from now on."""
        self._place_medians()
        self._set_metric()
        if self.data_neighbors is not None:
            self.data_neighbors.copy_(self._nearest(self.x))

    def take_rows(self, first: bool = False) -> None:
        super().take_rows(first)
        self.find_rows()

    def find_rows(self) -> None:
        if self.data_neighbors is not None:
            self.data_neighbors = self._nearest(self.x)

    def append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super().append_rows(x, y, by_row)
        if self.data_neighbors is not None:
            self.data_neighbors = torch.cat([self.data_neighbors, self._nearest(x)])
        warn_untrained(type(self).__name__)

    def _u_and_f(
        self, plates: Plates, idx: Tensor | None, neighbors: Tensor | None, q: Distribution | None = None
    ) -> Tensor:
        """The sites u and f; in the guide (q given) f has its marginal, for the integrating ELBO."""
        x, neighbors = self._inputs(idx), self.neighbors(idx) if neighbors is None else neighbors
        mean, (data, latents) = self._mean_at(x, rows_of(idx)), plates
        cov = self.covariance()
        w, var = shared((self, "f"), lambda: graph_conditional(cov, x, self.z, neighbors, jitter=self.jitter))
        of_u: Any = q
        if q is None:
            points = self.z[neighbors]
            of_u = ZeroMeanNormal(cov(points, points), self.jitter)
        with latents, data, poutine.scale(scale=1 / self.num_rows):
            u = pyro.sample(self.site("u"), of_u)
        marginal = None
        if q is not None:
            loc, spread = self._combined(w, q)
            marginal = (mean + loc, var + spread)
        return self.sample_f(plates, mean + (w * u).sum(-1), var, marginal)

    def _local(self, neighbors: Int[Tensor, "B H"]) -> Distribution:
        """q(u_w) for each row of neighbors, batch shape (*L, B), event shape (H,)."""
        rows, positions = distinct_rows(neighbors)
        if self.mean_field:
            q = self.local.distribution(rows)
            return dist.Normal(q.loc[..., positions], q.scale[..., positions]).to_event(1)
        q = self.local.distribution()
        factor = q.scale_tril[..., rows, :]
        cov = (factor @ factor.mT)[..., positions[:, :, None], positions[:, None, :]]
        return dist.MultivariateNormal(q.loc[..., neighbors], scale_tril=cholesky(cov, 0.0, escalate=True))

    def _combined(self, w: Tensor, q: Distribution) -> tuple[Tensor, Tensor]:
        """Means and variances of the combinations w of values under q(u_w)."""
        return (w * q.mean).sum(-1), combined_variance(q, w[..., None, :])[..., 0]

    def warn_of_intervals(self) -> None:
        """Warn of data for which no log evidence tells whether f follows single ones; for labels it always does."""
        if self.likelihood is not None and not self.likelihood.is_gaussian:
            warn(
                f"SWSGP: intervals of f from {type(self.likelihood).__name__} data are too narrow: 95 % ones may cover "
                "half of it, since the bound averages local divergences. Take SVGP or VNNGP for them."
            )

    @pyro_entry
    @torch.no_grad()
    def log_evidence(self, rows: Int[Tensor, " B"]) -> Tensor | None:
        """Mean log density of the data at some rows given those before them in a random order, up to 32 neighbors.

        None where :func:`~pyro_nngp.models.tower.evidence.has_evidence` is False. Cost: O(B N).
        """
        if not has_evidence(self):
            return None
        kernel, few = bind(self.kernel), min(_EVIDENCE_NEIGHBORS, self.num_rows - 1)
        near = nearest_predecessors(kernel, self.x, rows, few, seed=0)
        residual = cast(Tensor, self._targets(None)) - self._mean_at(self.x, rows_of(None))
        noise = self.likelihood_at(slice(None)).variance.expand(self.num_rows)
        return log_density_given(kernel, self.x, rows, near, residual, noise, self.jitter).mean()

    def plan(self, x_new: Tensor, num_neighbors: int | None) -> Tensor:
        """Rows of the nearest inducing points."""
        return self._nearest(x_new, num_neighbors)

    def moments(self, x_new: Tensor, plan: Tensor, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """O(P H^3)."""
        _refuse(draw)
        w, var = graph_conditional(self.kernel, x_new, self.z, plan, jitter=self.jitter)

        def block(part: slice) -> tuple[Tensor, Tensor]:
            return self._combined(w[part], self._local(plan[part]))

        loc, spread = in_blocks(block, len(w), w.shape[1] ** 2, -1)
        return self._mean_at(x_new) + loc, var + spread

    def leave_one_out(self, rows: Tensor, num_neighbors: int | None, sampled: bool) -> Densities:
        r"""Densities from the q(u) with full covariance that maximizes the bound at these hyperparameters.

        The averaged local divergences amount to a prior precision :math:`\frac1N \sum_i E_i^\top K_{w(i)}^{-1} E_i`,
        which does not change when a datum is left out; O(N (M^2 + H^3) + M^3) per step.
        """
        self.refuse_neighbors(num_neighbors)
        if sampled:
            _refuse({})
        if self.num_inducing > LARGEST_FULL:
            expectation, cure = f"to be at most {LARGEST_FULL}", "It takes M x M. Score held-out data instead."
            fail("SWSGP.loo", "M", expectation, self.num_inducing, cure)
        near, leave_one_out = self.neighbors(None), InducingLeaveOneOut(False, self.total)

        def moments(likelihood: Likelihood, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
            cov = bind(self.kernel)
            w, var = graph_conditional(cov, self.x, self.z, near, jitter=self.jitter)
            blocks, prior = scattered(w, near, var, self.num_inducing), self._average_precision(cov, near)
            return leave_one_out(likelihood, y, mean, blocks, prior, cov.diag(self.x))

        return self.scores(rows, moments)

    def _average_precision(self, cov: Covariance, near: Int[Tensor, "N H"]) -> Float[Tensor, "M M"]:
        """Precision of the local priors, averaged over the data, in float64; 1 for inducing points without data."""
        total = torch.zeros(self.num_inducing**2, dtype=torch.float64, device=self.x.device)

        def block(part: slice) -> tuple[Tensor]:
            local, z = near[part], self.z[near[part]]
            inverse = factor_inverse(cholesky(cov(z, z), self.jitter))
            places = local[:, :, None] * self.num_inducing + local[:, None, :]
            total.index_add_(0, places.flatten(), inverse.double().flatten() / self.num_rows)
            return (local[:, 0],)

        in_blocks(block, self.num_data, 4 * near.shape[1] ** 2)
        average = self.total(total).view(self.num_inducing, -1)
        unseen = average.diagonal() == 0
        return average + torch.diag(unseen.to(average))

    def joint_plan(self, x_new: Tensor, num_neighbors: int | None, seed: int) -> Tensor:
        """Rows of the nearest inducing points; there is no order of the new points."""
        return self._nearest(x_new, num_neighbors)

    def joint_draws(self, x_new: Tensor, plan: Tensor, count: int, draw: Draw | None) -> Tensor:
        """O(P H^3), O(M + P H) per draw."""
        _refuse(draw)
        w, var = graph_conditional(self.kernel, x_new, self.z, plan, jitter=self.jitter)
        u = self.local.distribution().sample((count,))
        loc = torch.stack([(w * values[..., plan]).sum(-1) for values in u])
        return self._mean_at(x_new) + loc + var.sqrt() * torch.randn_like(loc)

    def neighbors(self, idx: Tensor | None) -> Tensor:
        """The nearest inducing points of a batch of data points."""
        if self.data_neighbors is None:
            return self._nearest(self._inputs(idx))
        return self.data_neighbors if idx is None else self.data_neighbors[idx]

    def _set_metric(self) -> None:
        metric = self.neighbor_metric()
        if isinstance(metric, Tensor):
            self.lengthscale.copy_(metric)
        else:
            self.search_metric = metric

    def _searched(self) -> Any:
        """The metric of searches."""
        return self.lengthscale if self.search_metric is None else self.search_metric

    def _nearest(self, x: Tensor, num_neighbors: int | None = None) -> Tensor:
        num_neighbors = self.num_neighbors if num_neighbors is None else num_neighbors
        check_num_neighbors("SWSGP", num_neighbors, self.num_inducing)
        return nearest_inducing(x, self.z, num_neighbors, self._searched())


def _refuse(draw: Draw | None) -> None:
    if draw is not None:
        cure = "Predict from the guide, or take posterior draws of SVGP or VNNGP."
        fail("SWSGP", "samples", "None", "posterior draws of each datum's own copy of u", cure)
