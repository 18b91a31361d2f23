r"""The optimum of a mean-field q(u), by closed forms instead of gradient steps.

With :math:`\Lambda = (I - A)^\top V^{-1} (I - A)` the precision of the nearest-neighbor prior and Gaussian observations
of u itself, y with noise variances :math:`\sigma_i^2`, the ELBO of :math:`q(u) = N(m, \mathrm{diag}\,s)` is largest at

.. math:: (\Lambda + \Sigma^{-1}) m = \Sigma^{-1} y, \qquad s_j = 1 / (\Lambda_{jj} + \sigma_j^{-2}),

so m is the exact posterior mean under the prior, found by conjugate gradients, and s_j the exact conditional variance
of u_j given all the others.

Any other likelihood is met by Gaussian sites (conjugate-computation variational inference, Khan and Lin 2017, eq. 12):
with :math:`\ell = E_{N(m, s)} \log p(y \mid f)` a natural-gradient step of length one replaces the likelihood by an
observation with precision :math:`-2\, \partial \ell / \partial s` at
:math:`m + (\partial \ell / \partial m) / (-2\, \partial \ell / \partial s)`, and the optimum is where these repeat
themselves. For a Gaussian likelihood they are the noise precision and y at once.

Cost: O(N K) per iteration of conjugate gradients, O(N K) memory; up to 2,200 points one dense factorisation.
"""

import math
import warnings

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.likelihoods import Gaussian, Likelihood

_SHORTEST = 1 / 16  # natural-gradient step
_DENSE_UP_TO = 2200**2  # entries of the system: one Cholesky factorisation is then quick, and exact
_TINY = torch.finfo(torch.float64).tiny


def variational_optimum(
    likelihood: Likelihood,
    y: Tensor,
    mean: Float[Tensor, " N"],
    w: Float[Tensor, "N K"],
    var: Float[Tensor, " N"],
    neighbors: Int[Tensor, "N K"],
    loc: Float[Tensor, "*L N"],
    scale: Float[Tensor, "*L N"],
    mean_field: bool = True,
    max_steps: int = 20,
    tolerance: float = 1e-3,
) -> tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N"]]:
    """Mean and standard deviations of the optimal mean-field q(u) for any likelihood of f = mean + u.

    A Gaussian likelihood takes one step. Others take natural-gradient steps, the first of length one, later ones half
    as long and halved again, down to 1/16, whenever they would move the mean farther than the one before; until a step
    of length one would move it by less than `tolerance` standard deviations.

    Args:
        likelihood: p(y | f), bound.
        y: data, as the likelihood's ``expected_log_prob`` takes them.
        mean: mean function at the points.
        w: weights of the prior's conditionals, 0 where there is no neighbor.
        var: their variances.
        neighbors: rows of the neighbors, -1 padded.
        loc: where to start the mean.
        scale: where to start the standard deviations.
        mean_field: False keeps the standard deviations, and finds the mean for those.
        max_steps: at most so many steps.
        tolerance: where to stop.
    """
    shift, precision, length, moved = torch.zeros_like(loc), torch.zeros_like(loc), 1.0, math.inf
    for _ in range(max_steps):
        target, found = gaussian_sites(likelihood, y, mean + loc, scale.square())
        shift, precision = torch.lerp(shift, found * target, length), torch.lerp(precision, found, length)
        before, before_moved = loc, moved
        loc, spread = mean_field_optimum(w, var, neighbors, shift / precision - mean, precision, loc)
        scale = spread if mean_field else scale
        moved = float(((loc - before).abs() / scale).max()) / length
        if isinstance(likelihood, Gaussian) or moved < tolerance:
            break
        if length == 1 or moved >= before_moved:
            length = max(length / 2, _SHORTEST)
    return loc, scale


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
        precision is a thousandth of the inverse variance.
    """
    with torch.enable_grad():
        loc, var = loc.detach().requires_grad_(), var.detach().requires_grad_()
        grad_loc, grad_var = torch.autograd.grad(likelihood.expected_log_prob(y, loc, var).sum(), (loc, var))
    precision = torch.maximum(-2 * grad_var, 1e-3 / var).detach()
    return (loc + grad_loc / precision).detach(), precision


def mean_field_optimum(
    w: Float[Tensor, "N K"],
    var: Float[Tensor, " N"],
    neighbors: Int[Tensor, "N K"],
    y: Float[Tensor, "*L N"],
    precision: Float[Tensor, "*L N"],
    start: Float[Tensor, "*L N"] | None = None,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
) -> tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N"]]:
    """Mean and standard deviation of the optimal mean-field q(u) for Gaussian observations.

    Args:
        w: weights of the prior's conditionals, 0 where there is no neighbor.
        var: their variances.
        neighbors: rows of the neighbors, -1 padded.
        y: observations of u (the mean function subtracted), one set per leading index.
        precision: inverse noise variances.
        start: where to start m.
        tolerance: on the residual relative to the right-hand side.
        max_iterations: at most so many iterations; where they do not suffice, a warning says so.

    Returns:
        m and standard deviations, in the shape and dtype of `y`.
    """
    dtype = y.dtype
    w, var, y, precision = w.double(), var.double(), y.double(), precision.double()
    columns = neighbors.clamp(min=0)
    diagonal = precision + (1 / var).scatter_add(0, columns.flatten(), (w.square() / var[:, None]).flatten())

    if y.numel() * len(var) <= _DENSE_UP_TO:
        residuals = torch.eye(len(var), dtype=w.dtype, device=w.device).scatter_add(-1, columns, -w)
        system = residuals.mT @ (residuals / var[:, None]) + torch.diag_embed(precision)
        m = torch.cholesky_solve((precision * y)[..., None], torch.linalg.cholesky(system))[..., 0]
        return m.to(dtype), diagonal.rsqrt().to(dtype)

    def product(m: Tensor) -> Tensor:
        r = (m - (w * m[..., columns]).sum(-1)) / var
        pulled = torch.zeros_like(m).index_add_(-1, columns.flatten(), (w * r[..., None]).flatten(-2))
        return r - pulled + precision * m

    right = precision * y
    m = right / diagonal if start is None else start.double().clone()
    residual = right - product(m)
    direction = scaled = residual / diagonal
    strength = (residual * scaled).sum(-1, keepdim=True)
    for _ in range(max_iterations):
        if (residual.norm(dim=-1) <= tolerance * right.norm(dim=-1)).all():
            break
        image = product(direction)
        step = strength / (direction * image).sum(-1, keepdim=True).clamp(min=_TINY)
        m, residual = m + step * direction, residual - step * image
        scaled = residual / diagonal
        strength, before = (residual * scaled).sum(-1, keepdim=True), strength
        direction = scaled + strength / before.clamp(min=_TINY) * direction
    else:
        worst = float((residual.norm(dim=-1) / right.norm(dim=-1)).max())
        warnings.warn(
            f"mean_field_optimum: conjugate gradients stopped after {max_iterations} iterations at a relative residual "
            f"of {worst:.1e}. The mean of q(u) is not yet at its optimum; a larger jitter would help.",
            stacklevel=2,
        )
    return m.to(dtype), diagonal.rsqrt().to(dtype)
