r"""The Gaussian posterior of L latent functions given pseudo-observations of T outputs, weighted sums of them.

.. math:: q(u) \propto \prod_l p(u_l) \prod_{p, i} N(t_{pi} \mid a_{pi}^\top u(x_i), \tau_{pi}^{-1}),

with pseudo-observations from the moments of the outputs :math:`f_p(x_i) = a_{pi}^\top u(x_i)`, as for one function
(:mod:`pyro_nngp.variational.observed`). A mean-field q would take the latent functions at a point to be independent,
but data determine sums of them: q keeps their covariance, L x L at each point.

Means solve the sparse system that couples all latent functions (:mod:`pyro_nngp.linalg.coupled_posterior`).
Covariances at the data are exact up to 3,000 values, and where the posterior precision has a small sparse factor;
elsewhere, and at new points, they are those given the pseudo-observations of the nearest points, the point itself
included: at least K points, and up to 96 observations. Rows and outputs without a datum have the precision 0.

Cost: O(N (k R)^3) per round of covariances with k nearest points, R = min(T, L), and O(N L K) per iteration of
conjugate gradients to solve; a batch touches its rows. Memory: O(N L (K + L)). Symbols: N points, K neighbors, T
outputs, L latent functions, U rows of a batch and its neighbors, P new points.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from pyro_nngp._checks import warn
from pyro_nngp.bound import Bound
from pyro_nngp.coefficients import Trend, joint_trend
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.conditionals.coregionalized import gathered, latent_conditional, outputs_of
from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.coregionalized import CoregionalizedPosterior, NNGPs, whitened_sites
from pyro_nngp.likelihoods import Likelihood, PerOutput
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.linalg import cholesky, half_solve, solve_triangular
from pyro_nngp.linalg.nested_dissection import Elimination
from pyro_nngp.means import BasisMean
from pyro_nngp.neighbors import Batch, NeighborGraph
from pyro_nngp.rows import EVERY, At
from pyro_nngp.variational.coregionalized_evidence import ExactCoregionalizedEvidence, coregionalized_excess
from pyro_nngp.variational.coregionalized_prior import CoregionalizedPrior
from pyro_nngp.variational.evidence_excess import Excess, added
from pyro_nngp.variational.family import Given, gain_of
from pyro_nngp.variational.latent_prior import alone
from pyro_nngp.variational.natural_gradient import gaussian_sites
from pyro_nngp.variational.observed import ObservedGaussian
from pyro_nngp.variational.site_solution import SiteSolution

GIVEN_ROUNDS, _GIVEN_STEP, _GIVEN_MOVE = 100, 0.5, 1e-4  # of sites at new points; moves in standard deviations
_SITES = 96  # that covariances depend on, if there are so many


@runtime_checkable
class GivenOutputs(Given, Protocol):
    """Arguments of q(u) at each call.

    Attributes:
        parameters: what the evidence of the pseudo-observations depends on.
        mean: the mean function as a module.
        has_factors: whether the loadings are solved for as well.
    """

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    @property
    def mean(self) -> Any: ...

    @property
    def has_factors(self) -> bool: ...

    def loading(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "#B T L"]:
        """A at points, or (1, T, L) where it is the same at all."""


class CoregionalizedObservations(ObservedGaussian):
    """Pseudo-observations of T outputs at the N points of a graph, and moments of the latent functions, as buffers.

    Args:
        num_outputs: T.
        num_latents: L.
        num_points: N.
        mean: the mean function as a module.
        parameters: what the evidence depends on.
        like: a tensor of the dtype and device of the buffers.

    Attributes:
        target, precision: pseudo-observations of the outputs less the mean function, (T, N).
        loc: marginal means of the latent functions, (L, N).
        covariance: their covariances at each point, (N, L, L).
        variance: marginal variances of the outputs, (T, N).
    """

    trained_buffers = ObservedGaussian.trained_buffers | {"covariance"}
    covariance: Tensor

    def __init__(
        self,
        num_outputs: int,
        num_latents: int,
        num_points: int,
        mean: Any,
        parameters: Sequence[Tensor],
        like: Tensor,
    ) -> None:
        super().__init__((num_outputs, num_points), mean, parameters, like)
        self.register_buffer("loc", like.new_zeros(num_latents, num_points))
        self.register_buffer("covariance", torch.eye(num_latents).to(like).repeat(num_points, 1, 1))

    # Values at the points.

    def observations(self, given: Any, at: At = EVERY) -> tuple[Float[Tensor, "T U"], Float[Tensor, "T U"]]:
        """Pseudo-observations of the outputs less the mean function, and their precisions, at some rows.

        Outputs with Gaussian noise have the data, with gradients for noise and mean function; 0 where an output
        is missing.
        """
        rows, likelihood = given.rows, cast(PerOutput, given.rows.likelihood(given.bound, at))
        y = rows.targets()[..., at]
        seen, mean = ~y.isnan(), rows.mean(given.bound, at).expand(y.shape)
        targets, precisions = list(self.target[:, at]), list(self.precision[:, at])
        weights = None if likelihood.weights is None else likelihood.weights.expand(y.shape)
        for number, part in enumerate(likelihood.outputs):
            if part.is_gaussian:
                weighted = part if weights is None else part.for_rows(weights[number])
                values, noise = gaussian_observations(weighted, y[number].nan_to_num(), None, rows.x.dtype)
                targets[number], precisions[number] = values - mean[number], (1 / noise).expand(values.shape)
        target, precision = torch.stack(targets), torch.stack(precisions)
        return torch.where(seen, target, 0.0), torch.where(seen, precision, 0.0)

    def at_batch(self, given: Any, prior: Any) -> Any:
        """q(u) at the batch of a prior of all latent functions."""
        if torch.is_grad_enabled() and not (given.bound.likelihood.is_gaussian or bool(self.solved)):
            warn(
                "LMC: q(u) is the prior, since solve() has not been called. Call it before training and every few "
                "steps, as fit() does."
            )
        return self._posterior(given, prior, self.excess(given.parameters))

    def _posterior(self, given: GivenOutputs, prior: NNGPs, offset: Tensor | None = None) -> CoregionalizedPosterior:
        some = prior.batch.rows
        target, precision = self.observations(given, EVERY if prior.is_whole else some)
        loading, loc, cov = given.loading(given.rows.x[some]), self.loc[:, some], self.covariance[some]
        evidence = self._evidence_of_outputs if self._profile is not None and prior.is_whole else None
        return CoregionalizedPosterior(prior, loading, target, precision, loc, cov, offset=offset, evidence=evidence)

    def _evidence_of_outputs(self, prior: NNGPs, loading: Tensor, target: Tensor, precision: Tensor) -> Tensor:
        conditionals = [part for each in prior.each for part in each.conditionals]
        neighbors, posterior_at = prior.priors[0].graph.neighbors, self._profile.posterior_at
        return ExactCoregionalizedEvidence.apply(posterior_at, neighbors, loading, target, precision, *conditionals)

    # The optimum.

    def _latent_prior(self, given: Any) -> CoregionalizedPrior:
        return self.latent_prior(given)

    def latent_prior(self, given: GivenOutputs) -> CoregionalizedPrior:
        """The priors of the latent functions at the present hyperparameters."""
        graph, bound = given.graph, given.bound
        near = self._cache.nearest(lambda: graph.query(graph.x, self.prediction_neighbors(given)))
        rest = given.loading(graph.x), ~given.rows.targets().isnan(), near, self.elimination(given)
        return CoregionalizedPrior(bound.covariances, graph, bound.jitter, *rest)

    def elimination(self, given: Any) -> Elimination | None:
        """The order of elimination for all latent functions; None with Gaussian data and loadings that are given."""
        if given.bound.likelihood.is_gaussian and not given.has_factors:
            return None
        return self._cache.plan(given.graph, len(self.loc))

    def _put(self, given: Any, solution: SiteSolution, latent: Any) -> None:
        super()._put(given, solution, latent)
        seen = ~given.rows.targets().isnan()
        self.precision.mul_(seen)
        self.target.mul_(seen)
        covariance = latent.covariance
        self.covariance.copy_(latent.posterior_covariance(self.precision) if covariance is None else covariance)

    def take(
        self,
        read: Callable[[], Any],
        solution: SiteSolution,
        latent: CoregionalizedPrior,
        more: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> None:
        """Keep a solution for all rows, and compute the difference of evidences there.

        Args:
            read: as of :meth:`solve`.
            solution: sites and moments.
            latent: the priors, with the covariances of the latent functions at each point there.
            more: maps parameters to the gradient of what the evidence has in addition.
        """
        with torch.no_grad():
            self._put(read(), solution, latent)
            self.solved.fill_(True)
        with torch.enable_grad():
            self._correct(read(), latent, more)

    def _correct(self, given: Any, latent: CoregionalizedPrior | None, more: Any = None) -> None:
        def posterior_at(some: Tensor | None) -> CoregionalizedPosterior:
            prior = latent_priors(given.bound, given.graph, given.graph.batch(some), len(self.loc))
            return self._posterior(given, prior)

        def find(parameters: Sequence[Tensor]) -> Excess:
            coupled = None if latent is None else latent.posterior_at
            found = coregionalized_excess(parameters, posterior_at, coupled)
            if more is None:
                return found
            return Excess(added(found.gradient, more(parameters)), found.value)

        self.excess.update(given.parameters, find, self.loc.numel())

    @torch.no_grad()
    def find_trend(self, given: Any) -> Trend | None:
        """The coefficients of the mean functions of all outputs, jointly, under a flat prior.

        Cost: a solution by conjugate gradients for each coefficient.
        """
        if not (given.bound.likelihood.is_gaussian or bool(self.solved)):
            return None  # no precision is known
        mean, precision = given.bound.mean_function, self.observations(given)[1]
        changes = changes_of_mean(mean, given.rows.x, len(precision)).permute(2, 1, 0)
        gain, information = self.latent_prior(given).coefficients(changes.to(precision), precision)
        return joint_trend(mean, information, gain)

    def level_roots(
        self, given: GivenOutputs, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P k"]
    ) -> Float[Tensor, "P T q"]:
        """A root of the covariance of all outputs at new points that the coefficients of the mean bring."""
        trend, count = cast(Trend, given.bound.trend), len(self.target)
        response = given_values(given, x_new, near, gain_of(trend).mT)[0]  # (L, C, P)
        own = changes_of_mean(given.bound.mean_function, x_new, count)
        rest = own - torch.einsum("ptl,lcp->ptc", given.loading(x_new).expand(len(x_new), -1, -1), response)
        return rest @ trend.root.flatten(0, -2).to(rest)

    def solved_copy(self, read: Callable[[], Any]) -> "CoregionalizedObservations":
        """q(u) at other hyperparameters, in a copy."""
        new = cast(CoregionalizedObservations, self._copy())
        new._buffers.update({name: value.clone() for name, value in new._buffers.items() if value is not None})
        new.solve_again(read)
        return new

    # Predictions.

    def prediction_neighbors(self, given: Any) -> int:
        """The number of nearest points per point that covariances depend on: K, or more for up to 96 observations."""
        graph = given.graph
        return min(graph.num_points, max(graph.num_neighbors, _SITES // min(len(self.target), len(self.loc))))

    def enough_neighbors(self, given: Any) -> int:
        return self.prediction_neighbors(given)

    def moments(
        self, given: Any, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P k"]
    ) -> tuple[Float[Tensor, "L P"], Float[Tensor, "P L L"]]:
        """Means and covariances of the latent functions at new points, given the rows of their nearest points.

        The mean is the prior's given the posterior means at the nearest points, or before :meth:`solve` given the
        pseudo-observations. Cost: O(P (k R)^3).
        """
        loc, cov = self.given_observations(given, x_new, near)
        return (given_values(given, x_new, near, self.loc)[0] if bool(self.solved) else loc), cov

    def given_observations(
        self, given: GivenOutputs, x: Float[Tensor, "P D"], near: Int[Tensor, "P k"]
    ) -> tuple[Float[Tensor, "L P"], Float[Tensor, "P L L"]]:
        """Means and covariances of the latent functions at points, given the pseudo-observations at some rows alone."""
        bound, points, (rows, values) = given.bound, given.graph.x, self._whitened(given)
        around, noise = gathered(rows, torch.ones_like(values), near)
        weights, cov = latent_conditional(bound.covariances, x, points[near.clamp(min=0)], around, noise, bound.jitter)
        return (weights @ values[near.clamp(min=0)].flatten(1)[..., None])[..., 0].mT, cov

    @torch.no_grad()
    def joint_deviations(
        self, given: GivenOutputs, x_new: Float[Tensor, "P D"], joint: Int[Tensor, "P k"], count: int
    ) -> Float[Tensor, "S L P"]:
        """Joint draws of the latent functions at new points less their means, each given nearby values.

        Args:
            given: data, neighbors and hyperparameters.
            x_new: new points.
            joint: the nearest among all points, which have pseudo-observations, and earlier new ones.
            count: S.

        Cost: O(P (k R)^3) with R = max(T, L), then O(P k L^2) per draw.
        """
        bound, (rows, values), (size, n) = given.bound, self._whitened(given), self.loc.shape
        width = max(values.shape[1], size)
        rows, noise = pad(rows, (0, 0, 0, width - values.shape[1])), values.new_ones(n + len(x_new), width)
        rows = torch.cat([rows, torch.eye(width, size).to(rows).expand(len(x_new), -1, -1)])
        noise[n:, :size] = 0.0  # new values are noise-free
        points = torch.cat([given.graph.x, x_new])
        around, noise = gathered(rows, noise, joint)
        near = points[joint.clamp(min=0)]
        weights, cov = latent_conditional(bound.covariances, x_new, near, around, noise, bound.jitter)
        tril = cholesky(cov, 0.0, escalate=True)
        white = torch.randn(len(x_new), size, count, dtype=cov.dtype, device=cov.device)
        number = torch.arange(width, device=joint.device)
        places = torch.where((joint[..., None] >= n) & (number < size), (joint[..., None] - n) * size + number, -1)
        deviations = (tril @ white).permute(2, 0, 1).flatten(1)
        draws = solve_triangular(weights.flatten(0, 1), places.flatten(1).repeat_interleave(size, 0), deviations)
        return draws.unflatten(1, (-1, size)).mT

    def _whitened(self, given: GivenOutputs) -> tuple[Float[Tensor, "N R L"], Float[Tensor, "N R"]]:
        """Loadings and targets in units of the standard deviations of the pseudo-observations."""
        return whitened_sites(given.loading(given.rows.x), *self.observations(given))[:2]

    # Other rows.

    def restart(self, given: Any) -> None:
        sizes = len(self.target), len(self.loc), given.graph.num_points
        self.__init__(*sizes, given.mean, given.parameters, given.rows.x)  # type: ignore[misc]

    @torch.no_grad()
    def append(self, given: Any, count: int, loc: Float[Tensor, "T P"], variance: Float[Tensor, "T P"]) -> None:
        """Append points, with pseudo-observations for N(loc, variance) of f and the point's data."""
        rows, bound, at = given.rows, given.bound, slice(given.graph.num_points - count, None)
        likelihood, y, mean = rows.likelihood(bound, at), rows.targets()[..., at], rows.mean(bound, at)
        seen, loc = ~y.isnan(), loc + mean - bound.mean(rows.x[at])  # with the offset
        target, precision = gaussian_sites(likelihood, y, *alone(likelihood, y, loc, variance))
        new = {"target": (target - mean) * seen, "precision": precision * seen, "variance": variance}
        for name, value in new.items():
            setattr(self, name, torch.cat([getattr(self, name), value.to(self.loc)], -1))
        self.gain, self.loc = pad(self.gain, (0, count)), pad(self.loc, (0, count))
        self.covariance = torch.cat([self.covariance, self.covariance[:1].expand(count, -1, -1)])
        self.neighbors_changed(given)


