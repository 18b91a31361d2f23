r"""The optimum of a Gaussian q(u), by closed forms instead of gradient steps.

With :math:`\Lambda = (I - A)^\top V^{-1} (I - A)` the precision of the nearest-neighbor prior and Gaussian observations
of u itself, y with noise variances :math:`\sigma_i^2`, the ELBO of :math:`q(u) = N(m, R R^\top)` is largest at

.. math:: P m = \Sigma^{-1} y, \quad P = \Lambda + \Sigma^{-1}, \qquad R_{jj}^2 = 1 / P_{jj}
   \text{ for a diagonal R},

so m is the exact posterior mean under the prior, found by conjugate gradients, and :math:`R_{jj}^2` the exact
conditional variance of u_j given all the others. The optimum of other R is in :mod:`pyro_nngp.factor_optimum`.

The gradients start on P itself with its diagonal for preconditioner, which is quick where the data say more of a value
than its neighbors do, and go on in whitened coordinates (:mod:`pyro_nngp.whitening`), which are quick where the prior
says more.

Any other likelihood is met by Gaussian sites (conjugate-computation variational inference, Khan and Lin 2017, eq. 12):
with :math:`\ell = E_{N(m, s)} \log p(y \mid f)` a natural-gradient step of length one replaces the likelihood by an
observation with precision :math:`-2\, \partial \ell / \partial s` at
:math:`m + (\partial \ell / \partial m) / (-2\, \partial \ell / \partial s)`, and the optimum is where these repeat
themselves. For a Gaussian likelihood they are the noise precision and y at once.

Cost: O(N K) time per iteration of conjugate gradients, O(N K) memory; up to 1,000 points one dense factorisation
instead.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.conjugate_gradients import conjugate_gradients
from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.factor_optimum import FactorOptimum
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.precision import PriorPrecision
from pyro_nngp.whitening import Whitening

_SHORTEST, _GROW = 1 / 16, 1.5  # natural-gradient step, and its growth
_DENSE_UP_TO = 1000**2  # entries of the system: one Cholesky factorisation is then quick, and exact
_EASY = 60  # iterations on P before the change to whitened coordinates


def variational_optimum(
    likelihood: Likelihood,
    y: Tensor,
    mean: Float[Tensor, " N"],
    w: Float[Tensor, "N K"],
    var: Float[Tensor, " N"],
    neighbors: Int[Tensor, "N K"],
    levels: list[Int[Tensor, " _"]],
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
        levels: dependency levels of the neighbors.
        q: where to start, over all N points.
        max_steps: at most so many steps of :func:`natural_gradient`.
        tolerance: where to stop.

    Returns:
        q(u) at its optimum, on the pattern of `q`.

    Reference: Khan, Lin (2017), "Conjugate-computation variational inference", AISTATS.
    """
    prior = PriorPrecision(w, var, neighbors)
    factor = _mean_field(prior) if q.is_diagonal else FactorOptimum(prior, q.pattern)
    white, easy = Whitening(w, var, neighbors, levels), _EASY

    def solve(targets: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal q, easy
        scale, weights = factor(precision)
        loc, easy = posterior_mean(prior, white, targets - mean, precision, q.loc, easy)
        q = SparseCholeskyNormal(loc, scale.to(loc.dtype), weights.to(loc.dtype), q.pattern)
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
        precision is 1e-5 times the inverse variance, or 1e-3 times the average precision if that is less.
    """
    with torch.enable_grad():
        loc, var = loc.detach().requires_grad_(), var.detach().requires_grad_()
        grad_loc, grad_var = torch.autograd.grad(likelihood.expected_log_prob(y, loc, var).sum(), (loc, var))
    average = (-2 * grad_var).clamp(min=0).mean(-1, keepdim=True)
    least = torch.where(average > 0, torch.minimum(1e-5 / var, 1e-3 * average), 1e-5 / var)
    precision = torch.maximum(-2 * grad_var, least).detach()
    return (loc + grad_loc / precision).detach(), precision


def posterior_mean(
    prior: PriorPrecision,
    white: Whitening,
    y: Float[Tensor, "*L N"],
    precision: Float[Tensor, "*L N"],
    start: Float[Tensor, "*L N"],
    easy: int = _EASY,
    tolerance: float = 1e-5,
) -> tuple[Float[Tensor, "*L N"], int]:
    """Mean of u given Gaussian observations.

    Args:
        prior: precision of the prior.
        white: the prior in whitened coordinates.
        y: observations of u (the mean function subtracted), one set per leading index.
        precision: inverse noise variances.
        start: where to start.
        easy: iterations on P; where they do not suffice, those in whitened coordinates follow.
        tolerance: on the residual relative to the right-hand side.

    Returns:
        m, in the shape and dtype of `y`, and the iterations on P that a problem like this one is worth: 0 if they did
        not suffice.
    """
    dtype = y.dtype
    y, precision = y.double(), precision.double()
    right = precision * y
    if y.numel() * len(prior) <= _DENSE_UP_TO:
        tril = torch.linalg.cholesky(prior.dense() + torch.diag_embed(precision))
        return torch.cholesky_solve(right[..., None], tril)[..., 0].to(dtype), easy

    def product(m: Tensor) -> Tensor:
        return prior.product(m) + precision * m

    m, residual = conjugate_gradients(product, right, start.double(), prior.diagonal() + precision, tolerance, easy)
    if residual <= tolerance:
        return m.to(dtype), easy
    z = white.solve(white.color_transposed(right), precision, white.whiten(m), tolerance)
    return white.color(z).to(dtype), 0


def _mean_field(prior: PriorPrecision) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What :class:`FactorOptimum` is for an empty pattern: site precisions to the diagonal factor, and no weights."""
    diagonal = prior.diagonal()
    return lambda tau: ((diagonal + tau.double()).rsqrt(), tau[..., None][..., :0])
