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
Since the loss then goes on falling while predictions get worse, ``fit(gp)`` holds a tenth of the rows out of training
where M is larger than by default, and keeps the state that predicts them best (:meth:`SWSGP.holding_out`), as the
paper chooses its epochs; and where the points are learned, noise starts at a fifth of the variance of y. For labels f
is still too large: at M = 200 and N = 500, 95 % intervals cover .66 of the function (docs/intervals.md); predictions
from other than Gaussian data warn of that.

Cost per step: O(|I| H^3) with fixed inducing points, independent of N and M; with learned ones also a search for
the H nearest of M, and with a full covariance O(M min(M, |I| H)^2). Memory O(N H + M); O(M^2) for a full covariance.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.nn import pyro_method
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import check_num_neighbors, check_rows, fail, warn
from pyro_nngp._indexing import values_at
from pyro_nngp._shared import shared
from pyro_nngp.bound import Bound
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributions.zero_mean_normal import ZeroMeanNormal
from pyro_nngp.hyperparameters import unset_hyperparameters
from pyro_nngp.hyperparameters.reading import parameter_site
from pyro_nngp.hyperparameters.values import Values
from pyro_nngp.inducing.points import inducing_points, nearest_inducing, place_inducing
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.linalg import cholesky, factor_inverse, in_blocks
from pyro_nngp.models.base import Draw, Method, Posterior, Program
from pyro_nngp.models.base.arguments import check_family, smooth_kernel
from pyro_nngp.models.base.evidence import correlated_predecessors, has_evidence, log_density_given
from pyro_nngp.models.base.extension import warn_untrained
from pyro_nngp.models.base.several_processes import distribute
from pyro_nngp.rows import Part
from pyro_nngp.starts.from_data import Start
from pyro_nngp.variational import (
    DenseGaussian,
    FullRank,
    InducingLeaveOneOut,
    LocalGaussian,
    MeanField,
    combined_variance,
    scattered,
)

LARGEST_FULL = 10_000  # inducing points: their covariance and its gradient then take 0.8 GB in float32

_LEAST, _MOST, _ROWS = 64, 1024, 32  # inducing points where none are given, one for so many rows
_USUAL_NEIGHBORS = 32
_EVIDENCE_NEIGHBORS = 32
_FEWEST_TO_HOLD, _MOST_HELD = 300, 2000  # rows of data that hold a tenth out, and most rows that are held out
_FIRST_NOISE = 0.2  # noise variance at the start where many inducing points are learned, in variances of y
_NO_WEIGHT = 1e-10


