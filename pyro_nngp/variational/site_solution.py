"""The optimum of Gaussian sites at fixed hyperparameters: means and variances of q in alternation.

Natural-gradient steps for the means (:mod:`pyro_nngp.variational.natural_gradient`), with the variances fixed,
alternate with the variances at the sites of these means, until the precisions of the sites stop changing. Coefficients
of the mean function (:mod:`pyro_nngp.variational.mean_coefficients`) follow in each round. A Gaussian likelihood takes
one round. Where variances take a sparse factor, the first two rounds of the first solution have variances from near
sites: most often the sites are then so near to their optimum that one factor is enough.

Cost: O(N K^3) per round of variances and O(N K) per iteration of conjugate gradients. Symbols: N points, K neighbors, p
coefficients, L latent functions.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.variational.latent_prior import LatentPrior, alone
from pyro_nngp.variational.mean_coefficients import MeanCoefficients
from pyro_nngp.variational.natural_gradient import Total, average, gaussian_sites, natural_gradient

_STEP_REDUCTION = 0.1  # of the residual in a natural-gradient step
_ROUNDS = 30  # alternations of means and variances
_STEPS = 4  # for the means in a round: new variances matter more than the last digits of the means
_SAME_SITES = 10.0  # tolerances: weighted relative change of the precisions of sites below which variances are kept


class SiteProblem(NamedTuple):
    """Everything that determines the sites at fixed hyperparameters, at the rows of this process."""

    likelihood: Likelihood
    """p(y | f), bound."""
    y: Tensor
    """Data, as the likelihood's ``expected_log_prob`` takes them."""
    x: Float[Tensor, "N D"]
    """The points."""
    mean: Callable[[], Float[Tensor, "*L N"]]
    """Returns the mean function at the points, at its present coefficients."""
    latent: LatentPrior
    """The prior of u, f less the mean function."""
    coefficients: MeanCoefficients
    """Coefficients of the mean function."""
    total: Total
    """The sum over the data of all processes from that over the present N."""


class SiteSolution(NamedTuple):
    """Sites, and moments of q(u)."""

    target: Float[Tensor, "*L N"]
    """Pseudo-observations of u."""
    precision: Float[Tensor, "*L N"]
    """Their precisions."""
    loc: Float[Tensor, "*L N"]
    """Marginal means of u."""
    variance: Float[Tensor, "*L N"]
    """Marginal variances of u."""
    gain: Float[Tensor, "*L p N"] | None = None
    """How much the means fall per unit of each coefficient; None without a posterior of the coefficients."""


class Progress(NamedTuple):
    """Outcome of steps to a solution, for :func:`~pyro_nngp.variational.natural_gradient.warn_unsettled`."""

    moved: float
    """How far a last step of length one would have moved means."""
    began: bool
    """Whether any step raised the bound, or there were too few to know."""
    first: bool
    """Whether this is the first solution, and it ended before new variances."""