def changes_of_mean(mean: BasisMean, x: Float[Tensor, "n D"], num_outputs: int) -> Float[Tensor, "n T C"]:
    """Change of the mean functions of all outputs at points per unit of each coefficient, output by output."""
    basis = mean.basis(x)[:, None]
    if not mean.own_shape:
        return basis.expand(-1, num_outputs, -1)
    own = torch.eye(num_outputs).to(basis)
    return (own[:, :, None] * basis[..., None, :]).flatten(2)


def latent_priors(bound: Bound, graph: NeighborGraph, batch: Batch, num_latents: int) -> NNGPs:
    """p(u) of all latent functions on a batch of the graph, at one set of hyperparameters."""
    return NNGPs([NNGP(each, graph, batch, jitter=bound.jitter) for each in bound.covariances], num_latents)


def given_values(
    given: GivenOutputs, x: Float[Tensor, "P D"], near: Int[Tensor, "P k"], u: Float[Tensor, "L *C N"]
) -> tuple[Float[Tensor, "L *C P"], Float[Tensor, "P L L"]]:
    """Means and covariances of the latent functions at points, given their values at some rows."""
    bound, points, at = given.bound, given.graph.x, near.clamp(min=0)
    parts = [graph_conditional(each, x, points, near, None, bound.jitter) for each in bound.covariances]
    each = parts * len(u) if len(parts) == 1 else parts
    loc = [(w * values[..., at]).sum(-1) for (w, _), values in zip(each, u, strict=True)]
    return torch.stack(loc), torch.diag_embed(torch.stack([var for _, var in each], -1))


