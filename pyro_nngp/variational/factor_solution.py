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

Cost: per round O((F N)^3) up to 3,000 latent values; then two solutions by conjugate gradients, and every fourth round
the information. Symbols: N points, T outputs, F factors, P basis functions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.linalg import cholesky, factor_inverse, factor_solve, half_solve
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.means import BasisMean
from pyro_nngp.variational.loadings_information import (
    Block,
    blocks_of,
    complete_information,
    information_of_means,
    information_of_variances,
)
from pyro_nngp.variational.natural_gradient import gaussian_sites
from pyro_nngp.variational.site_solution import SiteSolution

_WIDE = 10.0  # scale of the prior of coefficients, in spreads of f per standard deviation of a column
_BLOCKS = 2  # of which gradients are computed; the others are taken to be like them
_EVERY = 4  # rounds between informations of several blocks
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
    q.take(read, found, solution, lambda parameters: solution.volume_gradient(parameters, read))


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
        self._latent, self._loadings, self._given = latent.at_loading(loadings.mode[None]), loadings, given
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
        sites = self._sites(self._loading, self._coefficients, self.loc)
        theta = torch.cat([self._coefficients, self._loading], -1)
        posterior = self._latent.posterior(sites.precision)
        in_loc = posterior.transposed(sites.gradient) - posterior.prior_product(self.loc)
        in_theta = self._gradient(sites)
        complete = self._complete_information(sites)
        curvature = torch.block_diag(*complete) - self._missing_information(sites) - self._free_scale()
        free = posterior.solve(in_loc)  # the move of the factors at fixed loadings
        right = in_theta - self._to_theta(sites, free)
        root = _root(curvature, complete)
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
        self._turn()
        sites = self._update_covariance()
        self._loadings.set_mode(self._loading)
        if self._mean is not None:
            self._mean.assign(self._coefficients.mT)
        return SiteSolution(self._targets(sites), sites.precision, self.loc, self._variance())

    @property
    def covariance(self) -> Float[Tensor, "N F F"]:
        """Covariances of the factors at each point."""
        return self._cov

    def information(self) -> Float[Tensor, "TPF TPF"]:
        """Information on coefficients and loadings, output by output, with all factors integrated out."""
        sites = self._sites(self._loading, self._coefficients, self.loc)
        complete = self._complete_information(sites)
        count, p = len(self._loading), self._basis.shape[1]
        missing = torch.zeros_like(torch.block_diag(*complete))
        by_output = missing.view(count, complete.shape[1], count, complete.shape[1])
        for block in self._all_blocks():
            posterior = self._posterior_at(block, sites)
            missing += information_of_means(block, posterior, self._basis, self.loc)
            by_output[:, p:, :, p:] += information_of_variances(posterior)
        root = _root(torch.block_diag(*complete) - missing - self._free_scale(), complete)
        return root @ root.mT

    def volume_gradient(self, parameters: Sequence[Tensor], read: Callable[[], Any]) -> list[Tensor]:
        r"""Gradient of :math:`-\tfrac12 \log|I|`, what integrating over loadings and coefficients adds to the evidence.

        Kernels of short range leave loadings more certain. Without this term they look better than they are.

        Args:
            parameters: parameters of the kernels, and others.
            read: returns data, neighbors and hyperparameters, with gradients.
        """
        sites = self._sites(self._loading, self._coefficients, self.loc)
        complete = self._complete_information(sites)
        curvature = torch.block_diag(*complete) - self._missing_information(sites) - self._free_scale()
        inverse = factor_inverse(_root(curvature, complete))
        linear = self._loading.mT @ (sites.precision * self._targets(sites))
        blocks, gradient = self._all_blocks(), [torch.zeros_like(part, dtype=torch.float64) for part in parameters]
        some = blocks[:: math.ceil(len(blocks) / _BLOCKS)]
        for block in some:
            with torch.enable_grad():
                info = block.information(read().bound, self._loading, self._basis, linear, sites.precision)
                value = -(inverse * info).sum() / 2 * len(blocks) / len(some)
            parts = torch.autograd.grad(value, parameters, allow_unused=True)
            gradient = [total if part is None else total + part for total, part in zip(gradient, parts, strict=True)]
        return gradient

    # Parts of a round.

    def _update_covariance(self) -> _Sites:
        """Covariances of the factors at the sites of the present means; returns the sites."""
        sites = self._sites(self._loading, self._coefficients, self.loc)
        self._latent = self._latent.at_loading(self._loading[None])
        self._cov = self._latent.posterior_covariance(sites.precision).double()
        return sites

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

    def _complete_information(self, sites: _Sites) -> Float[Tensor, "T PF PF"]:
        """Information if the factors were known, with the prior's."""
        complete = complete_information(self._basis, self.loc, self._cov, sites.precision)
        return complete + torch.diag_embed(self._prior_precision())

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
        return float(value.sum()) - self._latent.divergence(loc) - float(prior) / 2

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

    def _missing_information(self, sites: _Sites) -> Float[Tensor, "TPF TPF"]:
        blocks = self._all_blocks()
        if self._missing is None or len(blocks) == 1 or self._rounds % _EVERY == 0:
            parts = [
                information_of_means(block, self._posterior_at(block, sites), self._basis, self.loc) for block in blocks
            ]
            self._missing = torch.stack(parts).sum(0)
        return self._missing

    def _posterior_at(self, block: Block, sites: _Sites) -> CoupledPosterior:
        """q(u) at the points of a block; the one of all points where these are the block."""
        whole = self._latent.posterior(sites.precision)
        alone = len(self._all_blocks()) == 1 and whole.is_dense
        return whole if alone else block.posterior(self._loading, sites.precision)

    def _all_blocks(self) -> list[Block]:
        if not self._blocks:
            given, size = self._given, self._loading.shape[1]
            self._blocks = blocks_of(given.bound.covariances, given.graph, size, given.bound.jitter)
        return self._blocks

    def _turn(self) -> None:
        """Principal axes where all factors share a kernel; and signs such that loadings add up to a positive number."""
        scaled = self._loading / self._loadings.unit.double()[:, None]
        turn = torch.eye(scaled.shape[1]).to(scaled)
        if len(self._given.bound.covariances) == 1:
            turn = torch.linalg.svd(scaled, full_matrices=False)[2].mT
            turn = turn if turn.shape[0] == turn.shape[1] else torch.eye(scaled.shape[1]).to(scaled)
        total = (scaled @ turn).sum(0)
        turn = turn * torch.where(total < 0, -1.0, 1.0)
        self._loading, self.loc, self._cov = self._loading @ turn, turn.mT @ self.loc, turn.mT @ self._cov @ turn


def _root(curvature: Tensor, complete: Float[Tensor, "T p p"]) -> Tensor:
    """Cholesky factor of a curvature, of which at least a small part of the complete one is left in each direction."""
    try:
        return cholesky(curvature, 0.0)
    except torch.linalg.LinAlgError:
        tril = torch.block_diag(*cholesky(complete, 0.0))
        white = half_solve(tril, half_solve(tril, curvature).mT)
        part, axes = torch.linalg.eigh((white + white.mT) / 2)
        repaired = (axes * part.clamp(min=_LEAST)) @ axes.mT
        return tril @ cholesky(repaired, 0.0)


__all__ = ["FactorSolution", "Regression", "find_intervals", "regression_of", "solve_factors"]
