r"""The optimum of a Gaussian q(u), by closed forms instead of gradient steps.

With :math:`\Lambda = (I - A)^\top V^{-1} (I - A)` the precision of the nearest-neighbor prior and Gaussian observations
of u itself, y with noise variances :math:`\sigma_i^2`, the ELBO of :math:`q(u) = N(m, R R^\top)` is largest at

.. math:: P m = \Sigma^{-1} y, \quad P = \Lambda + \Sigma^{-1}, \qquad R_{jj}^2 = 1 / P_{jj}
   \text{ for a diagonal R},

so m is the exact posterior mean under the prior, found by conjugate gradients, and :math:`R_{jj}^2` the exact
conditional variance of u_j given all the others. The optimum of other R is in
:mod:`pyro_nngp.variational.sparse_factor`.

The gradients start on P itself with its diagonal for preconditioner, which is quick where the data say more of a value
than its neighbors do, and go on in whitened coordinates (:mod:`pyro_nngp.linalg.whitening`), which are quick where the
prior says more, as soon as 20 iterations no longer halve the residual. With G the root of the prior's covariance, an
approximate mean with the residual r costs the ELBO

.. math:: \tfrac12 r^\top P^{-1} r \le \tfrac12 \| G^\top r \|^2

nats, whatever the units of data and kernel. So :math:`\| G^\top r \| / \sqrt N` is what a tolerance bounds.

Any other likelihood is met by Gaussian sites (conjugate-computation variational inference, Khan and Lin 2017, eq. 12):
with :math:`\ell = E_{N(m, s)} \log p(y \mid f)` a natural-gradient step of length one replaces the likelihood by an
observation with precision :math:`-2\, \partial \ell / \partial s` at
:math:`m + (\partial \ell / \partial m) / (-2\, \partial \ell / \partial s)`, and the optimum is where these repeat
themselves. For a Gaussian likelihood they are the noise precision and y at once. The equations of one step are solved
only as well as the next one needs: the residual goes down to a tenth. A factor with off-diagonal entries, which costs
more than a step, is found again when the means stand still for the one before, until the sites no longer ask for it.

Cost: O(N K) time per iteration of conjugate gradients, O(N K) memory; up to 1,000 points one dense factorization
instead. Numbers are in ``benchmarks/results/npvi.md``.
"""

import math
import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.linalg import PriorPrecision, Whitening
from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients
from pyro_nngp.variational.sparse_factor import FactorOptimum

_SHORTEST, _GROW = 1 / 16, 1.5  # natural-gradient step, and its growth
_DENSE_UP_TO = 1000**2  # entries of the system: one Cholesky factorization is then quick, and exact
_EASY = 200  # iterations on P at most, before the change to whitened coordinates
_LOOK = 20  # of them between looks at the residual
_STEP_REDUCTION = 0.1  # of the residual in a natural-gradient step
_RELATIVE = 1e-3  # units of the residual are at least this part of the right-hand side: rounding stops it in time
_SAME_SITES = 10  # tolerances by which the sites' precisions may differ from those that the factor is for
_FAR = 0.1  # units that the last natural-gradient step may have moved means without a warning


