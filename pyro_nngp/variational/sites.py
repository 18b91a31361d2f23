r"""The Gaussian posterior of a nearest-neighbor prior and Gaussian sites: one pseudo-observation of f at each point.

.. math:: q(f) \propto p(f) \prod_i N(t_i \mid f_i, \tau_i^{-1}), \qquad \tau_i = -2\, \partial \ell_i / \partial s_i,
   \quad t_i = m_i + \tau_i^{-1}\, \partial \ell_i / \partial m_i, \quad
   \ell_i = E_{N(m_i, s_i)} \log p(y_i \mid f_i),

the form of the optimal Gaussian q for every likelihood (Opper and Archambeau 2009; Khan and Lin 2017). A Gaussian
likelihood is its own sites. q has two numbers per point, as a mean-field family has, but its covariance is the inverse
of :math:`\Lambda + \mathrm{diag}\,\tau`, whereas a mean-field q has the reciprocal of that matrix's diagonal: the
variance of each value given all others, which is orders of magnitude smaller for a smooth function.

Means are those of the sparse prior times the sites, by conjugate gradients. Variances are those given the
pseudo-observations nearest to a point (:mod:`pyro_nngp.variational.site_neighbors`), pooled where they are noisy
(:mod:`pyro_nngp.variational.pooling`). Both are found together with the sites
(:mod:`pyro_nngp.variational.site_solution`). Divergence and draws are those of
``SitePosterior``. A minibatch evaluates the evidence of the sites as observations;
:mod:`pyro_nngp.variational.evidence_excess` adds what the evidence under the prior of latent values has in addition,
once :meth:`GaussianSites.correct` has found it.

Cost: O(N K^3) per round of variances and O(N K) per iteration of conjugate gradients to solve; a batch touches its own
rows. Memory: O(N K). Symbols: N points, K neighbors, U rows of a batch and its neighbors, P new points, L latent
functions.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from pyro_nngp._checks import warn
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.site_posterior import SitePosterior
from pyro_nngp.hyperparameters import GPModule, pyro_entry
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.kernels.base import bind_double
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.linalg import DEFAULT_JITTER
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.neighbors.choice_of_k import NeighborTrial
from pyro_nngp.variational.evidence_excess import EvidenceExcess, Excess, site_excess
from pyro_nngp.variational.latent_prior import LatentPrior
from pyro_nngp.variational.mean_coefficients import MeanCoefficients
from pyro_nngp.variational.natural_gradient import warn_unsettled
from pyro_nngp.variational.pooling import PooledObservations
from pyro_nngp.variational.site_neighbors import (
    NeighborCache,
    enough_for_predictions,
    prediction_range,
    variance_neighbors,
)
from pyro_nngp.variational.site_solution import SiteProblem, SiteSolution, optimal_sites, own_data_sites

_NO_PRECISION = 1e-6  # precision of sites before the first solution
_EVERY = slice(None)
_OF_ROWS = ("target", "precision", "loc", "variance", "gain")  # buffers of the solution


class GaussianSites(GPModule):
    """Sites and marginals of q(f) at the N points of a graph, kept as buffers.

    Before the first :meth:`solve`, sites of non-Gaussian likelihoods have almost no precision, and q is the prior.

    Args:
        y: data, as the likelihood takes them, (N,) or (N, T).
        likelihood: p(y | f).
        kernel: of the prior.
        graph: neighbors of the prior.
        mean: mean function ``(B, D) -> (B,)`` or, for L latent functions, ``(L, B)``; with rows of the graph as a
            second argument, at these.
        latent_shape: () or (L,).
        jitter: relative nugget of the prior.
        parameters: a function that returns what the evidence of the sites depends on: the parameters of kernel,
            likelihood and mean function and those of the guides of their priors.
        level: the mean function as a module. If it is a :class:`~pyro_nngp.means.ConstantMean` that is learned,
            :meth:`solve` also finds its level, by generalized least squares on the sites. Coefficients of a
            :class:`~pyro_nngp.means.LinearMean` with normal priors get their joint posterior.
        likelihood_at: the bound likelihood of some rows, for weights and trials; None is the same for all.

    Attributes:
        target, precision: pseudo-observations of u and their precisions, (*L, N).
        loc, variance: marginal means and variances of u at the points, (*L, N).
        gain: how much the marginal means of u fall per unit of each coefficient that has a joint posterior,
            (*L, p, N); else without entries.
        solved: whether they come from :meth:`solve`.
        excess: the difference of the two evidences.
    """

    trained_buffers = frozenset({"target", "precision", "loc", "variance", "gain", "solved"})  # do not identify a run

    y: Tensor
    target: Tensor
    precision: Tensor
    loc: Tensor
    variance: Tensor
    gain: Tensor
    solved: Bool[Tensor, ""]

    def __init__(
        self,
        y: Tensor,
        likelihood: Likelihood,
        kernel: Any,
        graph: NeighborGraph,
        mean: Callable[..., Tensor],
        latent_shape: tuple[int, ...] = (),
        jitter: float = DEFAULT_JITTER,
        parameters: Callable[[], Iterable[Tensor]] = list,
        level: Any = None,
        likelihood_at: Callable[..., Likelihood] | None = None,
    ) -> None:
        super().__init__()
        # in a tuple: they are modules of the model, not of the guide
        self._prior = kernel, graph, mean, jitter, likelihood
        self._likelihood_at = likelihood_at
        self._coefficients = MeanCoefficients(level)
        self._cache = NeighborCache()
        self._given: PooledObservations | None = None  # on a copy for predictions of one of several processes
        shape = (*latent_shape, len(graph.x))
        self.register_buffer("y", y)
        self.register_buffer("target", graph.x.new_zeros(shape))
        self.register_buffer("precision", graph.x.new_full(shape, _NO_PRECISION))
        self.register_buffer("loc", graph.x.new_zeros(shape))
        self.register_buffer("variance", graph.x.new_ones(shape))
        self.register_buffer("gain", graph.x.new_zeros(*latent_shape, self._coefficients.num_normal, len(graph.x)))
        self.register_buffer("solved", torch.tensor(False, device=graph.x.device))
        self._depends_on = parameters
        self.excess = EvidenceExcess(self.unsolved_parameters())
        self.register_load_state_dict_post_hook(_invalidate_after_loading)

    @property
    def is_exact(self) -> bool:
        """Whether the sites are exact, as for a Gaussian likelihood."""
        return self._prior[4].is_gaussian

    @pyro_entry
    def observations(
        self, rows: Int[Tensor, " U"] | None = None
    ) -> tuple[Float[Tensor, "*L U"], Float[Tensor, "*L U"]]:
        """Pseudo-observations of u, f less the mean function, and their precisions at some rows (None: all).

        For a Gaussian likelihood they are the data and the present noise, with gradients for noise and mean function.
        """
        at = slice(None) if rows is None else rows
        x = self._prior[1].x[at]
        if self.is_exact:
            y, noise = gaussian_observations(self._bound(at), self.y[at].movedim(0, -1), None, x.dtype)
            target, precision = torch.broadcast_tensors(y - self._prior[2](x, at), 1 / noise)
            return target, precision
        target = self._coefficients.adjusted(self.target[..., at], lambda: self._coefficients.basis(x).mT)
        return target, self.precision[..., at]

    def _means(self, rows: Any = _EVERY) -> Float[Tensor, "*L U"]:
        """Marginal means of u given the present coefficients."""
        return self._coefficients.adjusted(self.loc[..., rows], lambda: self.gain[..., rows])

    @pyro_entry
    def distribution(self, prior: NNGP) -> SitePosterior:
        """q(u), u = f less the mean function, at the rows of a prior's batch."""
        rows = prior.batch.rows
        if torch.is_grad_enabled() and not (self.is_exact or bool(self.solved)):
            warn(
                "GaussianSites: q(u) is the prior, since solve() has not been called. Call it before training and "
                "every few steps, as fit() does, or take posterior='mean-field'."
            )
        target, precision = self.observations(None if prior.is_whole else rows)
        parts = torch.broadcast_tensors(target, precision, self._means(rows), self.variance[..., rows])
        batch, own = parts[0].shape[: -self.loc.dim()], parts[0].shape[-self.loc.dim() :]
        if batch:  # of hyperparameters, which q(u) has outside of the plates of data and latent functions
            parts = [part.reshape(*batch, *[1] * len(own), *own) for part in parts]
        offset = self.excess(self.unsolved_parameters()) / self.loc.shape[:-1].numel()
        return SitePosterior(prior, *parts, offset=offset)

    def _bound(self, rows: Tensor | slice) -> Likelihood:
        """The likelihood of some rows, bound."""
        return self._prior[4].bind() if self._likelihood_at is None else self._likelihood_at(rows)

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets: the level of a constant mean function, if that is learned."""
        return self._coefficients.solved_parameters()

    def unsolved_parameters(self) -> list[Tensor]:
        """What the evidence of the sites depends on, without the level, where its gradient is zero at a solution."""
        levels = set(map(id, self._coefficients.level_parameters()))
        return [value for value in self._depends_on() if id(value) not in levels]

    @pyro_entry
    @torch.no_grad()
    def solve(self, max_steps: int = 100, tolerance: float = 1e-3, level: bool = True) -> None:
        """Put sites and marginals at their optimum for the present hyperparameters, by natural-gradient steps.

        Args:
            max_steps: largest number of steps.
            tolerance: stop where means move by less, in standard deviations of the sites.
            level: whether to find the level of a constant mean function too.
        """
        _, graph, mean_at, _, _ = self._prior
        own, x = slice(graph.num_points), graph.x[: graph.num_points]
        likelihood, y, mean = self._bound(own), self.y[own].movedim(0, -1), partial(mean_at, x, own)
        problem = SiteProblem(likelihood, y, x, mean, self.latent_prior(), self._coefficients, graph.total)
        start = SiteSolution(*(part[..., own] for part in (self.target, self.precision, self.loc, self.variance)))
        found, progress = optimal_sites(problem, start, bool(self.solved), max_steps, tolerance, level)
        for name, value in found._asdict().items():
            if value is not None:
                getattr(self, name).copy_(graph.complete(value))
        if not self.is_exact:
            warn_unsettled("GaussianSites.solve", *progress)
        self.solved.fill_(True)

    def latent_prior(self) -> LatentPrior:
        """The prior at the present hyperparameters."""
        kernel, graph, _, jitter, _ = self._prior

        def nearest(kernel: Covariance, noise: Tensor) -> Any:
            return self._cache.nearest(lambda: variance_neighbors(kernel, graph, noise, jitter))

        return LatentPrior(bind(kernel), graph, jitter, nearest)

    @pyro_entry
    def correct(self) -> None:
        """Update the difference of the two evidences."""
        kernel, graph, _, jitter, _ = self._prior

        def find(parameters: Sequence[Tensor]) -> Excess:
            target, precision = self.observations()
            return site_excess(parameters, kernel, graph, jitter, target, precision, self.loc)

        self.excess.update(self.unsolved_parameters(), find, self.loc.shape[:-1].numel() * graph.num_rows)

    def prediction_range(self) -> tuple[int, int]:
        """Smallest and largest number of nearest points that predictions take by default."""
        return prediction_range(self._prior[1], bool(self.solved))

    @pyro_entry
    @torch.no_grad()
    def enough(self, trial: NeighborTrial, first: int) -> int:
        """The default number of nearest points per new point, doubled from `first`: 64, up to 512.

        Doubling ends where it lowers the predictive variance at some points by less than 1 % on average.
        """
        kernel, graph, _, jitter, _ = self._prior
        cov, variance = bind_double(kernel, graph.x.dtype), self.variance[..., trial.rows]
        return enough_for_predictions(trial, first, cov, graph.x.double(), variance, jitter)

    @pyro_entry
    def moments(
        self, x_new: Float[Tensor, "P D"], nearest: Int[Tensor, "P k"]
    ) -> tuple[Float[Tensor, "*L P"], Float[Tensor, "*L P"]]:
        """Posterior mean and variance of f at new points, given the rows of their nearest points.

        The mean is that of the prior given the posterior means at the nearest points, or before :meth:`solve` given
        the pseudo-observations. Cost: O(P k^3), and for the first call O(N log N).
        """
        kernel, graph, mean_at, jitter, _ = self._prior
        covariance, (target, precision) = bind(kernel), self.observations()
        pooled = self._given or self._cache.pooled(kernel, graph, 1 / precision, nearest.shape[1], jitter)
        variance = pooled.variance(covariance, x_new, nearest, 1 / precision)
        noise = None if bool(self.solved) else 1 / precision
        w, _ = graph_conditional(covariance, x_new, graph.x, nearest, noise, jitter)
        values = self._means() if bool(self.solved) else target
        loc = mean_at(x_new) + (w * values[..., nearest]).sum(-1)
        if self._coefficients.are_at_posterior_mean:
            rest = self._coefficients.basis(x_new) - (w[..., None, :] @ self.gain.mT[..., nearest, :])[..., 0, :]
            variance = variance + self._coefficients.variance(rest)
        return loc, variance.expand(loc.shape)

    def row_tables(self) -> dict[str, Shaped[Tensor, "N ..."]]:
        """Views of the buffers of the solution, with a row for each point."""
        return {name: getattr(self, name).movedim(-1, 0) for name in _OF_ROWS}

    @torch.no_grad()
    def place_rows(self, tables: dict[str, Shaped[Tensor, "N ..."]], y: Tensor) -> None:
        """Set the buffers of the solution at the rows of the graph, of another number if need be, and the data there.

        Args:
            tables: as :meth:`row_tables` returns them.
            y: data.
        """
        self.y = y
        for name, rows in tables.items():
            setattr(self, name, rows.movedim(0, -1).contiguous())
        self._cache.forget()

    @pyro_entry
    @torch.no_grad()
    def place_near(self, whole: "GaussianSites", x_new: Float[Tensor, "P D"], num_neighbors: int) -> None:
        """Take the pooled observations near new points from the sites of all processes, for :meth:`moments`.

        Args:
            whole: sites of own rows; all processes must call it at the same time.
            x_new: the new points of this process.
            num_neighbors: as in :meth:`moments`.
        """
        kernel, graph, _, jitter, _ = whole._prior
        noise = 1 / whole.observations()[1][..., : graph.num_points]
        pooled = whole._cache.pooled(kernel, graph, noise, num_neighbors, jitter)
        self._given = pooled.near(x_new, self._prior[1], num_neighbors)

    @pyro_entry
    @torch.no_grad()
    def append(self, y: Tensor, loc: Float[Tensor, "*L P"], variance: Float[Tensor, "*L P"]) -> None:
        """Append the last P points of the graph, with sites for N(loc, variance) of f and the point's own datum.

        Args:
            y: all data, those of the new points last.
            loc: means of f at the new points given the others.
            variance: their variances.
        """
        graph, mean_at = self._prior[1:3]
        rows = slice(graph.num_points - loc.shape[-1], None)
        mean = mean_at(graph.x[rows], rows)
        zeros, ones = torch.zeros_like(loc), torch.ones_like(variance)
        new = SiteSolution(zeros, torch.full_like(loc, _NO_PRECISION), zeros, ones)
        if bool(self.solved):
            new = own_data_sites(self._bound(rows), y[rows].movedim(0, -1), mean, loc, variance)
        self.y = y
        for name in ("target", "precision", "loc", "variance"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(new, name).to(self.loc)], -1))
        self.gain = torch.nn.functional.pad(self.gain, (0, loc.shape[-1]))
        self.follow(graph)

    def follow(self, graph: NeighborGraph) -> None:
        """Drop everything that was computed from the neighbors before the graph was refreshed."""
        self.excess.due.fill_(True)
        self._cache.forget()

    def _apply(self, fn: Any, recurse: bool = True) -> "GaussianSites":
        self._cache.forget()
        return super()._apply(fn, recurse)


def _invalidate_after_loading(sites: GaussianSites, _: object) -> None:
    sites._cache.forget()