def optimal_sites(
    problem: SiteProblem,
    start: SiteSolution,
    is_solved: bool,
    max_steps: int,
    tolerance: float,
    level: bool,
) -> tuple[SiteSolution, Progress]:
    """Sites and moments at their optimum; coefficients of the mean function are set to theirs.

    Args:
        problem: what the sites depend on.
        start: the solution at other hyperparameters, or any sites and moments.
        is_solved: whether `start` is a solution.
        max_steps: largest number of natural-gradient steps.
        tolerance: stop where means move by less, in standard deviations of the sites.
        level: whether to find the level of a constant mean function too.
    """
    likelihood, y, x, mean_now, latent, coefficients, total = problem
    mean, is_exact = mean_now(), likelihood.is_gaussian
    reduction, used = 0.0 if is_exact else _STEP_REDUCTION, None
    moved, improved = 0.0, True
    target, precision, loc, variance, gain = start
    sites = target + mean, precision
    if not is_solved:
        prior_variance = latent.variance.expand(variance.shape)
        first_moments = alone(likelihood, y, mean.expand(variance.shape), prior_variance, total)
        loc = latent.start(first_moments[0] - mean)
        sites = gaussian_sites(likelihood, y, *first_moments, total=total)
    early = not is_solved and not is_exact and latent.can_wait
    if early:
        variance = latent.nearby_variance(sites[1])

    def step(target: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, float]:
        nonlocal loc, sites
        loc = latent.posterior_mean(target - mean, precision, loc, tolerance, reduction)
        sites = target, precision
        return mean + latent.at(loc), variance, 0.0 if is_exact else latent.divergence(loc)

    def condition() -> None:
        """Find the posterior of the coefficients of the mean given the sites, and move to its mean."""
        nonlocal gain, mean, loc
        if coefficients.has_posterior:
            gain, shift = coefficients.condition(latent, x, sites[0] - mean - loc, sites[1], total)
            mean, loc = mean_now(), loc - shift

    if not is_exact:  # at new hyperparameters, the old sites are nearer to the solution than the old moments
        step(*sites)
        if not latent.precedes(sites[1]):
            variance = latent.posterior_variance(sites[1])
            used = sites[1] if is_solved else None
    for _ in range(_ROUNDS):
        if max_steps <= 0:
            break
        before = loc, sites
        now = mean + latent.at(loc), variance, 0.0 if is_exact else latent.divergence(loc)
        natural = sites[0] * sites[1], sites[1]
        most = min(_STEPS, max_steps) if improved else max_steps
        steps, moved, improved = natural_gradient(likelihood, y, now, step, most, tolerance, natural, total)
        max_steps -= steps
        if not improved:
            loc, sites = before
            if most == steps and max_steps > 0:  # shorter steps may succeed
                continue
        if not is_exact:  # with the same mean, but without the secants that limited steps
            response = mean + latent.at(loc)
            curvature = gaussian_sites(likelihood, y, response, variance, total=total)[1]
            sites = response + sites[1] / curvature * (sites[0] - response), curvature
        constant = coefficients.level() if level else None
        if constant is not None:  # the best level for these sites: one Newton step, exact
            slope = sites[1] * (sites[0] - mean - latent.at(loc))
            change, shift = latent.level_step(coefficients.free_levels(loc), loc, slope, sites[1], not is_exact)
            coefficients.assign_level(constant + change.reshape(constant.shape))
            mean, loc = mean_now(), loc - shift
        condition()
        if used is not None and _change(sites[1], used, variance, total) < _SAME_SITES * tolerance:
            break
        if early and max_steps > 0:
            variance, early = latent.nearby_variance(sites[1]), False
            continue
        given = latent.posterior_variance(sites[1])
        variance = given if used is None or is_exact else (variance * given).sqrt()
        if not improved or is_exact:
            break
        used = sites[1]
    if latent.exact is not None and used is not None:  # moments of one posterior, whose factor is kept
        variance, of_u = latent.posterior_variance(used), (sites[0] - mean, sites[1])
        sites = mean + latent.targets(loc, used, of_u), used
        condition()
    progress = Progress(moved, improved or max_steps <= 0, not is_solved and used is None)
    return SiteSolution(sites[0] - mean, sites[1], loc, variance, gain), progress


def _change(precision: Tensor, before: Tensor, variance: Tensor, total: Total) -> Tensor:
    """Root mean square of relative changes of precisions, each weighted by what the posterior owes to the site.

    The weight, precision times posterior variance, is at most 1. The bound falls by the square of it at most.
    """
    weight = (before * variance).clamp(max=1.0)
    return average(weight * (precision / before).log().square(), total).sqrt()


def own_data_sites(
    likelihood: Likelihood,
    y: Tensor,
    mean: Float[Tensor, "*L N"],
    loc: Float[Tensor, "*L N"],
    variance: Float[Tensor, "*L N"],
) -> SiteSolution:
    """Sites and moments of points, each given its data alone.

    Args:
        likelihood: p(y | f), bound.
        y: data of the points.
        mean: mean function at the points.
        loc: means of f before the data.
        variance: variances of f before the data.
    """
    loc, variance = alone(likelihood, y, loc, variance)
    target, precision = gaussian_sites(likelihood, y, loc, variance)
    return SiteSolution(target - mean, precision, loc - mean, variance)
