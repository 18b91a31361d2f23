r"""The optimum of a Gaussian q(u), by closed forms instead of gradient steps.

With :math:`\Lambda = (I - A)^\top V^{-1} (I - A)` the precision of the nearest-neighbor prior and Gaussian observations
of u itself, y with noise variances :math:`\sigma_i^2`, the ELBO of :math:`q(u) = N(m, R R^\top)` is largest at

.. math:: P m = \Sigma^{-1} y, \quad P = \Lambda + \Sigma^{-1}, \qquad R_{jj}^2 = 1 / P_{jj}
   \text{ for a diagonal R},

so m is the exact posterior mean under the prior, found by conjugate gradients (with the factor that is optimal on the
nearest neighbors for preconditioner, a sparse approximate inverse), and :math:`R_{jj}^2` the exact conditional
variance of u_j given all the others. The optimum of other R is in :mod:`pyro_nngp.factor_optimum`.

Any other likelihood is met by Gaussian sites (conjugate-computation variational inference, Khan and Lin 2017, eq. 12):
with :math:`\ell = E_{N(m, s)} \log p(y \mid f)` a natural-gradient step of length one replaces the likelihood by an
observation with precision :math:`-2\, \partial \ell / \partial s` at
:math:`m + (\partial \ell / \partial m) / (-2\, \partial \ell / \partial s)`, and the optimum is where these repeat
themselves. For a Gaussian likelihood they are the noise precision and y at once.

Cost: O(N K) per iteration of conjugate gradients and O(N K^2) memory for their preconditioner, which is left out where
that would be gigabytes; up to 2,200 points one dense factorisation instead.
"""

import math
import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.factor_optimum import FactorOptimum
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.prior_precision import PriorPrecision

_SHORTEST, _GROW = 1 / 16, 1.5  # natural-gradient step, and its growth
_DENSE_UP_TO = 2200**2  # entries of the system: one Cholesky factorisation is then quick, and exact
_NEAR, _PAIRS_UP_TO = 8, 2**28  # columns of the preconditioner, and pairs of neighbors that one is worth its memory for
_EASY = 60  # iterations that cost less than that preconditioner
_TINY = torch.finfo(torch.float64).tiny