class SWSGP(Method):
    r"""Sparse within sparse Gaussian process.

    Generative model: each data point has a copy of the values at its H nearest inducing points,

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
        likelihood: p(y | f); None is Gaussian, or without y makes ``model`` return f at the batch. Unset Gaussian noise
            starts at a fifth of the variance of y where more inducing points than by default are learned.
        num_neighbors: H, at most M; None is 32, or M if that is less. With H = M the bound equals the bound of SVGP.
        inducing: an int M starts the inducing points by k-means; a tensor (M, D) gives them; None is one for each 32
            rows, at least 64 and at most 1,024: with more of them q(u) follows single data.
        learn_inducing: whether the inducing points are parameters. The neighbors of fixed ones are searched once.
        guide: family of q(u): :class:`~pyro_nngp.variational.MeanField`, which None is, or
            :class:`~pyro_nngp.variational.FullRank`, with a dense Cholesky factor, for M up to 10,000. With Gaussian
            noise a family that sets neither mean nor scale starts at what the H nearest data say of each value;
            otherwise the mean starts at zero, and the standard deviation at a tenth of the spread of f in the data.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``, such as ``torch.nn.Linear(D, 1)``; None is a learnable
            constant.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None takes the metric of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights, trials, limits: of each row, as in :class:`~pyro_nngp.models.base.Method`.
        seed: seed of k-means.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, H or M out of range, targets
            outside the support of the likelihood.

    Reference: Tran, Milios, Michiardi, Filippone (2021), "Sparse within sparse Gaussian processes using neighbor
    information", ICML.
    """

    lengthscale: Tensor
    data_neighbors: Any
    q: LocalGaussian | DenseGaussian
    _points = ("z",)
    _default_kernel = staticmethod(smooth_kernel)
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
        learn_inducing: bool = True,
        guide: MeanField | FullRank | None = None,
        mean: Callable | None = None,
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
        z = inducing_points("SWSGP", x, inducing, seed, _usual_inducing(len(x)))
        num_neighbors = min(_USUAL_NEIGHBORS, len(z)) if num_neighbors is None else num_neighbors
        check_num_neighbors("SWSGP", num_neighbors, len(z))
        guide = MeanField() if guide is None else guide
        check_family("SWSGP", guide, MeanField, FullRank)
        if isinstance(guide, FullRank) and len(z) > LARGEST_FULL:
            expectation, actual = f"MeanField() beyond M = {LARGEST_FULL}", f"FullRank() at M = {len(z)}"
            fail("SWSGP", "guide", expectation, actual, "It takes M^2.")
        self.num_neighbors = num_neighbors
        place_inducing(self, z, x, learn_inducing)
        self._start()
        self.register_buffer("lengthscale", torch.ones_like(x[0]))
        self.search_metric: Any = None  # used where lengthscales do not determine the correlation
        self._set_metric()
        self.register_buffer("data_neighbors", None if learn_inducing else self._nearest(x))
        settings = guide.loc, guide.scale, self._unit
        if isinstance(guide, MeanField):
            self.q = LocalGaussian(len(z), None, self.num_latents, *settings, like=x)
        else:
            self.q = DenseGaussian(len(z), self.num_latents, False, *settings, like=x)
        if guide.loc is None and guide.scale is None and isinstance(self.likelihood, Gaussian):
            self.q.assign(self._first_q())

    def _start_from(self, at: Values, trend: Callable[[Tensor], Tensor] | None) -> Start:
        """As of other methods; but where many inducing points are learned an unset noise is not searched for.

        From little of it q(u) follows single data before the points have found their places, and does not come back.
        Points that stay at data start with a q(u) that predicts well.
        """
        is_open = isinstance(self.likelihood, Gaussian) and bool(unset_hyperparameters(self.likelihood))
        if is_open and self.rows.is_whole and self._has_many_inducing and "z" not in self._buffers:
            first = _FIRST_NOISE * self.rows.targets().var()
            if first > 0:
                self.likelihood.variance = first
        return super()._start_from(at, trend)

    @torch.no_grad()
    def _first_q(self) -> dist.Normal:
        """The posterior of each inducing value given its H nearest data, where q(u) starts; O(M H^3).

        A batch moves the values beside its rows alone, so that training takes long to get there from zero.
        """
        bound, rows = self.bound(), self.rows
        near = nearest_inducing(self.z, self.x, min(self.num_neighbors, rows.num_rows), self._searched())
        target, noise = gaussian_observations(rows.likelihood(bound), rows.targets(), None, self.x.dtype)
        noise = noise.expand(torch.broadcast_shapes(noise.shape, target.shape[-1:]))
        w, var = graph_conditional(bound.covariance, self.z, self.x, near, noise, self.jitter)
        loc = (w * values_at(target - rows.mean(bound), near)).sum(-1)
        return dist.Normal(loc, var.sqrt().expand(loc.shape))

    @property
    def num_inducing(self) -> int:
        """M."""
        return len(self.z)

    @pyro_method
    def model(self, idx: Int[Tensor, " I"] | None = None, neighbors: Int[Tensor, "I H"] | None = None) -> Tensor:
        """The generative model, on a batch of data points.

        Args:
            idx: rows of the data; None is all.
            neighbors: the nearest inducing points of the batch; None finds them.

        Returns:
            y at the batch, or f at the batch when there is no likelihood. Latent dimensions lead: (..., I).
        """
        program = Program.model(self, idx)
        return program.observe(self._u_and_f(program, self.neighbors(idx) if neighbors is None else neighbors))

    @pyro_method
    def guide(self, idx: Int[Tensor, " I"] | None = None, neighbors: Int[Tensor, "I H"] | None = None) -> Tensor:
        """q(u_i) for each data point, q(f | u) = p(f | u) and the hyperparameters' guide; returns f."""
        program = Program.guide(self, idx)
        neighbors = self.neighbors(idx) if neighbors is None else neighbors
        return self._u_and_f(program, neighbors, self.q.at_sets(neighbors, parameter_site))

    def _u_and_f(self, program: Program, near: Int[Tensor, "I H"], q: Distribution | None = None) -> Tensor:
        """The sites u and f; in the guide (q given) f has its marginal, for the integrating ELBO."""
        bound, z = program.bound, program.bound.others["z"]
        a, var = shared((self, "f"), lambda: graph_conditional(bound.at_data, program.x, z, near, jitter=bound.jitter))
        data, latents = program.plates
        # p(u_i)^(1 / N), u_i ~ N(0, K_w(i)), or q(u_w(i)): each local divergence counts 1 / N times (eq. 9, 10)
        of_u: Any = ZeroMeanNormal(bound.at_data(z[near], z[near]), bound.jitter) if q is None else q
        with latents, data, poutine.scale(scale=1 / program.rows.num_rows):
            u = pyro.sample(self.site("u"), of_u)
        # f_i | u_i ~ N(mu_i + a_i^T u_i, v_i); under q N(mu_i + a_i^T m_w, v_i + a_i^T S_w a_i)
        mean, marginal = program.mean(), None
        if q is not None:
            loc, spread = _combined(a, q)
            marginal = mean + loc, var + spread
        return program.sample_f(mean + (a * u).sum(-1), var, marginal)

    def posterior(self, bound: Bound, draw: Draw | None = None, part: Part | None = None) -> "NearestInducing":
        """f under q(u); posterior draws of the copies of u do not determine it."""
        if draw is not None:
            cure = "Predict from the guide, or take posterior draws of SVGP or VNNGP."
            fail("SWSGP", "samples", "None", "posterior draws of each datum's own copy of u", cure)
        return NearestInducing(
            self.rows, None, bound, self.q, self.num_neighbors, self._searched(), self.data_neighbors
        )

    def _posterior_in_guide(self, bound: Bound, draw: Draw, part: Part | None = None) -> "NearestInducing":
        """f under q(u) at the hyperparameters of a draw: f is drawn from the guide anew."""
        return self.posterior(bound, None, part)

    # Neighbors.

    def batch_args(self, idx: Int[Tensor, " I"] | None, generator: torch.Generator) -> tuple[Tensor | None, ...]:
        """Arguments of model and guide for a minibatch: its neighbors, searched once for both."""
        return idx, self.neighbors(idx)

    def neighbors(self, idx: Tensor | None) -> Int[Tensor, "I H"]:
        """The nearest inducing points of a batch of data points."""
        if self.data_neighbors is None:
            return self._nearest(self.rows.inputs(idx))
        return self.data_neighbors if idx is None else self.data_neighbors[idx]

    @torch.no_grad()
    def refresh_neighbors(self) -> None:
        """Find neighbors in the present metric of the kernel from now on."""
        self._set_metric()
        self._neighbors_changed()

    def _neighbors_changed(self) -> None:
        super()._neighbors_changed()
        if self.data_neighbors is not None:
            self.data_neighbors = self._nearest(self.x)

    def _distributed(self, choose: bool) -> None:
        self._neighbors_changed()

    def _append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super()._append_rows(x, y, by_row)
        if self.data_neighbors is not None:
            self.data_neighbors = torch.cat([self.data_neighbors, self._nearest(x)])
        warn_untrained(type(self).__name__)

    follows_rows = False

    def _keep_rows(self, rows: Int[Tensor, " S"]) -> None:
        super()._keep_rows(rows)
        if self.data_neighbors is not None:
            self.data_neighbors = self.data_neighbors[rows]
        self.q.restart(self.posterior(self.bound()))
        if isinstance(self.likelihood, Gaussian):
            self.q.assign(self._first_q())

    def _set_metric(self) -> None:
        metric = self._neighbor_metric()
        if isinstance(metric, Tensor):
            self.lengthscale.copy_(metric)
        else:
            self.search_metric = metric

    def _searched(self) -> Any:
        """The metric of searches."""
        return self.lengthscale if self.search_metric is None else self.search_metric

    def _nearest(self, x: Float[Tensor, "B D"]) -> Int[Tensor, "B H"]:
        return nearest_inducing(x, self.z, self.num_neighbors, self._searched())

    # Rows that tell when to stop.

    def held_out_rows(self, seed: int) -> Int[Tensor, " R"]:
        """A tenth of the rows, at most 2,000, at random, where there are more inducing points than by default.

        None of fewer than 300 rows, or on several processes.
        """
        rows = self.rows
        if rows.y is None or not (rows.is_whole and self._has_many_inducing):
            return torch.empty(0, dtype=torch.int64, device=self.x.device)
        order = torch.randperm(rows.num_rows, generator=torch.Generator().manual_seed(seed), device="cpu")
        return order[: min(rows.num_rows // 10, _MOST_HELD)].to(self.x.device)

    @property
    def _has_many_inducing(self) -> bool:
        """Whether there are more inducing points than by default, and rows enough to hold some out."""
        num_rows = self.rows.num_rows
        return num_rows >= _FEWEST_TO_HOLD and len(self.z) > _usual_inducing(num_rows)

    @contextmanager
    def holding_out(self, rows: Int[Tensor, " R"]) -> Iterator[Callable[[], float]]:
        """A context in which rows have next to no weight; its value is the mean negative log density of their y.

        A q(u) that is untrained starts from the other rows.
        """
        given, untrained = self.weights, self._is_untrained()
        weights = torch.ones_like(self.x[:, 0]) if given is None else given.clone()
        weights[rows] *= _NO_WEIGHT

        @torch.no_grad()
        def score() -> float:
            posterior, own, at = self.posterior(self.bound()), self.rows, rows.to(self.x.device)  # fit may move it
            near = self.neighbors(at)
            a, var = posterior.given_u(own.inputs(at), near)
            loc, spread = _combined(a, self.q.at_sets(near))
            f = own.mean(posterior.bound, at) + loc, var + spread
            return -float(own.likelihood(posterior.bound, at).marginal(*f).log_prob(own.targets(at)).mean())

        self.weights = weights
        try:
            if untrained:
                self.q.assign(self._first_q())
            yield score
        finally:
            self.weights = None if given is None else given.to(self.x.device)

    def _is_untrained(self) -> bool:
        """Whether q(u) is where the data put it at the start."""
        if not isinstance(self.likelihood, Gaussian):
            return False  # it starts at the same place whatever the data
        first = copy.deepcopy(self.q)
        first.assign(self._first_q())
        return all(torch.equal(*pair) for pair in zip(first.parameters(), self.q.parameters(), strict=True))

    # What a trained model is compared with.

    def _warn_of_intervals(self) -> None:
        """Warn of data for which no log evidence tells whether f follows single ones; for labels it always does."""
        if self.likelihood is not None and not self.likelihood.is_gaussian:
            warn(
                f"SWSGP: intervals of f from {type(self.likelihood).__name__} data are too narrow: 95 % ones may cover "
                "two thirds of it, since the bound averages local divergences. Take SVGP or VNNGP for them."
            )

    @torch.no_grad()
    def log_density(self, rows: Int[Tensor, " B"]) -> Tensor | None:
        """Mean log density of the data at some rows given those before them in a random order, up to 32 neighbors.

        The negative loss, which is no bound, should not exceed it. None where
        :func:`~pyro_nngp.models.base.evidence.has_evidence` is False. Cost: O(B N).
        """
        if not has_evidence(self):
            return None
        check_rows("SWSGP.log_density", "rows", rows, self.num_data)
        bound, data = self.bound(), self.rows
        few = min(_EVIDENCE_NEIGHBORS, data.num_rows - 1)
        near = correlated_predecessors(bound.covariance, self.x, rows, few, seed=0)
        residual, noise = data.targets() - data.mean(bound), data.likelihood(bound).variance.expand(data.num_rows)
        return log_density_given(bound.covariance, self.x, rows, near, residual, noise, bound.jitter).mean()


@dataclass(frozen=True)
class NearestInducing(Posterior):
    """f under q(u), from the inducing points nearest to each place.

    Attributes:
        q: the family.
        num_neighbors: H.
        metric: metric of the neighbors.
        data_neighbors: the nearest inducing points of each datum, if they are known.
    """

    q: LocalGaussian | DenseGaussian
    num_neighbors: int
    metric: Any
    data_neighbors: Any = None

    @property
    def z(self) -> Float[Tensor, "M D"]:
        """The inducing points, at their present places."""
        return self.bound.others["z"]

    def neighbors(self, x_new: Float[Tensor, "P D"], num_neighbors: int | None) -> Int[Tensor, "P H"]:
        self._check_neighbors(num_neighbors, len(self.z))
        k = self.num_neighbors if num_neighbors is None else num_neighbors
        return nearest_inducing(x_new, self.z, k, self.metric)

    def joint_neighbors(self, x_new: Float[Tensor, "P D"], num_neighbors: int | None, seed: int) -> Tensor:
        """Rows of the nearest inducing points; there is no order of the new points."""
        return self.neighbors(x_new, num_neighbors)

    def given_u(self, x: Float[Tensor, "B D"], near: Int[Tensor, "B H"]) -> tuple[Tensor, Tensor]:
        """Weights a (B, H) and variances v (B,) of f at x given u at near points."""
        return graph_conditional(self.bound.at_data, x, self.z, near, jitter=self.bound.jitter)

    def moments(self, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P H"]) -> tuple[Tensor, Tensor]:
        """O(P H^3)."""
        a, var = self.given_u(x_new, near)

        def block(part: slice) -> tuple[Tensor, Tensor]:
            return _combined(a[part], self.q.at_sets(near[part]))

        loc, spread = in_blocks(block, len(a), a.shape[1] ** 2, -1)
        return self.bound.mean(x_new) + loc, var + spread

    def joint(self, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P H"], count: int) -> Float[Tensor, "S *L P"]:
        """O(P H^3), O(M + P H) per draw."""
        a, var = self.given_u(x_new, near)
        u = self.q.distribution().sample(torch.Size((count,)))
        loc = torch.stack([(a * values[..., near]).sum(-1) for values in u])
        return self.bound.mean(x_new) + loc + var.sqrt() * torch.randn_like(loc)

    # Leave one out.

    def others(self, rows: Int[Tensor, " I"], num_neighbors: int | None) -> tuple[Tensor, Int[Tensor, "N H"]]:
        """The rows, and the nearest inducing points of all data."""
        self._refuse_neighbors(num_neighbors, ".loo")
        if len(self.z) > LARGEST_FULL:
            expectation, cure = f"to be at most {LARGEST_FULL}", "It takes M x M. Score held-out data instead."
            fail("SWSGP.loo", "M", expectation, len(self.z), cure)
        near = self.neighbors(self.rows.x, None) if self.data_neighbors is None else self.data_neighbors
        return rows, near

    def leave_one_out(self, others: tuple[Tensor, Int[Tensor, "N H"]]) -> Float[Tensor, "*T I"]:
        r"""Densities from the q(u) with full covariance that maximizes the bound at these hyperparameters.

        The averaged local divergences amount to a prior precision :math:`\frac1N \sum_i E_i^\top K_{w(i)}^{-1} E_i`,
        which does not change when a datum is left out; O(N (M^2 + H^3) + M^3) per step.
        """
        (rows, near), x, solve = others, self.rows.x, InducingLeaveOneOut(self.rows.total)
        a, var = self.given_u(x, near)
        blocks, prior = scattered(a, near, var, len(self.z)), self._average_precision(near)

        def moments(likelihood: Likelihood, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
            return solve(likelihood, y, mean, blocks, prior, self.bound.covariance.diag(x), False)

        return self.densities(rows, moments)

    def _average_precision(self, near: Int[Tensor, "N H"]) -> Float[Tensor, "M M"]:
        """Precision of the local priors, averaged over the data, in float64; 1 for inducing points without data."""
        m, cov, num_rows = len(self.z), self.bound.covariance, self.rows.num_rows
        total = torch.zeros(m**2, dtype=torch.float64, device=self.z.device)

        def block(part: slice) -> tuple[Tensor]:
            local, z = near[part], self.z[near[part]]
            inverse = factor_inverse(cholesky(cov(z, z), self.bound.jitter))
            places = local[:, :, None] * m + local[:, None, :]
            total.index_add_(0, places.flatten(), inverse.double().flatten() / num_rows)
            return (local[:, 0],)

        in_blocks(block, len(near), 4 * near.shape[1] ** 2)
        average = self.rows.total(total).view(m, -1)
        unseen = average.diagonal() == 0
        return average + torch.diag(unseen.to(average))


def _usual_inducing(num_rows: int) -> int:
    """M where none is given: with more of them q(u) follows single data."""
    return min(_MOST, max(_LEAST, num_rows // _ROWS))


def _combined(a: Float[Tensor, "... B H"], q: Distribution) -> tuple[Tensor, Tensor]:
    """Means and variances of the combinations a of values under q(u_w)."""
    return (a * q.mean).sum(-1), combined_variance(q, a[..., None, :])[..., 0]


__all__ = ["SWSGP"]
