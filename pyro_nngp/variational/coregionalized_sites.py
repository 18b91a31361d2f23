r"""The Gaussian posterior of L latent functions given sites of T outputs that are weighted sums of them.

.. math:: q(u) \propto \prod_l p(u_l) \prod_{p, i} N(t_{pi} \mid a_{pi}^\top u(x_i), \tau_{pi}^{-1}),

with sites from the moments of the outputs :math:`f_p(x_i) = a_{pi}^\top u(x_i)`, as those of one function
(:mod:`pyro_nngp.variational.sites`). A mean-field q would take the latent functions at a point to be independent, but
data determine sums of them: q keeps their covariance, L x L at each point.

Means solve the sparse system that couples all latent functions (:mod:`pyro_nngp.linalg.coupled_posterior`).
Covariances are those given the sites of the nearest points, the point itself included: at least K points, and up to 96
sites. Rows and outputs without a datum have the precision 0.

Cost: O(N (k T)^3) per round of covariances with k nearest points, and O(N L K) per iteration of conjugate gradients to
solve; a batch touches its own rows. Memory: O(N L (K + L)). Symbols: N points, K neighbors, T outputs, L latent
functions, U rows of a batch and its neighbors, P new points.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from pyro_nngp._checks import warn
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.conditionals.coregionalized import gathered, latent_conditional, outputs_of
from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.coregionalized import CoregionalizedPosterior, NNGPs, whitened_sites
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.likelihoods import PerOutput
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.linalg import cholesky, solve_triangular
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.coregionalized_evidence import coregionalized_excess
from pyro_nngp.variational.evidence_excess import EvidenceExcess
from pyro_nngp.variational.latent_prior import LatentPrior, alone
from pyro_nngp.variational.natural_gradient import gaussian_sites
from pyro_nngp.variational.sites import GaussianSites

_LEAST = 1e-3  # curvature of the levels, in units of those of single outputs: data that say less do not move them far
_SITES = 96  # that covariances depend on, if there are so many


class CoregionalizedSites(GaussianSites):
    """Sites of T outputs at the N points of a graph, and the moments of the latent functions under q, as buffers.

    Args:
        y: data, (N, T), NaN where they are missing.
        likelihood: of all outputs.
        kernels: a module list of one kernel for each latent function, or one for all.
        graph: neighbors of the prior.
        mean: mean function of the outputs, as of :class:`~pyro_nngp.variational.sites.GaussianSites`.
        loading: maps points (n, D) to the loadings (n, T, L), or (1, T, L) where they are the same at all.
        num_latents: L.
        jitter: relative nugget of the prior.
        parameters: a function that returns what the evidence of the sites depends on, as of
            :class:`~pyro_nngp.variational.sites.GaussianSites`.
        level: the mean function as a module.
        likelihood_at: the bound likelihood of some rows, for weights and trials; None is the same for all.

    Attributes:
        target, precision: sites of the outputs less the mean function, (T, N).
        loc: marginal means of the latent functions, (L, N).
        covariance: their covariances at each point, (N, L, L).
        variance: marginal variances of the outputs, (T, N).
    """

    trained_buffers = GaussianSites.trained_buffers | {"covariance"}
    covariance: Tensor

    def __init__(
        self,
        y: Float[Tensor, "N T"],
        likelihood: PerOutput,
        kernels: nn.ModuleList,
        graph: NeighborGraph,
        mean: Callable[..., Tensor],
        loading: Callable[[Tensor], Tensor],
        num_latents: int,
        jitter: float,
        parameters: Callable[[], Iterable[Tensor]] = list,
        level: Any = None,
        likelihood_at: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(y, likelihood, kernels, graph, mean, (y.shape[1],), jitter, parameters, level, likelihood_at)
        self._loading = loading
        self.excess = EvidenceExcess(self.unsolved_parameters())
        self._latent: CoregionalizedPrior | None = None
        self.register_buffer("loc", graph.x.new_zeros(num_latents, graph.num_points))
        unit = torch.eye(num_latents).to(graph.x)
        self.register_buffer("covariance", unit.repeat(graph.num_points, 1, 1))

    @pyro_entry
    def observations(self, rows: Int[Tensor, " U"] | None = None) -> tuple[Float[Tensor, "T U"], Float[Tensor, "T U"]]:
        """Sites of the outputs less the mean function, and their precisions, at some rows (None: all).

        Those of outputs with Gaussian noise are the data, with gradients for noise and mean function; 0 where an output
        is missing.
        """
        at = slice(None) if rows is None else rows
        _, graph, mean_at, _, _ = self._prior
        x, likelihood, y = graph.x[at], cast(PerOutput, self._bound(at)), self.y[at].mT
        seen, mean = ~y.isnan(), mean_at(graph.x[at], at).expand(y.shape)
        targets, precisions = list(self.target[:, at]), list(self.precision[:, at])
        weights = None if likelihood.weights is None else likelihood.weights.expand(y.shape)
        for number, part in enumerate(likelihood.outputs):
            if part.is_gaussian:
                own = part if weights is None else part.for_rows(weights[number])
                values, noise = gaussian_observations(own, y[number].nan_to_num(), None, x.dtype)
                targets[number], precisions[number] = values - mean[number], (1 / noise).expand(values.shape)
        target, precision = torch.stack(targets), torch.stack(precisions)
        return torch.where(seen, target, 0.0), torch.where(seen, precision, 0.0)

    @pyro_entry
    def distribution(self, prior: NNGPs) -> CoregionalizedPosterior:
        """q(u) at the rows of a prior's batch."""
        if torch.is_grad_enabled() and not (self.is_exact or bool(self.solved)):
            warn(
                "CoregionalizedSites: q(u) is the prior, since solve() has not been called. Call it before training "
                "and every few steps, as fit() does."
            )
        return self._posterior(prior, self.excess(self.unsolved_parameters()))

    def _posterior(self, prior: NNGPs, offset: Tensor | None = None) -> CoregionalizedPosterior:
        rows = prior.batch.rows
        target, precision = self.observations(None if prior.is_whole else rows)
        loading, loc, cov = self._loading(self._prior[1].x[rows]), self.loc[:, rows], self.covariance[rows]
        return CoregionalizedPosterior(prior, loading, target, precision, loc, cov, offset=offset)

    @pyro_entry
    def latent_prior(self) -> "CoregionalizedPrior":
        """The priors at the present hyperparameters."""
        kernels, graph, _, jitter, _ = self._prior
        bound, near = [bind(kernel) for kernel in kernels], self._nearest_points()
        self._latent = CoregionalizedPrior(bound, graph, jitter, self._loading(graph.x), ~self.y.isnan().mT, near)
        return self._latent

    @pyro_entry
    @torch.no_grad()
    def solve(self, max_steps: int = 100, tolerance: float = 1e-3, level: bool = True) -> None:
        """As of :class:`~pyro_nngp.variational.sites.GaussianSites`."""
        super().solve(max_steps, tolerance, level)
        seen = ~self.y.isnan().mT
        self.precision.mul_(seen)
        self.target.mul_(seen)
        latent = cast(CoregionalizedPrior, self._latent)
        found = latent.posterior_covariance(self.precision) if latent.covariance is None else latent.covariance
        self.covariance.copy_(found)
        self._latent = None

    @pyro_entry
    def correct(self) -> None:
        """Update the difference of the two evidences."""
        kernels, graph, _, jitter, _ = self._prior

        def posterior_at(rows: Tensor | None) -> CoregionalizedPosterior:
            batch = graph.batch(rows)
            return self._posterior(NNGPs([NNGP(k, graph, batch, jitter=jitter) for k in kernels], len(self.loc)))

        self.excess.update(
            self.unsolved_parameters(),
            lambda parameters: coregionalized_excess(parameters, posterior_at),
            self.loc.numel(),
        )

    def _nearest_points(self) -> Int[Tensor, "N k"]:
        """The points that covariances at the points depend on, kept until the neighbors change."""
        graph = self._prior[1]
        return self._cache.nearest(lambda: graph.query(graph.x, self.prediction_neighbors()))

    def prediction_neighbors(self) -> int:
        """The number of nearest points per point that covariances depend on: K, or more for up to 96 sites."""
        graph = self._prior[1]
        return min(graph.num_points, max(graph.num_neighbors, _SITES // self.y.shape[1]))

    @pyro_entry
    def moments(
        self, x_new: Float[Tensor, "P D"], nearest: Int[Tensor, "P k"]
    ) -> tuple[Float[Tensor, "L P"], Float[Tensor, "P L L"]]:
        """Means and covariances of the latent functions at new points, given the rows of their nearest points.

        The mean is that of the prior given the posterior means at the nearest points, or before :meth:`solve` given the
        sites. Cost: O(P (k T)^3).
        """
        loc, cov = self.given_sites(x_new, nearest)
        if not bool(self.solved):
            return loc, cov
        return self.given_values(x_new, nearest, self.loc)[0], cov

    @pyro_entry
    def given_sites(
        self, x: Float[Tensor, "P D"], near: Int[Tensor, "P k"]
    ) -> tuple[Float[Tensor, "L P"], Float[Tensor, "P L L"]]:
        """Means and covariances of the latent functions at points, given the sites at some rows alone."""
        kernels, graph, _, jitter, _ = self._prior
        bound, (rows, values) = [bind(kernel) for kernel in kernels], self._rows()
        around, noise = gathered(rows, torch.ones_like(values), near)
        weights, cov = latent_conditional(bound, x, graph.x[near.clamp(min=0)], around, noise, jitter)
        return (weights @ values[near.clamp(min=0)].flatten(1)[..., None])[..., 0].mT, cov

    @pyro_entry
    def given_values(
        self, x: Float[Tensor, "P D"], near: Int[Tensor, "P k"], u: Float[Tensor, "*S L N"]
    ) -> tuple[Float[Tensor, "*S L P"], Float[Tensor, "... P L L"]]:
        """Means and covariances of the latent functions at points, given their values at some rows.

        Batches of hyperparameters have dimensions of one for the plates of outputs and data, as in posterior draws.
        """
        kernels, graph, _, jitter, _ = self._prior
        bound = [bind(kernel).shifted(-2) for kernel in kernels]
        found = [graph_conditional(kernel, x, graph.x, near, None, jitter) for kernel in bound]
        each = found * u.shape[-2] if len(found) == 1 else found
        at = near.clamp(min=0)
        loc = [(w * values[..., at]).sum(-1) for (w, _), values in zip(each, u.unbind(-2), strict=True)]
        variances = torch.broadcast_tensors(*(var for _, var in each))
        return torch.stack(loc, -2), torch.diag_embed(torch.stack(variances, -1))

    @pyro_entry
    @torch.no_grad()
    def joint_deviations(
        self, x_new: Float[Tensor, "P D"], plan: Int[Tensor, "P k"], count: int
    ) -> Float[Tensor, "S L P"]:
        """Joint draws of the latent functions at new points less their means, each given nearby sites and new values.

        Args:
            x_new: new points.
            plan: from :meth:`~pyro_nngp.neighbors.graph.NeighborGraph.extend`.
            count: S.

        Cost: O(P (k R)^3) with R = max(T, L), then O(P k L^2) per draw.
        """
        kernels, graph, _, jitter, _ = self._prior
        (rows, values), (size, n) = self._rows(), self.loc.shape
        width = max(values.shape[1], size)
        rows, noise = pad(rows, (0, 0, 0, width - values.shape[1])), values.new_ones(n + len(x_new), width)
        rows = torch.cat([rows, torch.eye(width, size).to(rows).expand(len(x_new), -1, -1)])
        noise[n:, :size] = 0.0  # new values are noise-free
        points = torch.cat([graph.x, x_new])
        around, noise = gathered(rows, noise, plan)
        bound = [bind(kernel) for kernel in kernels]
        weights, cov = latent_conditional(bound, x_new, points[plan.clamp(min=0)], around, noise, jitter)
        tril = cholesky(cov, 0.0, escalate=True)
        white = torch.randn(len(x_new), size, count, dtype=cov.dtype, device=cov.device)
        number = torch.arange(width, device=plan.device)
        places = torch.where((plan[..., None] >= n) & (number < size), (plan[..., None] - n) * size + number, -1)
        deviations = (tril @ white).permute(2, 0, 1).flatten(1)
        found = solve_triangular(weights.flatten(0, 1), places.flatten(1).repeat_interleave(size, 0), deviations)
        return found.unflatten(1, (-1, size)).mT

    @pyro_entry
    @torch.no_grad()
    def append(self, y: Tensor, loc: Float[Tensor, "T P"], variance: Float[Tensor, "T P"]) -> None:
        """Append the last P points of the graph, with sites for N(loc, variance) of f and the point's own data."""
        _, graph, mean_at, _, _ = self._prior
        rows = slice(graph.num_points - loc.shape[-1], None)
        likelihood, new = self._bound(rows), y[rows].mT
        seen = ~new.isnan()
        target, precision = gaussian_sites(likelihood, new, *alone(likelihood, new, loc, variance))
        target = (target - mean_at(graph.x[rows], rows)) * seen
        self.y = y
        for name, value in (("target", target), ("precision", precision * seen), ("variance", variance)):
            setattr(self, name, torch.cat([getattr(self, name), value.to(self.loc)], -1))
        self.loc = pad(self.loc, (0, loc.shape[-1]))
        self.covariance = torch.cat([self.covariance, self.covariance[:1].expand(loc.shape[-1], -1, -1)])
        self.follow(graph)

    def _rows(self) -> tuple[Float[Tensor, "N T L"], Float[Tensor, "N T"]]:
        """Loadings and targets of the sites in units of their standard deviations; zeros where an output is missing."""
        target, precision = self.observations()
        return whitened_sites(self._loading(self._prior[1].x), target, precision)


class CoregionalizedPrior(LatentPrior):
    """The priors of the latent functions at fixed hyperparameters.

    Args:
        kernels: bound, one for each latent function or one for all.
        graph: the points and their neighbors.
        jitter: relative nugget.
        loading: at the points, (N, T, L) or (1, T, L).
        seen: which outputs are there, (T, N).
        nearest: rows of the points that the covariances at each point depend on.

    Attributes:
        covariance: of the latent functions at each point, (N, L, L), as found last.
    """

    covariance: Tensor | None = None
    _last: CoupledPosterior | None = None

    def __init__(
        self,
        kernels: Sequence[Covariance],
        graph: NeighborGraph,
        jitter: float,
        loading: Float[Tensor, "#N T L"],
        seen: Tensor,
        nearest: Int[Tensor, "N k"],
    ) -> None:
        self._kernels, self._graph, self._jitter, self._nearest = kernels, graph, jitter, nearest
        whole = graph.batch()
        priors = [NNGP(kernel, graph, whole, jitter=jitter, validate_args=False) for kernel in kernels]
        self._factors = NNGPs(priors, loading.shape[-1], validate_args=False).factors()
        self._loading, self._seen = loading.detach().expand(graph.num_points, *loading.shape[1:]), seen
        self._none = self._posterior(torch.zeros_like(seen, dtype=torch.float64))

    @property
    def variance(self) -> Float[Tensor, "T N"]:
        own = torch.stack([kernel.diag(self._graph.x) for kernel in self._kernels], -1)[:, None]
        return (self._loading.square() * own).sum(-1).mT

    def start(self, f: Float[Tensor, "T N"]) -> Float[Tensor, "L N"]:
        return f.new_zeros(self._loading.shape[-1], f.shape[-1])

    def at(self, u: Float[Tensor, "L N"]) -> Float[Tensor, "T N"]:
        return self._none.at(u.double()).to(u)

    def divergence(self, loc: Float[Tensor, "L N"]) -> float:
        return float((loc * self._none.prior_product(loc.double())).sum()) / 2

    def posterior_mean(
        self, target: Tensor, precision: Tensor, start: Tensor, easy: bool, tolerance: float, reduction: float
    ) -> tuple[Float[Tensor, "L N"], bool]:
        posterior = self._posterior(precision * self._seen)
        loc, easy = posterior.mean(target.masked_fill(~self._seen, 0.0), start, easy, tolerance, reduction)
        return loc.to(start), easy

    def posterior_variance(self, precision: Float[Tensor, "T N"]) -> Float[Tensor, "T N"]:
        cov = self.posterior_covariance(precision * self._seen)
        return outputs_of(self._loading, torch.zeros_like(cov[..., 0]).mT, cov)[1]

    def posterior_covariance(self, precision: Float[Tensor, "T N"]) -> Float[Tensor, "N L L"]:
        """Covariances of the latent functions at each point."""
        x, near = self._graph.x, self._nearest
        rows, values = whitened_sites(self._loading, torch.zeros_like(precision), precision)
        around, noise = gathered(rows, torch.ones_like(values), near)
        self.covariance = latent_conditional(self._kernels, x, x[near], around, noise, self._jitter)[1]
        return self.covariance

    def level_step(
        self, constant: Tensor, slope: Tensor, precision: Tensor, easy: bool, tolerance: float, limited: bool
    ) -> tuple[Tensor, Tensor]:
        """As of one function; the constants of the outputs are found together."""
        precision, slope = precision * self._seen, slope.masked_fill(~self._seen, 0.0)
        posterior, count = self._posterior(precision), len(slope)
        steps = torch.eye(count).to(slope) if constant.dim() else torch.ones(1, count).to(slope)
        zero = self.start(slope)
        gains = [posterior.mean(step[:, None].expand_as(slope), zero, easy, tolerance)[0].to(slope) for step in steps]
        rest = torch.stack([step[:, None] - self.at(gain) for step, gain in zip(steps, gains, strict=True)])
        curvature = steps @ (precision * rest).sum(-1).mT
        curvature = (curvature + curvature.mT) / 2
        scale = curvature.diagonal().clamp(min=torch.finfo(slope.dtype).tiny).rsqrt()
        strengths, axes = torch.linalg.eigh((curvature * scale * scale[:, None]).double())
        along = axes.mT @ (scale * (steps @ slope.sum(-1))).double() / strengths.clamp(min=_LEAST)
        change = scale * (axes @ along).to(slope)
        if limited:
            spread = self.variance.mean(-1).sqrt()
            spread = spread if constant.dim() else spread.mean()[None]
            change = torch.minimum(torch.maximum(change, -spread), spread)
        return change, torch.einsum("s,sln->ln", change, torch.stack(gains))

    def _posterior(self, precision: Tensor) -> CoupledPosterior:
        """The posterior with these precisions; the last one is kept, with what it has factorized."""
        if self._last is None or not torch.equal(self._last.precision, precision.double()):
            self._last = CoupledPosterior(self._factors, self._loading, precision)
        return self._last
