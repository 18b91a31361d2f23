"""The prior of latent values at fixed hyperparameters, with the operations that the solution for Gaussian sites needs.

On several processes values belong to the local rows.

Cost: a sparse factorization for means and variances where it is small enough; otherwise O(N K) per iteration of
conjugate gradients for means, O(N k^3) for variances from k observations each. Symbols: N points, K neighbors, L latent
functions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.linalg.nested_dissection import Elimination
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.factored_posterior import FactoredPosterior
from pyro_nngp.variational.factors import prior_factor
from pyro_nngp.variational.natural_gradient import Total, average, gaussian_sites, whole
from pyro_nngp.variational.pooled_places import places_of
from pyro_nngp.variational.pooling import PooledObservations
from pyro_nngp.variational.posterior_mean import posterior_mean

ACCURACY = 0.1
"""Square root of the error of the precision of coefficients, in units of 1 / Var f."""
_CLOSER = 0.03  # part of the tolerance where variances will be exact, which takes one or two more iterations
_NEAREST = 32  # sites that variances depend on before there is a factor
_ALONE, _STILL = 30, 1e-4  # most steps to the posterior of each value alone; last move in standard deviations


class LatentPrior:
    """The prior of latent values at fixed hyperparameters, as :meth:`ObservedGaussian.solve` uses it.

    Args:
        kernel: bound.
        graph: the points and their neighbors.
        jitter: relative nugget.
        nearest: maps kernel and noise to the observations that the variance at each point depends on; not needed for
            means.
        plan: order of elimination for exact means and variances; None has iterations, and variances from near points.
        last: a posterior by sparse factors at other hyperparameters, of the same plan. Its variances serve until there
            is a factor here, and where the hyperparameters are near, it preconditions iterations; at the same ones it
            takes the place of a new one. Without it variances from near sites may serve so.
        is_known: whether the precisions of sites are known, so that nothing precedes the factor.

    Attributes:
        exact: the posterior by sparse factors; None without a plan.
    """

    exact: FactoredPosterior | None = None
    _waits = False
    _similar: FactoredPosterior | None = None

    def __init__(
        self,
        kernel: Any,
        graph: NeighborGraph,
        jitter: float,
        nearest: Callable[..., Tensor] | None = None,
        plan: Elimination | None = None,
        last: FactoredPosterior | None = None,
        is_known: bool = False,
    ) -> None:
        self._parts = kernel, graph, jitter, nearest
        self._factor, self._waits = prior_factor(kernel, graph, jitter), last is not None and not is_known
        if plan is not None:
            factor = cast(VecchiaFactor, self._factor)
            self.exact = last if last is not None and last.has_prior(factor) else FactoredPosterior(factor, plan)
            self._similar = last if last is not None and last.is_near(factor) else None
        self._x = graph.x[: graph.num_points]
        self._near: Any = None
        self._pooled: tuple[PooledObservations, Any, list[Any]] | None = None

    @property
    def variance(self) -> Float[Tensor, " N"]:
        """Prior variances of f."""
        return self._parts[0].diag(self._x)

    def precedes(self, precision: Float[Tensor, "*L N"]) -> bool:
        """Whether other variances serve until the sites are found, since there is no factor for these precisions."""
        return self._waits and self.exact is not None and not self.exact.is_at(precision)

    def start(self, f: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        """Latent values to start from, near these values of f less the mean function."""
        return f

    def at(self, u: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        """f less the mean function at latent values u."""
        return u

    def divergence(self, loc: Float[Tensor, "*L N"]) -> float:
        """KL of q with these means from the prior, up to a constant while variances are fixed."""
        return float(self._total((loc * self._factor.product(loc.double())).sum())) / 2

    def _total(self, part: Tensor) -> Tensor:
        """The sum over all processes."""
        return self._parts[1].total(part)

    def posterior_mean(
        self, target: Tensor, precision: Tensor, start: Tensor, tolerance: float, reduction: float
    ) -> Float[Tensor, "*L N"]:
        """Means of u given sites of f less the mean function, see :func:`posterior_mean`."""
        if self.exact is None:
            return posterior_mean(self._factor, target, precision, start, tolerance, reduction)
        if not self.exact.has_factors and not self._waits:
            self.exact.factors(precision)
        if self.exact.is_at(precision):
            return self.exact.solve((precision * target).double()).to(target)
        parts = self._factor, target, precision, start, _CLOSER * tolerance, reduction
        if self.exact.has_factors:
            return posterior_mean(*parts, precondition=self.exact.solve, direct=partial(self._solve_at, precision))
        return posterior_mean(*parts, precondition=None if self._similar is None else self._similar.solve)

    def _solve_at(self, precision: Float[Tensor, "*L N"], right: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        """Solutions with a factor of its own."""
        assert self.exact is not None  # who asks has one
        self.exact.factors(precision)
        return self.exact.solve(right)

    def targets(
        self, loc: Float[Tensor, "*L N"], precision: Float[Tensor, "*L N"], sites: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "*L N"]:
        """Pseudo-observations of these precisions whose posterior has these means, as that of the sites has."""
        return loc + (self._factor.product(loc.double()) / precision.double()).to(loc)

    @property
    def can_wait(self) -> bool:
        """Whether the first steps need no factor, while later variances come from one."""
        return self.exact is not None

    def nearby_variance(self, precision: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        """Variances of f given the sites nearest to each point, which serve until the sites are found."""
        kernel, graph, jitter, _ = self._parts
        if self._near is None:
            self._near = places_of(graph).query(self._x, min(_NEAREST, graph.num_points))
        self._waits = True
        return graph_conditional(kernel, self._x, self._x, self._near, 1 / precision, jitter)[1]

    def posterior_variance(self, precision: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        """Variances of f given sites of these precisions; the first call finds the places where they are pooled."""
        if self.exact is not None:
            return self.exact.variances(precision)
        (kernel, graph, jitter, nearest), noise = self._parts, 1 / precision
        if self._pooled is None:
            assert nearest is not None  # who asks for variances gives it
            near = nearest(kernel, noise)
            pooled = PooledObservations(kernel, graph, noise, near.shape[1], jitter)
            self._pooled = pooled, near, pooled.plan(self._x, near.shape[1])
        pooled, near, plan = self._pooled
        return pooled.at_noise(kernel, noise).variance(kernel, self._x, near, noise, plan)

    def coefficients(
        self, basis: Float[Tensor, "p N"], precision: Float[Tensor, "*L N"]
    ) -> tuple[Float[Tensor, "*L p N"], Float[Tensor, "*L p p"]]:
        r"""The likelihood of the coefficients of a mean function that is linear in them, given sites.

        .. math:: g_c = (\Lambda + \mathrm{diag}\,\tau)^{-1} \mathrm{diag}(\tau)\, b_c, \qquad
           P = g^\top \Lambda g + (b - g)^\top \mathrm{diag}(\tau)\, (b - g),

        which is as small as it can be at the solution: errors of g count with their squares.

        Args:
            basis: b at the points.
            precision: of the sites.

        Returns:
            Posterior means g of u, and the precision of the coefficients.
        """
        each = precision[..., None, :].expand(*precision.shape[:-1], *basis.shape)
        spread, count = average(self.variance, self._total).sqrt(), self._parts[1].num_rows
        size = (self._total(basis.square().sum(-1)) / count).sqrt()
        unit = (spread / torch.where(size > 0, size, 1.0))[:, None].to(basis)  # of the solver's tolerance
        target, tolerance = (unit * basis).expand(each.shape), min(1e-3, ACCURACY / count**0.5)
        gain = self.posterior_mean(target, each, torch.zeros_like(each), tolerance, 0.0) / unit
        rest, g = (basis - gain).double(), gain.double()
        curvature = self._total(g @ self._factor.product(g).mT + (rest * each.double()) @ rest.mT)
        return gain, (curvature + curvature.mT) / 2

    def level_step(
        self, free: Tensor, loc: Tensor, slope: Tensor, precision: Tensor, limited: bool
    ) -> tuple[Tensor, Tensor]:
        """The Newton step of a constant mean, exact for these sites, and by how much u moves in the other direction.

        Args:
            free: whether the constant moves, or which of the constants of L functions, () or (L,).
            loc: means of u, whose error counts by its product with the error of the response.
            slope: gradient of the log density of the sites in f.
            precision: of the sites.
            limited: whether to limit the step to a standard deviation of f: where sites are almost flat, it may go
                anywhere.
        """
        ones = slope.new_ones(1, slope.shape[-1])
        gain, curvature = (part[..., 0, :] for part in self.coefficients(ones, precision))
        smooth = gain.double()
        gradient = self._total(
            ((1 - smooth) * slope + smooth * self._factor.product(loc.double())).sum(-1, keepdim=True)
        )
        if not (free.dim() and slope.dim() == 2):
            gradient, curvature = gradient.sum(), curvature.sum()
        change = (gradient / curvature).to(slope)
        if limited:
            spread = average(self.variance, self._total).sqrt()
            change = change.clamp(-spread, spread)
        change = torch.where(free.reshape(change.shape), change, 0.0)  # a curvature of 0 leaves no number
        return change, change * gain


def alone(
    likelihood: Likelihood,
    y: Tensor,
    mean: Float[Tensor, "*L N"],
    var: Float[Tensor, "*L N"],
    total: Total = whole,
) -> tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N"]]:
    """Means and variances of f given each point's datum only: a safe start for natural-gradient steps.

    Sites at the prior mean can be far off, such as the site of a count of 100 where .01 is expected. Steps are
    natural-gradient steps, limited to one standard deviation of the prior.
    """
    loc, spread, most = mean, var, var.sqrt()
    for _ in range(_ALONE):
        target, precision = gaussian_sites(likelihood, y, loc, spread, total=total)
        spread = 1 / (1 / var + precision)
        step = spread * (mean / var + precision * target) - loc
        loc = loc + torch.minimum(torch.maximum(step, -most), most)
        if average(step.square() / spread, total) < _STILL**2:
            break
    return loc, spread
