r"""The Gaussian posterior of a nearest-neighbor prior and Gaussian sites: one pseudo-observation of f at each point.

.. math:: q(f) \propto p(f) \prod_i N(t_i \mid f_i, \tau_i^{-1}), \qquad \tau_i = -2\, \partial \ell_i / \partial s_i,
   \quad t_i = m_i + \tau_i^{-1}\, \partial \ell_i / \partial m_i, \quad
   \ell_i = E_{N(m_i, s_i)} \log p(y_i \mid f_i),

the form of the optimal Gaussian q for every likelihood (Opper and Archambeau 2009; Khan and Lin 2017). A Gaussian
likelihood is its own sites. q has two numbers per point, as a mean-field family has, but its covariance is the inverse
of :math:`\Lambda + \mathrm{diag}\,\tau`, whereas a mean-field q has the reciprocal of that matrix's diagonal: the
variance of each value given all others, which is orders of magnitude smaller for a smooth function.

Means are those of the sparse prior times the sites, by conjugate gradients
(:mod:`pyro_nngp.variational.natural_gradient`). Variances are those given the pseudo-observations nearest to a point,
64 or more, pooled where they are noisy (:mod:`pyro_nngp.variational.pooling`); for the fixed point of the sites K of
them, if 64 do not lower the variances by a tenth. Divergence and draws are those of
:class:`~pyro_nngp.distributions.SitePosterior`. A minibatch evaluates the evidence of the sites as observations;
:mod:`pyro_nngp.variational.evidence_excess` adds what the evidence under the prior of latent values has in addition,
once :meth:`GaussianSites.correct` has found it.

To solve, natural-gradient steps for the means alternate with the variances at those sites.

Cost: O(N K^3) per round of variances and O(N K) per iteration of conjugate gradients to solve; a batch touches its own
rows. Memory: O(N K). Symbols: N points, K neighbors, U rows of a batch and its neighbors, P new points, L latent
functions.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions import NNGP, SitePosterior
from pyro_nngp.hyperparameters import GPModule, pyro_entry
from pyro_nngp.kernels import bind, bind_double
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.linalg import DEFAULT_JITTER
from pyro_nngp.means import ConstantMean, LinearMean, condition_coefficients, trend_variance
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.neighbors.numbers import MOST_NEIGHBORS, WORTHWHILE, NeighborTrial, rows_to_try
from pyro_nngp.variational.evidence_excess import EvidenceExcess, Excess, site_excess
from pyro_nngp.variational.latent_prior import LatentPrior, alone
from pyro_nngp.variational.natural_gradient import average, gaussian_sites, natural_gradient, warn_unsettled
from pyro_nngp.variational.pooled_places import places_of
from pyro_nngp.variational.pooling import PooledObservations

_PREDICTION_NEIGHBORS = 64
_NO_PRECISION = 1e-6  # precision of sites before the first solution
_KERNEL_PROBES = 8  # points whose covariances identify a kernel
_STEP_REDUCTION = 0.1  # of the residual in a natural-gradient step
_ROUNDS = 30  # alternations of means and variances
_STEPS = 4  # for the means in a round: new variances matter more than the last digits of the means
_EVERY = slice(None)
_OF_ROWS = ("target", "precision", "loc", "variance", "gain")  # buffers of the solution
_SAME_SITES = 0.01  # relative change of the sites' precisions below which variances are kept
_SMALLER = 0.1  # relative decrease of variances that justifies more neighbors


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
        self._level = (level,)
        self._pooled: tuple[tuple[Tensor, ...], PooledObservations] | None = None
        self._near: Any = None
        self._given: PooledObservations | None = None  # on a copy for predictions of one of several processes
        shape = (*latent_shape, len(graph.x))
        self.register_buffer("y", y)
        self.register_buffer("target", graph.x.new_zeros(shape))
        self.register_buffer("precision", graph.x.new_full(shape, _NO_PRECISION))
        self.register_buffer("loc", graph.x.new_zeros(shape))
        self.register_buffer("variance", graph.x.new_ones(shape))
        columns = 1 + len(level.center) if isinstance(level, LinearMean) and level.is_normal else 0
        self.register_buffer("gain", graph.x.new_zeros(*latent_shape, columns, len(graph.x)))
        self.register_buffer("solved", torch.tensor(False, device=graph.x.device))
        self._depends_on = parameters
        self.excess = EvidenceExcess(self._unsolved_parameters, graph.x)
        self.register_load_state_dict_post_hook(_forget_after_loading)

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
        if self.is_exact:
            x = self._prior[1].x[at]
            y, noise = gaussian_observations(self._bound(at), self.y[at].movedim(0, -1), None, x.dtype)
            target, precision = torch.broadcast_tensors(y - self._prior[2](x, at), 1 / noise)
            return target, precision
        target, change = self.target[..., at], self._deviation()
        if change is not None:
            target = target - _combined(self._level[0].basis(self._prior[1].x[at]).mT, change)
        return target, self.precision[..., at]

    def _deviation(self) -> Tensor | None:
        """Coefficients less their posterior means, (p, *L), where they are not at these; None without a posterior."""
        if not self._has_posterior:
            return None
        change = self._level[0].deviation()
        return change if bool(change.any()) else None

    def _means(self, rows: Any = _EVERY) -> Float[Tensor, "*L U"]:
        """Marginal means of u given the present coefficients."""
        change = self._deviation()
        return self.loc[..., rows] if change is None else self.loc[..., rows] - _combined(self.gain[..., rows], change)

    @pyro_entry
    def distribution(self, prior: NNGP) -> SitePosterior:
        """q(u), u = f less the mean function, at the rows of a prior's batch."""
        rows = prior.batch.rows
        if torch.is_grad_enabled() and not (self.is_exact or bool(self.solved)):
            warnings.warn(
                "GaussianSites: q(u) is the prior, since solve() has not been called. Call it before training and "
                "every few steps, as fit() does, or take posterior='mean-field'.",
                stacklevel=2,
            )
        target, precision = self.observations(None if prior.is_whole else rows)
        parts = torch.broadcast_tensors(target, precision, self._means(rows), self.variance[..., rows])
        batch, own = parts[0].shape[: -self.loc.dim()], parts[0].shape[-self.loc.dim() :]
        if batch:  # of hyperparameters, which q(u) has outside of the plates of data and latent functions
            parts = [part.reshape(*batch, *[1] * len(own), *own) for part in parts]
        offset = self.excess() / self.loc.shape[:-1].numel()
        return SitePosterior(prior, *parts, offset=offset)

    def _bound(self, rows: Tensor | slice) -> Likelihood:
        """The likelihood of some rows, bound."""
        return self._prior[4].bind() if self._likelihood_at is None else self._likelihood_at(rows)

    def _constant(self) -> Tensor | None:
        """The level of a constant mean function that is learned, () or (L,); None for other mean functions."""
        (level,) = self._level
        return level.value.detach() if self.solved_parameters() else None

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets: the level of a constant mean function, if that is learned."""
        return [value for value in self._levels() if value.requires_grad]

    def _levels(self) -> list[nn.Parameter]:
        """The level of a constant mean function."""
        (level,) = self._level
        return level.solved_parameters() if isinstance(level, ConstantMean) and level.is_free else []

    def _unsolved_parameters(self) -> list[Tensor]:
        """What the evidence of the sites depends on, without the level, where its gradient is zero at a solution."""
        levels = set(map(id, self._levels()))
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
        own, total = slice(graph.num_points), graph.total
        likelihood, y, x = self._bound(own), self.y[own].movedim(0, -1), graph.x[own]
        mean, latent = mean_at(x, own), self.latent_prior()
        easy, reduction, used = True, 0.0 if self.is_exact else _STEP_REDUCTION, None
        first, moved, improved = not bool(self.solved), 0.0, True
        loc, variance, target, precision = (
            part[..., own] for part in (self.loc, self.variance, self.target, self.precision)
        )
        sites = target + mean, precision
        if first:
            prior_variance = latent.variance.expand(variance.shape)
            first_moments = alone(likelihood, y, mean.expand(variance.shape), prior_variance, total)
            loc = latent.start(first_moments[0] - mean)
            sites = gaussian_sites(likelihood, y, *first_moments, total=total)

        def step(target: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, float]:
            nonlocal loc, easy, sites
            loc, easy = latent.posterior_mean(target - mean, precision, loc, easy, tolerance, reduction)
            sites = target, precision
            return mean + latent.at(loc), variance, 0.0 if self.is_exact else latent.divergence(loc)

        if not self.is_exact:  # at new hyperparameters, the old sites are nearer to the solution than the old moments
            step(*sites)
            variance = latent.posterior_variance(sites[1])
            used = None if first else sites[1]
        for _ in range(_ROUNDS):
            if max_steps <= 0:
                break
            before = loc, sites
            start = mean + latent.at(loc), variance, 0.0 if self.is_exact else latent.divergence(loc)
            natural = sites[0] * sites[1], sites[1]
            most = min(_STEPS, max_steps) if improved else max_steps
            steps, moved, improved = natural_gradient(likelihood, y, start, step, most, tolerance, natural, total)
            max_steps -= steps
            if not improved:
                loc, sites = before
                if most == steps and max_steps > 0:  # shorter steps may succeed
                    continue
            if not self.is_exact:  # with the same mean, but without the secants that limited steps
                response = mean + latent.at(loc)
                now = gaussian_sites(likelihood, y, response, variance, total=total)[1]
                sites = response + sites[1] / now * (sites[0] - response), now
            constant = self._constant() if level else None
            if constant is not None:  # the best level for these sites: one Newton step, exact
                slope = sites[1] * (sites[0] - mean - latent.at(loc))
                change, shift = latent.level_step(constant, slope, sites[1], easy, tolerance, not self.is_exact)
                self._level[0].assign((constant + change.reshape(constant.shape)).reshape(1, -1))
                mean, loc = mean_at(x, own), loc - shift
            if self._has_posterior:
                mean, loc = self._condition(latent, sites, mean, loc, easy, tolerance)
            if used is not None and average((sites[1] / used).log().square(), total).sqrt() < _SAME_SITES:
                break
            given = latent.posterior_variance(sites[1])
            variance = given if used is None or self.is_exact else (variance * given).sqrt()
            if not improved or self.is_exact:
                break
            used = sites[1]
        target, precision = sites
        for name, value in (("target", target - mean), ("precision", precision), ("loc", loc), ("variance", variance)):
            getattr(self, name).copy_(graph.complete(value))
        if not self.is_exact:
            warn_unsettled("GaussianSites.solve", moved, improved or max_steps <= 0, first and used is None)
        self.solved.fill_(True)

    @property
    def _has_posterior(self) -> bool:
        """Whether coefficients of the mean function have a joint posterior."""
        return isinstance(self._level[0], LinearMean) and self._level[0].has_posterior

    def _condition(
        self, latent: LatentPrior, sites: Any, mean: Tensor, loc: Tensor, easy: bool, tolerance: float
    ) -> tuple[Tensor, Tensor]:
        """Set the posterior of the coefficients given the sites; returns the mean function and the means of u there.

        Means of u respond to the coefficients linearly, so that one step is exact.
        """
        level, graph = self._level[0], self._prior[1]
        own = slice(graph.num_points)
        basis = level.basis(graph.x[own]).mT  # (p, N)
        precision = sites[1][..., None, :].expand(*loc.shape[:-1], *basis.shape)
        start = torch.zeros_like(precision)
        gain, _ = latent.posterior_mean(basis.expand(precision.shape), precision, start, easy, tolerance, 0.0)
        slope = graph.total((basis @ (sites[1] * (sites[0] - mean - loc))[..., None])[..., 0])
        curvature = graph.total((basis * precision) @ (basis - gain).mT)
        curvature = (curvature + curvature.mT) / 2
        now = level.posterior_loc.reshape(len(basis), *level.own_shape).clone()
        each = now.mT if level.own_shape else now  # (*L, p)
        linear = slope + (curvature @ each[..., None])[..., 0]
        change = condition_coefficients(level, curvature, linear).to(now) - now
        level.place_posterior()
        self.gain.copy_(graph.complete(gain))
        return self._prior[2](graph.x[own], own), loc - _combined(gain, change.to(gain))

    def latent_prior(self) -> LatentPrior:
        """The prior at the present hyperparameters."""
        kernel, graph, _, jitter, _ = self._prior
        return LatentPrior(bind(kernel), graph, jitter, self._nearest)

    @pyro_entry
    def correct(self) -> None:
        """Update the difference of the two evidences."""
        kernel, graph, _, jitter, _ = self._prior

        def find(parameters: Sequence[Tensor]) -> Excess:
            target, precision = self.observations()
            return site_excess(parameters, kernel, graph, jitter, target, precision, self.loc)

        self.excess.update(find, self.loc.shape[:-1].numel() * graph.num_rows)

    def _nearest(self, kernel: Any, noise: Tensor) -> Any:
        """The observations that variances at the points depend on, kept until the neighbors change."""
        graph, jitter = self._prior[1], self._prior[3]
        if self._near is None:
            few, most = graph.num_neighbors, max(graph.num_neighbors, min(graph.num_rows, _PREDICTION_NEIGHBORS))
            places = places_of(graph)
            some = places.x[places.rows(rows_to_try(graph.num_rows, graph.x.device))]

            def log_variance(k: int) -> Tensor:
                pooled = PooledObservations(kernel, graph, noise, k, jitter)
                return average(pooled.variance(kernel, some, places.query(some, k), noise).log(), graph.total)

            enough = few == most or log_variance(few) - log_variance(most) < _SMALLER
            self._near = places.query(places.x, few if enough else most)
        return self._near

    @pyro_entry
    @torch.no_grad()
    def prediction_neighbors(self) -> int:
        """The default number of nearest points per new point: 64, or more where f is smooth in many inputs.

        It is doubled, up to 512, while that lowers the predictive variance at 64 of the points by more than 1 % on
        average.
        """
        first, most = self.prediction_range()
        return first if first >= most else self.enough(self._prior[1].trial(most), first)

    def prediction_range(self) -> tuple[int, int]:
        """Smallest and largest number of nearest points that predictions take by default."""
        graph = self._prior[1]
        first, most = max(_PREDICTION_NEIGHBORS, graph.num_neighbors), min(MOST_NEIGHBORS, graph.num_rows - 1)
        few = min(graph.num_rows, first)
        return (first, most) if first < most and bool(self.solved) else (few, few)

    @pyro_entry
    @torch.no_grad()
    def enough(self, trial: NeighborTrial, first: int) -> int:
        """The number of :meth:`prediction_neighbors`, doubled from `first`, at some points."""
        kernel, graph, _, jitter, _ = self._prior
        cov, x = bind_double(kernel, graph.x.dtype), graph.x.double()  # many neighbors and no noise: ill-conditioned

        def scores(near: Tensor) -> Tensor:
            left = graph_conditional(cov, x[trial.rows], x, near, jitter=jitter)[1]
            return (self.variance[..., trial.rows] + left).log()

        return trial.enough(scores, first, WORTHWHILE)

    @pyro_entry
    def moments(
        self, x_new: Float[Tensor, "P D"], nearest: Int[Tensor, "P k"]
    ) -> tuple[Float[Tensor, "*L P"], Float[Tensor, "*L P"]]:
        """Posterior mean and variance of f at new points, given the rows of their nearest points.

        The mean is that of the prior given the posterior means at the nearest points, or before :meth:`solve` given
        the pseudo-observations. Cost: O(P k^3), and for the first call O(N log N).
        """
        kernel, graph, mean_at, jitter, _ = self._prior
        kernel, (target, precision) = bind(kernel), self.observations()
        pooled = self._given or self._pool(kernel, 1 / precision, nearest.shape[1])
        variance = pooled.variance(kernel, x_new, nearest, 1 / precision)
        noise = None if bool(self.solved) else 1 / precision
        w, _ = graph_conditional(kernel, x_new, graph.x, nearest, noise, jitter)
        values = self._means() if bool(self.solved) else target
        loc = mean_at(x_new) + (w * values[..., nearest]).sum(-1)
        if self._has_posterior and self._deviation() is None:
            level = self._level[0]
            rest = level.basis(x_new) - (w[..., None, :] @ self.gain.mT[..., nearest, :])[..., 0, :]
            variance = variance + trend_variance(level, rest)
        return loc, variance.expand(loc.shape)

    @torch.no_grad()
    def _pool(self, kernel: Any, noise: Tensor, num_neighbors: int) -> PooledObservations:
        """Pooled observations, kept while noise, kernel and number of neighbors are unchanged."""
        _, graph, _, jitter, _ = self._prior
        some = graph.x[:_KERNEL_PROBES]
        key = noise.clone(), kernel(some, some), torch.tensor(num_neighbors)
        is_new = self._pooled is None or not all(map(torch.equal, self._pooled[0], key))
        if graph.total(torch.tensor(float(is_new))) or self._pooled is None:  # of any process
            self._pooled = key, PooledObservations(kernel, graph, noise, num_neighbors, jitter)
        return self._pooled[1]

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
        self._forget()

    @pyro_entry
    @torch.no_grad()
    def place_near(self, whole: "GaussianSites", x_new: Float[Tensor, "P D"], num_neighbors: int) -> None:
        """Take the pooled observations near new points from the sites of all processes, for :meth:`moments`.

        Args:
            whole: sites of own rows; all processes must call it at the same time.
            x_new: the new points of this process.
            num_neighbors: as in :meth:`moments`.
        """
        graph = whole._prior[1]
        kernel, (_, precision) = bind(whole._prior[0]), whole.observations()
        pooled = whole._pool(kernel, 1 / precision[..., : graph.num_points], num_neighbors)
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
        target, precision = torch.zeros_like(loc), torch.full_like(loc, _NO_PRECISION)
        if bool(self.solved):
            likelihood, new = self._bound(rows), y[rows].movedim(0, -1)
            loc, variance = alone(likelihood, new, loc, variance)
            target, precision = gaussian_sites(likelihood, new, loc, variance)
            target, loc = target - mean, loc - mean
        else:
            loc, variance = target, torch.ones_like(variance)
        self.y = y
        for name, value in (("target", target), ("precision", precision), ("loc", loc), ("variance", variance)):
            setattr(self, name, torch.cat([getattr(self, name), value.to(self.loc)], -1))
        self.gain = torch.nn.functional.pad(self.gain, (0, loc.shape[-1]))
        self.follow(graph)

    def follow(self, graph: NeighborGraph) -> None:
        """Drop everything that was computed from the neighbors before the graph was refreshed."""
        self.excess.due.fill_(True)
        self._forget()

    def _forget(self) -> None:
        self._pooled, self._near = None, None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_pooled": None, "_near": None}

    def _apply(self, fn: Any, recurse: bool = True) -> "GaussianSites":
        self._forget()
        return super()._apply(fn, recurse)


def _combined(table: Float[Tensor, "*L p U"], change: Float[Tensor, "p *own"]) -> Float[Tensor, "*out U"]:
    """Combinations of the rows of a table with coefficients: one set for all latent functions, or for each."""
    if change.dim() == 1:
        return (change[:, None] * table).sum(-2)
    return (change.mT[:, :, None] * table).sum(-2)


def _forget_after_loading(sites: GaussianSites, _: object) -> None:
    sites._forget()
