r"""Loadings, coefficients and factors at their joint optimum for given kernels.

With :math:`f_{pi} = b_p^\top z_i + a_p^\top u(x_i)` and :math:`q(u)` Gaussian with means m and covariances
:math:`C_i` at a point, the bound on the evidence with the log prior of loadings and coefficients is

.. math:: \sum_{pi} E_{N(\mu_{pi}, s_{pi})} \log p(y_{pi} \mid f) - \tfrac12 \sum_l m_l^\top \Lambda_l m_l
   + \log p(a, b) + \text{terms of } C, \qquad \mu = b^\top z + a^\top m, \quad s = a^\top C a .

A round is one Newton step for means, loadings and coefficients together, and the covariances of q at the new precisions
of the sites. The curvature of the step is that of the sites: output by output given the factors, less what the factors
are unknown (:mod:`pyro_nngp.variational.loadings_information`), which is positive definite; without the latter it would
be a step of the EM algorithm, which takes hundreds of rounds where a rotation of the factors is nearly as good. A step
is shortened until it raises the bound at fixed covariances.

The scale of a factor is found with all loadings on a sphere integrated out, so that its mode is the mode of its
logarithm: the prior does not shrink the loadings of a factor all together as far as they are known
(:meth:`~pyro_nngp.loadings.FactorLoadings.radial_precision`).

Cost: per round a factor of the posterior precision with its moments, sparse or up to 3,000 latent values dense, and
one pass over it with T (P + F) right-hand sides. Where a sparse one is too large, two solutions by conjugate
gradients, and every fourth round the information by blocks. Symbols: N points, T outputs, F factors, P basis functions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.linalg import factor_inverse, factor_solve
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.linalg.dense_factor import cholesky_above
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.means import BasisMean
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.coregionalized_evidence import parameters_gradient
from pyro_nngp.variational.evidence_excess import added
from pyro_nngp.variational.latent_evidence import number_of_draws
from pyro_nngp.variational.loadings_information import (
    Block,
    blocks_of,
    complete_information,
    information_of_means,
    information_of_variances,
    volume_gradient,
)
from pyro_nngp.variational.natural_gradient import gaussian_sites
from pyro_nngp.variational.site_solution import SiteSolution

_WIDE = 10.0  # scale of the prior of coefficients, in spreads of f per standard deviation of a column
_HELD = 1e12  # times that precision: coefficients of an output whose level is held stay as they are
_EVERY = 4  # rounds between informations by blocks
_SHORTEST = 1 / 64  # of a step
_LONGEST = 2.0  # step, in standard deviations of a number given the factors, in root mean square
_LEAST = 1e-3  # part of the information that is there when the factors are known


@torch.no_grad()
def solve_factors(q: Any, read: Callable[[], Any], loadings: FactorLoadings, max_rounds: int, tolerance: float) -> None:
    """Put loadings, coefficients of the mean and q(u) at their joint optimum, and then the difference of evidences.

    Args:
        q: a :class:`~pyro_nngp.variational.coregionalized.CoregionalizedObservations`.
        read: returns data, neighbors and present hyperparameters, and the mean function as a module.
        loadings: the loadings, which it sets.
        max_rounds: largest number of rounds.
        tolerance: stop where a round promises fewer nats per loading.
    """
    if not bool(q.solved):
        q.solve(read, level=False)
    solution = FactorSolution(read(), q.latent_prior(read()), loadings, q.loc, q.covariance)
    solution.run(max_rounds, tolerance)
    found = solution.finish()
    q.take(read, found, solution.latent, lambda parameters: solution.volume_gradient(parameters, read))


@torch.no_grad()
def find_intervals(q: Any, given: Any, loadings: FactorLoadings) -> None:
    """Set the posterior covariance of the loadings at their optimum; arguments as of :func:`solve_factors`."""
    solution = FactorSolution(given, q.latent_prior(given), loadings, q.loc, q.covariance)
    loadings.set_information(solution.information(), len(given.bound.covariances) == 1)


class Regression(NamedTuple):
    """Coefficients of the mean functions of outputs, which are solved for together with loadings, and their prior.

    Attributes:
        mean: the mean function; None where its coefficients are known.
        basis: basis functions, (N, P), none where they are known.
        coefficients: present values, (T, P).
        fixed: the rest of the mean functions, (T, N).
        center: means of the normal priors, (T, P).
        precision: precisions of the normal priors, (T, P).
    """

    mean: BasisMean | None
    basis: Float[Tensor, "N P"]
    coefficients: Float[Tensor, "T P"]
    fixed: Float[Tensor, "T N"]
    center: Float[Tensor, "T P"]
    precision: Float[Tensor, "T P"]


def regression_of(given: Any, loadings: FactorLoadings) -> Regression:
    """The coefficients of the mean functions at the present values; arguments as of :class:`FactorSolution`."""
    rows, mean, x = given.rows, given.mean, given.rows.x
    present = rows.mean(given.bound).expand(rows.targets().shape).double()
    solves = isinstance(mean, BasisMean) and mean.is_learned and bool(mean.own_shape)
    basis = mean.basis(x).double() if solves else x.new_zeros(len(x), 0, dtype=torch.float64)
    coefficients = mean.coefficients.mT.detach().double() if solves else present.new_zeros(len(present), 0)
    width = basis.std(0, correction=0)
    width = torch.where(width > 0, width, 1.0) / _WIDE
    center = coefficients.clone()
    center[:, 1:] = 0.0
    precision = (width / loadings.unit.double()[:, None]).square()
    if solves:
        precision = torch.where(mean.free(precision)[:, None], precision, _HELD * precision)
    fixed = present - coefficients @ basis.mT
    return Regression(mean if solves else None, basis, coefficients, fixed, center, precision)


class _Sites(NamedTuple):
    """Sites of the outputs, and what they belong to."""

    mean: Float[Tensor, "T N"]
    variance: Float[Tensor, "T N"]
    gradient: Float[Tensor, "T N"]
    precision: Float[Tensor, "T N"]


class FactorSolution:
    """The joint optimum for present kernels and likelihoods; changed by :meth:`round`, in double precision.

    Args:
        given: data, neighbors and hyperparameters, and the mean function as a module.
        latent: the priors of the factors (:class:`~pyro_nngp.variational.coregionalized_prior.CoregionalizedPrior`).
        loadings: the loadings.
        loc: means of the factors to start from, (F, N).
        cov: their covariances, (N, F, F).

    Attributes:
        latent: the priors at the present loadings, with the covariances of the last round.
    """

    def __init__(
        self,
        given: Any,
        latent: Any,
        loadings: FactorLoadings,
        loc: Float[Tensor, "F N"],
        cov: Float[Tensor, "N F F"],
    ) -> None:
        rows, bound = given.rows, given.bound
        self.latent, self._loadings, self._given = latent.at_loading(loadings.mode[None]), loadings, given
        self._likelihood: Likelihood = rows.likelihood(bound)
        y = rows.targets()
        self._y = y.double() if y.is_floating_point() else y
        self._seen = ~y.isnan()
        self._loading, self.loc, self._cov = loadings.mode.double(), loc.double(), cov.double()
        regression = regression_of(given, loadings)
        self._mean, self._basis, self._coefficients, self._fixed, self._center, self._of_prior = regression
        self._blocks: list[Block] = []
        self._missing: Tensor | None = None
        self._rounds = 0

    def run(self, max_rounds: int, tolerance: float) -> float:
        """Rounds until one promises less than `tolerance` nats per loading; returns what the last one promised."""
        promised = math.inf
        for _ in range(max_rounds):
            promised = self.round()
            if promised < tolerance * self._loading.numel():
                break
        return promised

    def round(self) -> float:
        """One step and new covariances; returns the gain of the bound that its quadratic model promises."""
        sites, posterior = self._sites_and_posterior()
        theta = torch.cat([self._coefficients, self._loading], -1)
        in_loc = posterior.transposed(sites.gradient) - posterior.prior_product(self.loc)
        in_theta = self._gradient(sites)
        root, complete = self._curvature(sites, self._missing_information(posterior))
        free = posterior.solve(in_loc)  # the move of the factors at fixed loadings
        right = in_theta - self._to_theta(sites, free)
        step = factor_solve(root, right.reshape(-1, 1))[:, 0].view_as(theta)
        spread = factor_inverse(root).diagonal().view_as(theta)[:, self._basis.shape[1] :]
        size = float(torch.einsum("tp,tpq,tq->", step, complete, step) / step.numel()) ** 0.5
        step = step * min(1.0, _LONGEST / max(size, 1e-300))
        move = free - posterior.solve(self._to_factors(sites, step))
        promised = float((in_theta * step).sum() + (in_loc * move).sum()) / 2
        self._take(theta, step, move)
        self._loadings.set_mode(self._loading, spread)
        self._update_covariance()
        self._rounds += 1
        return promised

    def finish(self) -> SiteSolution:
        """Put loadings and coefficients in place, with signs and order by convention; returns the sites and moments."""
        if self._turn() or self.latent.factored is None:
            self._update_covariance()
        sites, _ = self._sites_and_posterior()
        self._loadings.set_mode(self._loading)
        if self._mean is not None:
            self._mean.assign(self._coefficients.mT)
        return SiteSolution(self._targets(sites), sites.precision, self.loc, sites.variance)

    def information(self) -> Float[Tensor, "TPF TPF"]:
        """Information on coefficients and loadings, output by output, with all factors integrated out."""
        sites, posterior = self._sites_and_posterior()
        (count, size), p = self._loading.shape, self._basis.shape[1]
        missing = self._information_of_means(posterior)
        by_output = missing.view(count, p + size, count, p + size)
        for block in self._all_blocks():
            by_output[:, p:, :, p:] += information_of_variances(block.posterior(self._loading, sites.precision))
        root, _ = self._curvature(sites, missing)
        return root @ root.mT

    def volume_gradient(self, parameters: Sequence[Tensor], read: Callable[[], Any]) -> list[Tensor]:
        r"""Gradient of :math:`-\tfrac12 \log|I|`, what integrating over loadings and coefficients adds to the evidence.

        Kernels of short range leave loadings more certain. Without this term they look better than they are.

        Args:
            parameters: parameters of the kernels, and others.
            read: returns data, neighbors and hyperparameters, with gradients.
        """
        given, jitter = read(), self._given.bound.jitter
        sites, posterior = self._sites_and_posterior()
        inverse = factor_inverse(self._curvature(sites, self._missing_information(posterior))[0])
        total = [torch.zeros_like(part, dtype=torch.float64) for part in parameters]
        for rows, graph, part in self._parts(posterior):
            basis, loc = self._basis[rows], self.loc[:, rows]
            found = volume_gradient(part, inverse, basis, loc, _white(len(inverse), loc))
            total = added(total, parameters_gradient(parameters, found, given.bound.covariances, graph, jitter))
        return total

    # Parts of a round.

    def _update_covariance(self) -> None:
        """Covariances of the factors at the sites of the present means."""
        sites = self._sites(self._loading, self._coefficients, self.loc)
        self.latent = self.latent.at_loading(self._loading[None])
        self._cov = self.latent.posterior_covariance(sites.precision).double()

    def _sites_and_posterior(self) -> tuple[_Sites, CoupledPosterior]:
        """Sites, and q(u) under their precisions.

        Where there is a factor they have the precisions of the last one, which differ by what the covariances have
        changed since: their gradient, which a step brings to zero, is the present one.
        """
        sites, last = self._sites(self._loading, self._coefficients, self.loc), self.latent.factored
        if last is None:
            return sites, self.latent.posterior(sites.precision)
        return sites._replace(precision=last.precision), last

    def _sites(self, loading: Tensor, coefficients: Tensor, loc: Tensor) -> _Sites:
        mean = self._fixed + coefficients @ self._basis.mT + loading @ loc
        variance = self._variance(loading)
        target, precision = gaussian_sites(self._likelihood, self._y, mean, variance)
        precision = precision * self._seen
        return _Sites(mean, variance, torch.where(self._seen, precision * (target - mean), 0.0), precision)

    def _targets(self, sites: _Sites) -> Float[Tensor, "T N"]:
        """What the sites observe of A u."""
        return self._loading @ self.loc + sites.gradient / torch.where(self._seen, sites.precision, 1.0)

    def _design(self) -> Float[Tensor, "N PF"]:
        """Basis functions and means of the factors, which coefficients and loadings multiply."""
        return torch.cat([self._basis, self.loc.mT], -1)

    def _variance(self, loading: Tensor | None = None) -> Float[Tensor, "T N"]:
        loading = self._loading if loading is None else loading
        return ((loading @ self._cov) * loading).sum(-1).mT

    def _gradient(self, sites: _Sites) -> Float[Tensor, "T PF"]:
        """Gradient of the bound in coefficients and loadings, at fixed covariances."""
        by_variance = torch.einsum("tn,nlk,tk->tl", sites.precision, self._cov, self._loading)
        gradient = sites.gradient @ self._design()
        gradient[:, self._basis.shape[1] :] -= by_variance
        rest = torch.cat([self._coefficients - self._center, self._loading], -1)
        return gradient - self._prior_precision() * rest + (self._free_scale() @ rest.reshape(-1)).view_as(rest)

    def _prior_precision(self) -> Float[Tensor, "T PF"]:
        return torch.cat([self._of_prior, self._loadings.precision(self._loading)], -1)

    def _free_scale(self) -> Float[Tensor, "TPF TPF"]:
        """Part of the prior's precision that would shrink the loadings of a factor all together."""
        (count, size), width = self._loading.shape, self._loading.shape[1] + self._basis.shape[1]
        result = self._loading.new_zeros(count, width, count, width)
        each = torch.arange(width - size, width, device=result.device)
        result[:, each, :, each] = self._loadings.radial_precision(self._loading)
        return result.view(count * width, -1)

    def _bound(self, theta: Tensor, loc: Tensor) -> float:
        """The bound at fixed covariances, up to a constant."""
        p = self._basis.shape[1]
        coefficients, loading = theta[:, :p], theta[:, p:]
        mean = self._fixed + coefficients @ self._basis.mT + loading @ loc
        value = self._likelihood.expected_log_prob(self._y, mean, self._variance(loading))
        value = value if self._likelihood.weights is None else self._likelihood.weights * value
        center = torch.cat([self._center, torch.zeros_like(loading)], -1)
        rest = theta - center
        prior = (self._prior_precision() * rest.square()).sum()
        prior = prior - rest.reshape(-1) @ self._free_scale() @ rest.reshape(-1)
        return float(value.sum()) - self.latent.divergence(loc) - float(prior) / 2

    def _take(self, theta: Tensor, step: Tensor, move: Tensor) -> None:
        """Go along a step, as far as the bound at fixed covariances rises."""
        before, length, p = self._bound(theta, self.loc), 1.0, self._basis.shape[1]
        while length >= _SHORTEST:
            new, loc = theta + length * step, self.loc + length * move
            if self._bound(new, loc) > before:
                self._coefficients, self._loading, self.loc = new[:, :p], new[:, p:], loc
                return
            length /= 2

    def _to_theta(self, sites: _Sites, move: Float[Tensor, "F N"]) -> Float[Tensor, "T PF"]:
        """What a move of the factors changes the gradient in coefficients and loadings by, C' move."""
        return (sites.precision * (self._loading @ move)) @ self._design()

    def _to_factors(self, sites: _Sites, step: Float[Tensor, "T PF"]) -> Float[Tensor, "F N"]:
        """C step."""
        return self._loading.mT @ (sites.precision * (step @ self._design().mT))

    def _curvature(
        self, sites: _Sites, missing: Float[Tensor, "TPF TPF"]
    ) -> tuple[Float[Tensor, "TPF TPF"], Float[Tensor, "T PF PF"]]:
        """Root of the curvature in coefficients and loadings, and the information if the factors were known.

        Both are with the prior's.

        Args:
            sites: the sites.
            missing: information that is not there because the factors are unknown.
        """
        complete = complete_information(self._basis, self.loc, self._cov, sites.precision)
        complete = complete + torch.diag_embed(self._prior_precision())
        return cholesky_above(torch.block_diag(*complete) - missing - self._free_scale(), complete, _LEAST), complete

    def _missing_information(self, posterior: CoupledPosterior) -> Float[Tensor, "TPF TPF"]:
        """What the factors are unknown, by means alone."""
        if self._missing is None or posterior.is_direct or self._rounds % _EVERY == 0:
            self._missing = self._information_of_means(posterior)
        return self._missing

    def _information_of_means(self, posterior: CoupledPosterior) -> Float[Tensor, "TPF TPF"]:
        parts = self._parts(posterior)
        each = [information_of_means(part, self._basis[rows], self.loc[:, rows]) for rows, _, part in parts]
        return torch.stack(each).sum(0)

    def _parts(self, posterior: CoupledPosterior) -> list[tuple[Tensor, NeighborGraph, CoupledPosterior]]:
        """Rows, graph and q(u) of all points, or of blocks where the precision has no factor."""
        if posterior.is_direct:
            graph = self._given.graph
            return [(torch.arange(graph.num_points, device=self.loc.device), graph, posterior)]
        blocks = self._all_blocks()
        return [(each.rows, each.graph, each.posterior(self._loading, posterior.precision)) for each in blocks]

    def _all_blocks(self) -> list[Block]:
        if not self._blocks:
            given, size = self._given, self._loading.shape[1]
            self._blocks = blocks_of(given.bound.covariances, given.graph, size, given.bound.jitter)
        return self._blocks

    def _turn(self) -> bool:
        """Principal axes where all factors share a kernel, and signs such that loadings add up to a positive number.

        Returns whether that changed the loadings.
        """
        scaled = self._loading / self._loadings.unit.double()[:, None]
        unit = torch.eye(scaled.shape[1]).to(scaled)
        turn = unit
        if len(self._given.bound.covariances) == 1:
            turn = torch.linalg.svd(scaled, full_matrices=False)[2].mT
            turn = turn if turn.shape[0] == turn.shape[1] else unit
        turn = turn * torch.where((scaled @ turn).sum(0) < 0, -1.0, 1.0)
        if torch.equal(turn, unit):
            return False
        self._loading, self.loc, self._cov = self._loading @ turn, turn.mT @ self.loc, turn.mT @ self._cov @ turn
        return True


def _white(size: int, like: Float[Tensor, "F N"]) -> tuple[Float[Tensor, "S q"], Float[Tensor, "S F N"]]:
    """Standard normal values for a gradient, the same ones each time."""
    generator, count = torch.Generator().manual_seed(0), number_of_draws(like.numel())
    shapes = (count, size), (count, *like.shape)
    first, second = (torch.randn(s, generator=generator, device="cpu", dtype=torch.float64) for s in shapes)
    return first.to(like), second.to(like)


__all__ = ["FactorSolution", "Regression", "find_intervals", "regression_of", "solve_factors"]
