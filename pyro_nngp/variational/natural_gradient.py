r"""The optimum of a Gaussian q(u), by closed forms instead of gradient steps.

With :math:`\Lambda = (I - A)^\top V^{-1} (I - A)` the precision of the nearest-neighbor prior and Gaussian observations
of u itself, y with noise variances :math:`\sigma_i^2`, the ELBO of :math:`q(u) = N(m, R R^\top)` is largest at

.. math:: P m = \Sigma^{-1} y, \quad P = \Lambda + \Sigma^{-1}, \qquad R_{jj}^2 = 1 / P_{jj}
   \text{ for a diagonal R},

so m is the exact posterior mean under the prior (:mod:`pyro_nngp.variational.posterior_mean`), and :math:`R_{jj}^2` the
exact conditional variance of u_j given all the others. The optimum of other R is in
:mod:`pyro_nngp.variational.sparse_factor`.

Any other likelihood is replaced by Gaussian sites (conjugate-computation variational inference, Khan and Lin 2017, eq.
12): with :math:`\ell = E_{N(m, s)} \log p(y \mid f)` a natural-gradient step of length one replaces the likelihood by
an observation with precision :math:`-2\, \partial \ell / \partial s` at :math:`m + (\partial \ell / \partial m) / (-2\,
\partial \ell / \partial s)`, and the optimum is a fixed point of this step. For a Gaussian likelihood the sites are y
and the noise precision. The equations of a step are solved only as accurately as the next step needs: until the
residual falls to a tenth. A factor with off-diagonal entries, which costs more than a step, is recomputed after the
means converge, until the site precisions stop changing.

Cost: O(N K) time per iteration of conjugate gradients, O(N K) memory; up to 1,000 points one dense factorization
instead. Numbers are in ``benchmarks/results/npvi.md``.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import warn
from pyro_nngp.distributed.factor import ShardedFactor
from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.variational.posterior_mean import posterior_mean
from pyro_nngp.variational.sharded_optimum import ShardedFactorOptimum
from pyro_nngp.variational.sparse_factor import FactorOptimum

_SHORTEST, _GROW = 1 / 16, 1.5  # natural-gradient step, and its growth
_STEP_REDUCTION = 0.1  # of the residual in a natural-gradient step
_SAME_SITES = 10  # change of the sites' precisions, in tolerances, below which the factor is kept
_SECANT = 1e-4  # squared moves, in units of the variance, below which a secant is mostly rounding error
_FAR = 0.1  # units that the last natural-gradient step may move means without a warning


def whole(part: Tensor) -> Tensor:
    """The sum over the data where all of them are here."""
    return part


Total: TypeAlias = Callable[[Tensor], Tensor]
"""The sum over the data of all processes from the sum over the data of this one."""


def variational_optimum(
    likelihood: Likelihood,
    y: Tensor,
    mean: Float[Tensor, "... N"],
    factor: VecchiaFactor | ShardedFactor,
    q: SparseCholeskyNormal,
    max_steps: int = 20,
    tolerance: float = 1e-3,
    total: Total = whole,
) -> SparseCholeskyNormal:
    """The optimal q(u) of the family of `q` for any likelihood of f = mean + u.

    Args:
        likelihood: p(y | f), bound.
        y: data, as the likelihood's ``expected_log_prob`` takes them.
        mean: mean function at the points, one for all latent functions or one for each.
        factor: (I - A, V) of the prior, of all points or of local rows on several processes.
        q: the start, over all N points.
        max_steps: largest number of steps of :func:`natural_gradient`.
        tolerance: stop when the error of the mean costs the bound at most tolerance^2 / 2 nats per point.
        total: as of :func:`natural_gradient`; other than the default for local rows.

    Returns:
        q(u) at its optimum, on the pattern of `q`. Warns if `max_steps` or the iterations of conjugate gradients did
        not suffice.

    Reference: Khan, Lin (2017), "Conjugate-computation variational inference", AISTATS.
    """
    prior = factor if isinstance(factor, ShardedFactor) else factor.prepared()
    root = _mean_field(prior) if q.is_diagonal else _factor_optimum(prior, q.pattern)
    one_step, first = likelihood.is_gaussian, not bool(total(q.loc.abs().sum()))
    diagonal = prior.diagonal()
    precision, used, moved, improved = q.loc, None, 0.0, True

    def divergence() -> float:
        """KL of q from the prior, up to a constant while the factor of q is fixed."""
        value = (q.loc * prior.product(q.loc.double())).sum()
        if q.is_diagonal:
            value = value + (diagonal * q.variance - q.variance.log()).sum()
        return float(total(value)) / 2

    def solve(targets: Tensor, now: Tensor) -> tuple[Tensor, Tensor, float]:
        nonlocal q, precision
        reduction = 0.0 if one_step else _STEP_REDUCTION
        loc = posterior_mean(prior, targets - mean, now, q.loc, tolerance, reduction)
        precision, q = now, SparseCholeskyNormal(loc, q.scale, q.weights, q.pattern)
        if q.is_diagonal:
            q = _with_factor(q, *root(now))
        return mean + loc, q.variance, 0.0 if one_step else divergence()

    while max_steps > 0:
        start = (mean + q.loc, q.variance, 0.0 if one_step else divergence())
        before = q
        steps, moved, improved = natural_gradient(likelihood, y, start, solve, max_steps, tolerance, total=total)
        max_steps -= steps
        if not improved:
            q = before
            break
        if q.is_diagonal or (used is not None and same_sites(precision, used, _SAME_SITES * tolerance, total)):
            break
        q, used = _with_factor(q, *root(precision)), precision
        if one_step:
            break
    if not one_step:
        warn_unsettled("variational_optimum", moved, improved or max_steps <= 0, first)
    return q


def same_sites(precision: Tensor, before: Tensor, tolerance: float, total: Total = whole) -> bool:
    """Whether precisions of sites changed by less than a relative tolerance, in root mean square."""
    return bool(average((precision / before).log().square(), total).sqrt() < tolerance)


def warn_unsettled(where: str, moved: float, began: bool, first: bool) -> None:
    """Warn if no natural-gradient step succeeded, or steps ended too early.

    Args:
        where: name of the caller.
        moved: how far a last step of length one would have moved means, from :func:`natural_gradient`.
        began: whether any step raised the bound, or there were too few to know.
        first: whether this is the first solution.
    """
    if not began and first:
        warn(
            f"{where}: expected some natural-gradient step from the start to raise the bound, got none of any length. "
            "Check expected_log_prob of the likelihood and its gradient, or train q(u) by gradients: "
            "fit(..., solve_every=0)."
        )
    if began and moved > _FAR:
        warn(
            f"{where}: means still moved by {moved:.1e} in the last natural-gradient step, in units of the "
            "likelihood's resolution. Give solve() more max_steps, or call it again to continue."
        )


def _with_factor(q: SparseCholeskyNormal, scale: Tensor, weights: Tensor) -> SparseCholeskyNormal:
    return SparseCholeskyNormal(q.loc, scale.to(q.loc.dtype), weights.to(q.loc.dtype), q.pattern)


def natural_gradient(
    likelihood: Likelihood,
    y: Tensor,
    start: tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N"], float],
    solve: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, float]],
    max_steps: int = 20,
    tolerance: float = 1e-3,
    sites: tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N"]] | None = None,
    total: Total = whole,
) -> tuple[int, float, bool]:
    """Call `solve` with Gaussian sites for the likelihood until sites and posterior agree.

    A Gaussian likelihood takes one step. Others take natural-gradient steps. The first has length one. The length
    halves, down to 1/16, after a step that moves the mean farther than the one before, and else grows by half, up to
    one. Steps end when one of length one would move the mean by less than `tolerance`, in root mean square and in units
    of the standard deviations of the sites.

    A step that lowers the bound is taken back and repeated at half the length. The precision of a site is at least the
    secant of the gradient over the last trial: the curvature at a point does not show a kink (Laplace) or the far side
    of a mode (Student-t) that a step would cross. The secant does not move the optimum of
    the means, and it tends to the curvature as steps get short.

    Args:
        likelihood: p(y | f), bound.
        y: data, as the likelihood's ``expected_log_prob`` takes them.
        start: means and variances of f to start from, and the divergence of q from the prior there.
        solve: given targets and precisions of Gaussian observations of f, finds q and returns its means and variances
            of f, and its divergence from the prior, up to a constant.
        max_steps: largest number of steps.
        tolerance: stop when a step moves means by less, see above.
        sites: products of targets and precisions, and precisions, whose posterior is `start`, so that short steps lead
            away from it. None means no sites: `start` is the prior.
        total: the sum over the data of all processes from that over the present N.

    Returns:
        Number of steps, how far the last one would have moved the mean at length one, and whether any raised the
        bound; if none did, the caller has to restore q.
    """
    loc, var, divergence = start
    shift, precision = (torch.zeros_like(loc), torch.zeros_like(loc)) if sites is None else sites
    length, moved, steps = 1.0, math.inf, 0
    if likelihood.is_gaussian:
        target, new_precision = gaussian_sites(likelihood, y, loc, var, total=total)
        loc_new, _, _ = solve(target, new_precision)
        return 1, float(average((loc_new - loc).square() * new_precision, total).sqrt()), True
    gradient, curvature, value = _expectation_gradients(likelihood, y, loc, var, total=total)
    count = float(total(loc.new_tensor(float(loc.numel()))))
    bound, secant, improved, rejected = value - divergence, torch.zeros_like(loc), False, False
    while steps < max_steps and length >= _SHORTEST / 64:
        step = torch.maximum(floored(curvature, var, total), secant)
        trial_shift = torch.lerp(shift, step * loc + gradient, length)
        trial_precision = torch.lerp(precision, step, length)
        new_loc, new_var, divergence = solve(trial_shift / trial_precision, trial_precision)
        new_gradient, new_curvature, value = _expectation_gradients(likelihood, y, new_loc, new_var, total=total)
        steps, moves = steps + 1, new_loc - loc
        measurable = moves.square() > _SECANT * var
        secant = torch.where(measurable, (gradient - new_gradient) / torch.where(measurable, moves, 1), 0).clamp(min=0)
        slack = tolerance**2 * count + 1e-6 * abs(bound)
        rejected = not value - divergence >= bound - slack
        if rejected:
            length /= 2
            continue
        before_moved, moved = moved, float(average(moves.square() * trial_precision, total).sqrt()) / length
        loc, var, gradient, curvature, bound = new_loc, new_var, new_gradient, new_curvature, value - divergence
        shift, precision, improved = trial_shift, trial_precision, True
        if moved < tolerance:
            break
        length = min(1.0, length * _GROW) if moved < before_moved else max(length / 2, _SHORTEST)
    if rejected and improved:
        solve(shift / precision, precision)
    return steps, moved, improved


def gaussian_sites(
    likelihood: Likelihood,
    y: Tensor,
    loc: Float[Tensor, "*L N"],
    var: Float[Tensor, "*L N"],
    differentiable: bool = False,
    total: Total = whole,
) -> tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N"]]:
    """Targets and precisions of the Gaussian observations of f that replace a likelihood at N(loc, var).

    Args:
        likelihood: p(y | f).
        y: data, as the likelihood's ``expected_log_prob`` takes them.
        loc: means of f.
        var: variances of f.
        differentiable: whether to keep gradients with respect to the likelihood's parameters.
        total: as of :func:`natural_gradient`.

    Returns:
        Targets and positive precisions, of the shape of `loc`. Precisions are at least 1e-5 times the inverse variance,
        or 1e-3 times the average precision if that is less: the expected log likelihood need not be concave. Precisions
        of Gaussian data are exact, however much noise variances differ.
    """
    keep = differentiable and torch.is_grad_enabled()
    gradient, curvature, _ = _expectation_gradients(likelihood, y, loc, var, keep)
    precision = floored(curvature, var.detach(), total)
    if likelihood.is_gaussian:  # only a datum that is missing has no curvature
        precision = torch.where(curvature > 0, curvature, precision)
    return loc.detach() + gradient / precision, precision


def floored(
    curvature: Float[Tensor, "*L N"], var: Float[Tensor, "*L N"], total: Total = whole
) -> Float[Tensor, "*L N"]:
    """Positive precisions of sites: see :func:`gaussian_sites`."""
    typical = average(curvature.detach().clamp(min=0), total, -1)
    least = torch.where(typical > 0, torch.minimum(1e-5 / var, 1e-3 * typical), 1e-5 / var)
    return torch.maximum(curvature, least)


def _expectation_gradients(
    likelihood: Likelihood, y: Tensor, loc: Tensor, var: Tensor, differentiable: bool = False, total: Total = whole
) -> tuple[Tensor, Tensor, float]:
    """Gradient and negative curvature of the expected log likelihood in the means of f, and its sum over the data."""
    with torch.enable_grad():
        loc, var = loc.detach().requires_grad_(), var.detach().requires_grad_()
        value = likelihood.expected_log_prob(y, loc, var)
        value = (value if likelihood.weights is None else likelihood.weights * value).sum()
        gradient, grad_var = torch.autograd.grad(value, (loc, var), create_graph=differentiable)
    if not differentiable:
        gradient, grad_var = gradient.detach(), grad_var.detach()
    return gradient, -2 * grad_var, float(total(value.detach()))


def average(values: Tensor, total: Total = whole, dim: int | None = None) -> Tensor:
    """The mean over the data of all processes: over everything, or along a dimension, which is kept."""
    if total is whole:
        return values.mean() if dim is None else values.mean(dim, keepdim=True)
    count = values.new_tensor(float(values.numel() if dim is None else values.shape[dim]))
    added = values.sum() if dim is None else values.sum(dim, keepdim=True)
    return total(added) / total(count)


def _factor_optimum(
    prior: VecchiaFactor | ShardedFactor, pattern: Int[Tensor, "N P"]
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return ShardedFactorOptimum(prior, pattern) if isinstance(prior, ShardedFactor) else FactorOptimum(prior, pattern)


def _mean_field(prior: VecchiaFactor | ShardedFactor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The counterpart of :class:`FactorOptimum` for an empty pattern: maps site precisions to a diagonal factor."""
    diagonal = prior.diagonal()
    return lambda tau: ((diagonal + tau.double()).rsqrt(), tau[..., None][..., :0])