def given_outputs(
    likelihood: Likelihood,
    y: Float[Tensor, "T P"],
    mean: Float[Tensor, "#T #P"],
    loading: Float[Tensor, "#P T L"],
    loc: Float[Tensor, "L P"],
    cov: Float[Tensor, "P L L"],
) -> tuple[Float[Tensor, "L P"], Float[Tensor, "P L L"]]:
    """Means and covariances of the latent functions at points, given outputs there; sites by damped rounds.

    Args:
        likelihood: of the outputs.
        y: known outputs, NaN where they are not known.
        mean: mean functions.
        loading: A.
        loc: means of the latent functions before.
        cov: their covariances.
    """
    seen, start, prior = ~y.isnan(), loc.mT[..., None], cov
    if not bool(seen.any()):
        return loc, cov
    half = cholesky(prior, 0.0, escalate=True)
    eye = torch.eye(len(loc)).to(cov)
    precision = right = torch.zeros_like(y)
    for _ in range(GIVEN_ROUNDS):
        fitted, variance = outputs_of(loading, loc, cov)
        fitted = mean + fitted
        target, new = gaussian_sites(likelihood, y, fitted, variance)
        new = new * seen
        step = 1.0 if likelihood.is_gaussian else _GIVEN_STEP
        precision = precision + step * (new - precision)
        right = right + step * (torch.where(seen, new * (target - mean), 0.0) - right)
        gram = torch.einsum("...ptl,tp,...ptk->plk", loading, precision, loading)
        inner = cholesky(eye + half.mT @ gram @ half, 0.0)
        root = half_solve(inner, half.mT)
        cov = root.mT @ root
        pull = torch.einsum("...ptl,tp->pl", loading, right)[..., None] - gram @ start
        before, loc = loc, (start + cov @ pull)[..., 0].mT
        moved = (loc - before).abs() / prior.diagonal(dim1=1, dim2=2).mT.sqrt()
        if likelihood.is_gaussian or float(moved.max()) < _GIVEN_MOVE:
            return loc, cov
    cure = "Compare with predictions from fewer known outputs."
    warn(f"LMC.predict_given: means still move by {float(moved.max()):.1g} after {GIVEN_ROUNDS} rounds. {cure}")
    return loc, cov


__all__ = ["CoregionalizedObservations", "GivenOutputs", "given_values", "latent_priors"]