def variational_optimum(
    likelihood: Likelihood,
    y: Tensor,
    mean: Float[Tensor, " N"],
    w: Float[Tensor, "N K"],
    var: Float[Tensor, " N"],
    neighbors: Int[Tensor, "N K"],
    q: SparseCholeskyNormal,
    max_steps: int = 20,
    tolerance: float = 1e-3,
) -> SparseCholeskyNormal:
    """The optimal q(u) of the family of `q` for any likelihood of f = mean + u.

    Args:
        likelihood: p(y | f), bound.
        y: data, as the likelihood's ``expected_log_prob`` takes them.
        mean: mean function at the points.
        w: weights of the prior's conditionals, 0 where there is no neighbor.
        var: their variances.
        neighbors: rows of the neighbors, -1 padded.
        q: where to start, over all N points.
        max_steps: at most so many steps of :func:`natural_gradient`.
        tolerance: where to stop.
    """
    prior = PriorPrecision(w, var, neighbors)
    factor = _mean_field(prior) if q.is_diagonal else FactorOptimum(prior, q.pattern)
    nearest: FactorOptimum | None = None

    def better(precision: Tensor) -> Callable[[Tensor], Tensor]:
        nonlocal nearest
        nearest = FactorOptimum(prior, neighbors[:, :_NEAR]) if nearest is None else nearest
        return _centered(nearest(precision), neighbors[:, :_NEAR]).covariance_product

    def solve(targets: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal q
        best = _centered(factor(precision), q.pattern)
        again = better if q.is_diagonal and w.numel() * w.shape[1] < _PAIRS_UP_TO else None
        loc = posterior_mean(prior, targets - mean, precision, best.covariance_product, q.loc, better=again)
        q = SparseCholeskyNormal(loc, best.scale.to(loc.dtype), best.weights.to(loc.dtype), q.pattern)
        return mean + loc, q.variance

    natural_gradient(likelihood, y, mean + q.loc, q.variance, solve, max_steps, tolerance)
    return q


def natural_gradient(
    likelihood: Likelihood,
    y: Tensor,
    loc: Float[Tensor, "*L N"],
    var: Float[Tensor, "*L N"],
    solve: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    max_steps: int = 20,
    tolerance: float = 1e-3,
) -> None:
    """Call `solve` with Gaussian sites for the likelihood until sites and posterior agree.

    A Gaussian likelihood takes one step. Others take natural-gradient steps, the first of length one, later ones half
    as long as the one before where they would move the mean farther, down to 1/16, else half as long again, up to one;
    until a step of length one would move it by less than `tolerance` standard deviations.

    Args:
        likelihood: p(y | f), bound.
        y: data, as the likelihood's ``expected_log_prob`` takes them.
        loc: means of f to start from.
        var: variances of f to start from.
        solve: given targets and precisions of Gaussian observations of f, finds q and returns its means and variances
            of f.
        max_steps: at most so many steps.
        tolerance: where to stop.
    """
    shift, precision, length, moved = torch.zeros_like(loc), torch.zeros_like(loc), 1.0, math.inf
    for _ in range(max_steps):
        target, found = gaussian_sites(likelihood, y, loc, var)
        shift, precision = torch.lerp(shift, found * target, length), torch.lerp(precision, found, length)
        before, before_moved = loc, moved
        loc, var = solve(shift / precision, precision)
        moved = float(((loc - before).abs() / var.sqrt()).max()) / length
        if isinstance(likelihood, Gaussian) or moved < tolerance:
            break
        length = min(1.0, length * _GROW) if moved < before_moved else max(length / 2, _SHORTEST)


def gaussian_sites(
    likelihood: Likelihood, y: Tensor, loc: Float[Tensor, "*L N"], var: Float[Tensor, "*L N"]
) -> tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N"]]:
    """Targets and precisions of the Gaussian observations of f that stand for a likelihood at N(loc, var).

    Args:
        likelihood: p(y | f).
        y: data, as the likelihood's ``expected_log_prob`` takes them.
        loc: means of f.
        var: variances of f.

    Returns:
        Targets and positive precisions, of the shape of `loc`. Where the expected log likelihood is not concave, the
        precision is 1e-5 times the inverse variance.
    """
    with torch.enable_grad():
        loc, var = loc.detach().requires_grad_(), var.detach().requires_grad_()
        grad_loc, grad_var = torch.autograd.grad(likelihood.expected_log_prob(y, loc, var).sum(), (loc, var))
    precision = torch.maximum(-2 * grad_var, 1e-5 / var).detach()
    return (loc + grad_loc / precision).detach(), precision


def posterior_mean(
    prior: PriorPrecision,
    y: Float[Tensor, "*L N"],
    precision: Float[Tensor, "*L N"],
    preconditioner: Callable[[Tensor], Tensor],
    start: Float[Tensor, "*L N"] | None = None,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
    better: Callable[[Tensor], Callable[[Tensor], Tensor]] | None = None,
) -> Float[Tensor, "*L N"]:
    """Mean of u given Gaussian observations.

    Args:
        prior: precision of the prior.
        y: observations of u (the mean function subtracted), one set per leading index.
        precision: inverse noise variances.
        preconditioner: product with a rough posterior covariance.
        start: where to start.
        tolerance: on the residual relative to the right-hand side.
        max_iterations: at most so many iterations; where they do not suffice, a warning says so.
        better: makes a preconditioner from `precision` that is worth its price where 60 iterations do not suffice.

    Returns:
        m, in the shape and dtype of `y`.
    """
    dtype = y.dtype
    y, precision = y.double(), precision.double()
    right = precision * y
    if y.numel() * len(prior) <= _DENSE_UP_TO:
        tril = torch.linalg.cholesky(prior.dense() + torch.diag_embed(precision))
        return torch.cholesky_solve(right[..., None], tril)[..., 0].to(dtype)

    m = preconditioner(right) if start is None else start.double().clone()
    residual = right - prior.product(m) - precision * m
    direction = scaled = preconditioner(residual)
    strength = (residual * scaled).sum(-1, keepdim=True)
    for iteration in range(max_iterations):
        if (residual.norm(dim=-1) <= tolerance * right.norm(dim=-1)).all():
            break
        if iteration == _EASY and better is not None:
            preconditioner = better(precision)
            direction = scaled = preconditioner(residual)
            strength = (residual * scaled).sum(-1, keepdim=True)
        image = prior.product(direction) + precision * direction
        step = strength / (direction * image).sum(-1, keepdim=True).clamp(min=_TINY)
        m, residual = m + step * direction, residual - step * image
        scaled = preconditioner(residual)
        strength, before = (residual * scaled).sum(-1, keepdim=True), strength
        direction = scaled + strength / before.clamp(min=_TINY) * direction
    else:
        worst = float((residual.norm(dim=-1) / right.norm(dim=-1)).max())
        warnings.warn(
            f"posterior_mean: conjugate gradients stopped after {max_iterations} iterations at a relative residual of "
            f"{worst:.1e}. The mean of q(u) is not yet at its optimum; a larger jitter would help.",
            stacklevel=2,
        )
    return m.to(dtype)


def _centered(factor: tuple[Tensor, Tensor], pattern: Tensor) -> SparseCholeskyNormal:
    return SparseCholeskyNormal(torch.zeros_like(factor[0]), *factor, pattern)


def _mean_field(prior: PriorPrecision) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What :class:`FactorOptimum` is for an empty pattern: site precisions to the diagonal factor, and no weights."""
    diagonal = prior.diagonal()
    return lambda tau: ((diagonal + tau.double()).rsqrt(), tau[..., None][..., :0])
