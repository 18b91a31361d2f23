r"""The Gaussian posterior of a nearest-neighbor prior and one pseudo-observation of f at each point.

.. math:: q(f) \propto p(f) \prod_i N(t_i \mid f_i, \tau_i^{-1}), \qquad \tau_i = -2\, \partial \ell_i / \partial s_i,
   \quad t_i = m_i + \tau_i^{-1}\, \partial \ell_i / \partial m_i, \quad
   \ell_i = E_{N(m_i, s_i)} \log p(y_i \mid f_i),

the form of the optimal Gaussian q for every likelihood (Opper and Archambeau 2009; Khan and Lin 2017). A Gaussian
likelihood equals its sites. q has two numbers per point, as a mean-field family has, but its covariance is the inverse
of :math:`\Lambda + \mathrm{diag}\,\tau`, whereas a mean-field q has the reciprocal of that matrix's diagonal: the
variance of each value given all others, which is orders of magnitude smaller for a smooth function.

Means follow from the sparse prior times the sites, by conjugate gradients. Variances are conditional on the
pseudo-observations nearest to a point (:mod:`pyro_nngp.variational.site_neighbors`), pooled where they are noisy
(:mod:`pyro_nngp.variational.pooling`). Both are computed together with the sites
(:mod:`pyro_nngp.variational.site_solution`). Divergence and draws are as in
``SitePosterior``. A minibatch evaluates the evidence of the sites as observations;
:mod:`pyro_nngp.variational.evidence_excess` adds what the evidence under the prior of latent values has in addition,
once :meth:`ObservedGaussian.solve` has computed it.

Cost: O(N K^3) per round of variances and O(N K) per iteration of conjugate gradients to solve; a batch touches its
rows. Memory: O(N K). Symbols: N points, K neighbors, U rows of a batch and its neighbors, P new points, L latent
functions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from pyro_nngp._checks import warn
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.site_posterior import SitePosterior
from pyro_nngp.kernels import Covariance
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.linalg.nested_dissection import Elimination
from pyro_nngp.rows import EVERY, At, Part
from pyro_nngp.variational.evidence_excess import EvidenceExcess, Excess, site_excess
from pyro_nngp.variational.factored_posterior import FactoredPosterior
from pyro_nngp.variational.family import Family, Given, gain_of
from pyro_nngp.variational.joint_draws import draws_given_observations
from pyro_nngp.variational.latent_evidence import ExactLogEvidence
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

_NO_PRECISION = 1e-6  # of pseudo-observations before the first solution
_TABLES = ("target", "precision", "loc", "variance", "gain")  # buffers of the solution


class ObservedGaussian(Family):
    """Pseudo-observations and marginals of q(u) at the N points of a graph, kept as buffers.

    Before the first :meth:`solve`, sites of non-Gaussian likelihoods have almost no precision, and q is the prior.

    Args:
        shape: (*L, N).
        mean: the mean function. If it is a :class:`~pyro_nngp.means.ConstantMean` that is learned, :meth:`solve` also
            finds its level, by generalized least squares. Coefficients of a :class:`~pyro_nngp.means.LinearMean` with
            normal priors get their joint posterior.
        parameters: what the evidence depends on: the parameters of kernel, likelihood and mean function and of
            the guides of their priors, without the level.
        like: a tensor of the dtype and device of the buffers.

    Attributes:
        target, precision: pseudo-observations of u and their precisions, (*L, N).
        loc, variance: marginal means and variances of u at the points, (*L, N).
        gain: how much the marginal means of u fall per unit of each coefficient that has a joint posterior,
            (*L, p, N); else without entries.
        solved: whether they come from :meth:`solve`.
        excess: the difference of the two evidences.
    """

    trained_buffers = frozenset({*_TABLES, "solved"})  # do not identify a run
    can_solve = keeps_trials = True
    _profile: Any = None  # the posterior by factors, in the context of `profiled`

    target: Tensor
    precision: Tensor
    loc: Tensor
    variance: Tensor
    gain: Tensor
    solved: Bool[Tensor, ""]

    def __init__(self, shape: tuple[int, ...], mean: Any, parameters: Sequence[Tensor], like: Tensor) -> None:
        super().__init__()
        starts = {"target": 0.0, "precision": _NO_PRECISION, "loc": 0.0, "variance": 1.0}
        for name, value in starts.items():
            self.register_buffer(name, like.new_full(shape, value))
        num_normal = MeanCoefficients(mean).num_normal
        self.register_buffer("gain", like.new_zeros(*shape[:-1], num_normal, shape[-1]))
        self.register_buffer("solved", torch.tensor(False, device=like.device))
        self.excess = EvidenceExcess(parameters)
        self._cache = NeighborCache()
        self._pooled: PooledObservations | None = None  # on a copy for predictions of one of several processes
        self.register_load_state_dict_post_hook(_forget_after_loading)

    # Values at the points.

    def observations(self, given: Given, at: At = EVERY) -> tuple[Float[Tensor, "*L U"], Float[Tensor, "*L U"]]:
        """Pseudo-observations of u and their precisions at some rows.

        For a Gaussian likelihood they are the data and the present noise, with gradients for noise and mean function.
        """
        rows, bound = given.rows, given.bound
        if bound.likelihood.is_gaussian:
            y = rows.targets(at if isinstance(at, Tensor) else None)
            y = y if isinstance(at, Tensor) else y[..., at]
            y, noise = gaussian_observations(rows.likelihood(bound, at), y, None, rows.x.dtype)
            target, precision = torch.broadcast_tensors(y - rows.mean(bound, at), 1 / noise)
            return target, precision
        mean = MeanCoefficients(bound.mean_function)
        target = mean.adjusted(self.target[..., at], lambda: mean.basis(rows.x[at]).mT)
        target, precision = torch.broadcast_tensors(target, self.precision[..., at])
        return target, precision

    def means(self, given: Given, at: At = EVERY) -> Float[Tensor, "*L U"]:
        """Marginal means of u at some rows, at the present coefficients of the mean."""
        return MeanCoefficients(given.bound.mean_function).adjusted(self.loc[..., at], lambda: self.gain[..., at])

    def at_batch(self, given: Any, prior: NNGP) -> SitePosterior:
        """q(u) at the batch of a prior; `given` also has the parameters that the evidence depends on."""
        if torch.is_grad_enabled() and not (given.bound.likelihood.is_gaussian or bool(self.solved)):
            warn(
                "VNNGP: q(u) is the prior, since solve() has not been called. Call it before training and every few "
                "steps, as fit() does, or take guide=MeanField()."
            )
        some = prior.batch.rows
        target, precision = self.observations(given, EVERY if prior.is_whole else some)
        loc, variance = self.means(given, some), self.variance[..., some]
        exact = self._profile is not None and prior.is_whole
        parts = torch.broadcast_tensors(target, precision, loc, variance)
        batch, event = parts[0].shape[: -self.loc.dim()], parts[0].shape[-self.loc.dim() :]
        if batch:  # of hyperparameters, which q(u) has outside of the plates of data and latent functions
            parts = [part.reshape(*batch, *[1] * len(event), *event) for part in parts]
        offset = self.excess(given.parameters) / self.loc.shape[:-1].numel()
        q = SitePosterior(prior, *parts, offset=offset, evidence=self._evidence if exact else None)
        return q.expand(torch.broadcast_shapes(q.batch_shape, self.loc.shape[:-1]))

    # The optimum.

    def follow_rows(self, read: Callable[[], Any], solves: bool) -> None:
        super().follow_rows(read, solves and bool(self.solved))

    def solve(self, read: Callable[[], Any], max_steps: int = 100, tolerance: float = 1e-3, level: bool = True) -> None:
        """Put pseudo-observations and marginals at their optimum for the present hyperparameters.

        Natural-gradient steps; a Gaussian likelihood takes one round. Then the difference of evidences is computed.

        Args:
            read: returns data, neighbors and present hyperparameters, and the mean function as a module, `mean`, whose
                coefficients it sets.
            max_steps: largest number of steps.
            tolerance: stop where means move by less, in standard deviations of the pseudo-observations.
            level: whether to find the level of a constant mean function too, and the difference.
        """
        posterior, self._cache.last = self._solve(read, max_steps, tolerance, level), None
        if level:
            with torch.enable_grad():
                self._correct(read(), posterior)

    def solve_again(self, read: Callable[[], Given]) -> None:
        self.solve(read, level=False)

    @torch.no_grad()
    def _solve(
        self,
        read: Callable[[], Any],
        max_steps: int = 100,
        tolerance: float = 1e-3,
        level: bool = True,
    ) -> FactoredPosterior | None:
        """Put q at its optimum; `level` as of :func:`optimal_sites`. Returns the posterior by sparse factors."""
        given = read()
        rows, bound, latent = given.rows, given.bound, self._latent_prior(given)
        exact = latent.exact is not None and bound.likelihood.is_gaussian
        dtype = torch.float64 if exact else self.loc.dtype  # single precision does not serve data with little noise
        y = rows.targets(rows.every)
        problem = SiteProblem(
            rows.likelihood(bound, rows.own),
            y.to(dtype) if y.is_floating_point() else y,
            rows.x[rows.own],
            lambda: rows.mean(read().bound, rows.own).to(dtype),
            latent,
            MeanCoefficients(given.mean),
            given.graph.total,
        )
        tables = self.target, self.precision, self.loc, self.variance
        start = SiteSolution(*(part[..., rows.own].to(dtype) for part in tables))
        solution, progress = optimal_sites(problem, start, bool(self.solved), max_steps, tolerance, level)
        self._put(given, solution, latent)
        if not bound.likelihood.is_gaussian:
            warn_unsettled("solve", *progress)
        self.solved.fill_(True)
        return latent.exact

    def _latent_prior(self, given: Given) -> LatentPrior:
        """The prior at the present hyperparameters."""
        graph, bound = given.graph, given.bound

        def nearest(kernel: Covariance, noise: Tensor) -> Any:
            return self._cache.nearest(lambda: variance_neighbors(kernel, graph, noise, bound.jitter))

        plan, last = self._cache.plan(graph), self._cache.last
        return LatentPrior(bound.covariance, graph, bound.jitter, nearest, plan, last, bound.likelihood.is_gaussian)

    def _put(self, given: Any, solution: SiteSolution, latent: LatentPrior) -> None:
        """Keep a solution, which the prior has led to."""
        for name, value in solution._asdict().items():
            if value is not None:
                getattr(self, name).copy_(given.graph.complete(value.to(self.loc)))

    def can_profile(self, given: Given) -> bool:
        """Whether the posterior precision has a factor, see :meth:`profiled`."""
        return self.elimination(given) is not None

    def elimination(self, given: Given) -> Elimination | None:
        """The order of elimination for the posterior precision of one function; None without a sparse factor."""
        return self._cache.plan(given.graph)

    @contextmanager
    def profiled(self, read: Callable[[], Any], tolerance: float, keep: bool) -> Iterator[None]:
        """A context with q at its optimum, where the bound on all rows has the exact evidence of the sparse prior.

        Its gradient in the hyperparameters is then the gradient of the largest bound over all q.

        Args:
            read: as of :meth:`solve`.
            tolerance: as of :meth:`solve`.
            keep: whether to keep the posterior for the next call.

        Raises:
            NotPositiveDefiniteError: if there is no solution in double precision; q is then as before.
        """
        tables = [self._buffers[name] for name in sorted(self.trained_buffers)]
        kept = [part for part in tables if part is not None] + [*MeanCoefficients(read().mean).solved_values()]
        before = [part.detach().clone() for part in kept]
        try:
            profile = self._solve(read, tolerance=tolerance)
            if not all(bool(part.isfinite().all()) for part in kept):
                raise NotPositiveDefiniteError("q(u) has no optimum at these hyperparameters in double precision.")
        except NotPositiveDefiniteError:
            with torch.no_grad():
                for part, value in zip(kept, before, strict=True):
                    part.copy_(value)
            raise
        self._profile, self._cache.last = profile, profile if keep else None
        try:
            yield
        finally:
            self._profile = None

    def _evidence(self, prior: NNGP, target: Tensor, precision: Tensor) -> Float[Tensor, " *L"]:
        w, var = prior.conditionals
        pairs = zip(*(part.reshape(-1, part.shape[-1]) for part in (target, precision)), strict=True)
        found = [ExactLogEvidence.apply(w, var, *pair, prior.graph.neighbors, self._profile) for pair in pairs]
        return torch.stack(found).reshape(target.shape[:-1])

    def _correct(self, given: Any, posterior: Any) -> None:
        """Update the difference of the two evidences; the hyperparameters have gradients."""
        bound, graph = given.bound, given.graph

        def find(parameters: Sequence[Tensor]) -> Excess:
            target, precision = self.observations(given)
            sites = target, precision, self.loc
            return site_excess(parameters, bound.kernel, graph, bound.jitter, *sites, posterior)

        self.excess.update(given.parameters, find, self.loc.shape[:-1].numel() * graph.num_rows)

    def solved_parameters(self, mean: Any) -> list[nn.Parameter]:
        """The level of a constant mean function, if that is learned."""
        return MeanCoefficients(mean).solved_parameters()

    def starts_of_leave_one_out(self) -> tuple[Tensor, Tensor] | None:
        return (self.loc, self.variance) if bool(self.solved) else None

    # Predictions.

    def site_precision(self, given: Given) -> Float[Tensor, "*L N"] | None:
        is_known = given.bound.likelihood.is_gaussian or bool(self.solved)
        return self.observations(given, given.rows.own)[1] if is_known else None

    def enough_neighbors(self, given: Given) -> int:
        """The default number of nearest points per new point: 64, doubled up to 512.

        Doubling ends where it lowers the predictive variance at some points by less than 1 % on average.
        """
        first, most = prediction_range(given.graph, bool(self.solved))
        if first >= most:
            return first
        part = self.trial(given, most)
        cov, variance = bind_double(given.bound.kernel, self.loc.dtype), part.q.variance[..., part.places.rows]
        return enough_for_predictions(part.places, first, cov, part.rows.x.double(), variance, given.bound)

    def moments(
        self, given: Given, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P K"]
    ) -> tuple[Float[Tensor, "*L P"], Float[Tensor, "*L P"]]:
        """Means and variances of f given the points nearest to new points.

        The mean is the prior's given the posterior means at the nearest points, or before :meth:`solve` given
        the pseudo-observations. Cost: O(P k^3), and for the first call O(N log N).
        """
        bound, x, is_solved = given.bound, given.rows.x, bool(self.solved)
        target, precision = self.observations(given)
        pooled = self._pooled or self._cache.pooled(bound, given.graph, 1 / precision, near.shape[1])
        variance = pooled.variance(bound.covariance, x_new, near, 1 / precision)
        w, _ = graph_conditional(bound.covariance, x_new, x, near, None if is_solved else 1 / precision, bound.jitter)
        values = self.means(given) if is_solved else target
        loc = bound.mean(x_new) + (w * values[..., near]).sum(-1)
        if bound.trend is not None:
            variance = variance + bound.trend.variance(bound.trend.rest(x_new, w, near, gain_of(bound.trend)))
        return loc, variance.expand(loc.shape)

    def joint(
        self,
        given: Given,
        x_new: Float[Tensor, "P D"],
        near: Int[Tensor, "P K"],
        joint: Int[Tensor, "P k"],
        count: int,
    ) -> Float[Tensor, "S *L P"]:
        """Draws given the pseudo-observations, centered on the mean."""
        loc, _ = self.moments(given, x_new, near)
        target, precision = self.observations(given)
        zero = torch.zeros_like(target), 1 / precision
        return loc + draws_given_observations(given.bound, given.rows.x, x_new, joint, *zero, count)

    # Rows of other processes, and new ones.

    def row_tables(self) -> dict[str, Shaped[Tensor, "N ..."]]:
        """Views of the buffers of the solution, with a row for each point."""
        return {name: getattr(self, name).movedim(-1, 0) for name in _TABLES}

    @torch.no_grad()
    def set_tables(self, tables: Mapping[str, Shaped[Tensor, "N ..."]]) -> None:
        """Set the buffers of the solution, of another number of points if need be."""
        for name, rows in tables.items():
            setattr(self, name, rows.movedim(0, -1).contiguous())
        self._cache.forget()

    def with_tables(self, tables: Mapping[str, Tensor]) -> "ObservedGaussian":
        new = self._copy()
        new.set_tables(tables)
        return new

    def at_part(self, given: Given, part: Part, x_new: Tensor | None = None, num_neighbors: int = 0) -> Part:
        part = super().at_part(given, part)
        if x_new is not None and part.numbers is not None:
            bound, precision = given.bound, self.observations(given)[1][..., : given.graph.num_points]
            pooled = self._cache.pooled(bound, given.graph, 1 / precision, num_neighbors)
            part.q._pooled = pooled.near(x_new, part.graph, num_neighbors)
        return part

    @torch.no_grad()
    def append(self, given: Given, count: int, loc: Float[Tensor, "*L P"], variance: Float[Tensor, "*L P"]) -> None:
        """Append points, with pseudo-observations for N(loc, variance) of f and the point's datum."""
        rows, at = given.rows, slice(given.graph.num_points - count, None)
        zeros = torch.zeros_like(loc)
        new = SiteSolution(zeros, torch.full_like(loc, _NO_PRECISION), zeros, torch.ones_like(variance))
        if bool(self.solved):
            y, mean = rows.targets()[..., at], rows.mean(given.bound, at)
            loc = loc + mean - given.bound.mean(rows.x[at])  # the offset
            new = own_data_sites(rows.likelihood(given.bound, at), y, mean, loc, variance)
        for name in ("target", "precision", "loc", "variance"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(new, name).to(self.loc)], -1))
        self.gain = nn.functional.pad(self.gain, (0, count))
        self.neighbors_changed(given)

    def neighbors_changed(self, given: Given) -> None:
        if not given.rows.is_whole:
            tables = {name: table[: given.rows.num_data] for name, table in self.row_tables().items()}
            self.set_tables({name: given.rows.complete(given.graph, table) for name, table in tables.items()})
        self.excess.due.fill_(True)
        self._cache.forget()

    def restart(self, given: Any) -> None:
        shape = *self.loc.shape[:-1], len(given.rows.x)
        self.__init__(shape, given.mean, given.parameters, given.rows.x)  # type: ignore[misc]

    def _copy(self) -> "ObservedGaussian":
        """A copy whose buffers can be replaced."""
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__, _buffers=dict(self._buffers), _cache=NeighborCache())
        return new

    def _apply(self, fn: Any, recurse: bool = True) -> "ObservedGaussian":
        self._cache.forget()
        return super()._apply(fn, recurse)


def _forget_after_loading(q: ObservedGaussian, _: object) -> None:
    q._cache.forget()