def variational_optimum(
    likelihood: Likelihood,
    y: Tensor,
    mean: Float[Tensor, "... N"],
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
        mean: mean function at the points, the same for all latent functions or one for each.
        w: weights of the prior's conditionals, 0 where there is no neighbor.
        var: their variances.
        neighbors: rows of the neighbors, -1 padded.
        levels: dependency levels of the neighbors.
        q: where to start, over all N points.
        max_steps: at most so many steps of :func:`natural_gradient`.
        tolerance: where to stop; the mean costs the bound at most tolerance^2 / 2 nats per point then.

    Returns:
        q(u) at its optimum, on the pattern of `q`. A warning says so where `max_steps` or the iterations of conjugate
        gradients did not suffice.

    Reference: Khan, Lin (2017), "Conjugate-computation variational inference", AISTATS.
    """
    prior, white = PriorPrecision(w, var, neighbors), Whitening(w, var, neighbors, levels)
    factor = _mean_field(prior) if q.is_diagonal else FactorOptimum(prior, q.pattern)
    one_step = isinstance(likelihood, Gaussian)
    easy, precision, used, moved = True, q.loc, None, 0.0

    def solve(targets: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal q, easy, precision
        reduction = 0.0 if one_step else _STEP_REDUCTION
        loc, easy = posterior_mean(prior, white, targets - mean, now, q.loc, easy, tolerance, reduction)
        precision, q = now, SparseCholeskyNormal(loc, q.scale, q.weights, q.pattern)
        if q.is_diagonal:
            q = _with_factor(q, *factor(now))
        return mean + loc, q.variance

    while max_steps > 0:
        steps, moved = natural_gradient(likelihood, y, mean + q.loc, q.variance, solve, max_steps, tolerance)
        max_steps -= steps
        known = used is not None and (precision / used).log().square().mean().sqrt() < _SAME_SITES * tolerance
        if q.is_diagonal or known:
            break
        q, used = _with_factor(q, *factor(precision)), precision
        if one_step:
            break
    if moved > _FAR and not one_step:
        warnings.warn(
            f"variational_optimum: means still moved by {moved:.1e} in the last natural-gradient step, in units of the "
            "likelihood's resolution. Give solve() more max_steps, or call it again: it goes on from here.",
            stacklevel=2,
        )
    return q


def _with_factor(q: SparseCholeskyNormal, scale: Tensor, weights: Tensor) -> SparseCholeskyNormal:
    return SparseCholeskyNormal(q.loc, scale.to(q.loc.dtype), weights.to(q.loc.dtype), q.pattern)


def natural_gradient(
    likelihood: Likelihood,
    y: Tensor,
    loc: Float[Tensor, "*L N"],
    var: Float[Tensor, "*L N"],
    solve: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    max_steps: int = 20,
    tolerance: float = 1e-3,
) -> tuple[int, float]:
    """Call `solve` with Gaussian sites for the likelihood until sites and posterior agree.

    A Gaussian likelihood takes one step. Others take natural-gradient steps, the first of length one, later ones half
    as long as the one before where they would move the mean farther, down to 1/16, else half as long again, up to one;
    until a step of length one would move it by less than `tolerance`, in the root mean square and in units of what the
    likelihood resolves, the standard deviations of the sites.

    Args:
        likelihood: p(y | f), bound.
        y: data, as the likelihood's ``expected_log_prob`` takes them.
        loc: means of f to start from.
        var: variances of f to start from.
        solve: given targets and precisions of Gaussian observations of f, finds q and returns its means and variances
            of f.
        max_steps: at most so many steps.
        tolerance: where to stop.

    Returns:
        Number of steps, and how far the last one would have moved the mean at length one.
    """
    shift, precision, length, moved, steps = torch.zeros_like(loc), torch.zeros_like(loc), 1.0, math.inf, 0
    while steps < max_steps:
        target, found = gaussian_sites(likelihood, y, loc, var)
        shift, precision = torch.lerp(shift, found * target, length), torch.lerp(precision, found, length)
        before, before_moved = loc, moved
        loc, var = solve(shift / precision, precision)
        moved, steps = float(((loc - before).square() * precision).mean().sqrt()) / length, steps + 1
        if isinstance(likelihood, Gaussian) or moved < tolerance:
            break
        length = min(1.0, length * _GROW) if moved < before_moved else max(length / 2, _SHORTEST)
    return steps, moved


def gaussian_sites(
    likelihood: Likelihood,
    y: Tensor,
    loc: Float[Tensor, "*L N"],
    var: Float[Tensor, "*L N"],
    differentiable: bool = False,
) -> tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N"]]:
    """Targets and precisions of the Gaussian observations of f that stand for a likelihood at N(loc, var).

    Args:
        likelihood: p(y | f).
        y: data, as the likelihood's ``expected_log_prob`` takes them.
        loc: means of f.
        var: variances of f.
        differentiable: whether gradients with respect to the likelihood's parameters are wanted.

    Returns:
        Targets and positive precisions, of the shape of `loc`. Where the expected log likelihood is not concave, the
        precision is 1e-5 times the inverse variance, or 1e-3 times the average precision if that is less.
    """
    differentiable = differentiable and torch.is_grad_enabled()
    with torch.enable_grad():
        loc, var = loc.detach().requires_grad_(), var.detach().requires_grad_()
        value = likelihood.expected_log_prob(y, loc, var).sum()
        grad_loc, grad_var = torch.autograd.grad(value, (loc, var), create_graph=differentiable)
    loc, var = loc.detach(), var.detach()
    if not differentiable:
        grad_loc, grad_var = grad_loc.detach(), grad_var.detach()
    average = (-2 * grad_var).clamp(min=0).mean(-1, keepdim=True).detach()
    least = torch.where(average > 0, torch.minimum(1e-5 / var, 1e-3 * average), 1e-5 / var)
    precision = torch.maximum(-2 * grad_var, least)
    return loc + grad_loc / precision, precision


def posterior_mean(
    prior: PriorPrecision,
    white: Whitening,
    y: Float[Tensor, "*L N"],
    precision: Float[Tensor, "*L N"],
    start: Float[Tensor, "*L N"],
    easy: bool = True,
    tolerance: float = 1e-3,
    reduction: float = 0.0,
) -> tuple[Float[Tensor, "*L N"], bool]:
    """Mean of u given Gaussian observations.

    Args:
        prior: precision of the prior.
        white: the prior in whitened coordinates.
        y: observations of u (the mean function subtracted), one set per leading index.
        precision: inverse noise variances.
        start: where to start.
        easy: whether to begin with iterations on P.
        tolerance: on the residual: m costs the ELBO at most tolerance^2 / 2 nats per point. With data so exact that
            rounding is in the way, on 1,000 times the residual relative to that at m = 0.
        reduction: stop also where the residual is this part of that at the start.

    Returns:
        m, in the shape and dtype of `y`, and whether iterations on P are worthwhile for a problem like this one.
    """
    dtype = y.dtype
    y, precision, start = y.double(), precision.double(), start.double()
    right = precision * y
    if y.numel() * len(prior) <= _DENSE_UP_TO:
        tril = torch.linalg.cholesky(prior.dense() + torch.diag_embed(precision))
        return torch.cholesky_solve(right[..., None], tril)[..., 0].to(dtype), easy

    def product(m: Tensor) -> Tensor:
        return prior.product(m) + precision * m

    def norm(residual: Tensor) -> Tensor:
        return white.color_transposed(residual).norm(dim=-1)

    size = torch.clamp(_RELATIVE * norm(right), min=len(prior) ** 0.5)
    if reduction:
        tolerance = max(tolerance, reduction * float((norm(right - product(start)) / size).max()))
    if easy:
        diagonal = prior.diagonal() + precision
        start, left = conjugate_gradients(
            product, right, start, diagonal, tolerance, _EASY, norm=norm, size=size, every=_LOOK, halving=True
        )
        if left <= tolerance:
            return start.to(dtype), True
    z = white.solve(white.color_transposed(right), precision, white.whiten(start), tolerance, size=size)
    return white.color(z).to(dtype), False


def _mean_field(prior: PriorPrecision) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What :class:`FactorOptimum` is for an empty pattern: site precisions to the diagonal factor, and no weights."""
    diagonal = prior.diagonal()
    return lambda tau: ((diagonal + tau.double()).rsqrt(), tau[..., None][..., :0])
