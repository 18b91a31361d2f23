r"""Integrals of the softmax over independent normal f, by the Gumbel-max identity: one integral for any C classes.

With independent standard Gumbel noise g, a draw from the softmax is the class with the largest :math:`f_c + g_c`,
and the mean of that maximum is the log-normalizer plus Euler's constant :math:`\gamma`. So

.. math:: p(y = c) = \int F_c'(x) \prod_{j \ne c} F_j(x)\, dx, \qquad
   E \log \sum_j e^{f_j} = \int \big(1\{x > 0\} - \prod_j F_j(x)\big)\, dx - \gamma,

where :math:`F_j(x) = p(f_j + g_j \le x)`, both by the trapezoidal rule in x. The first is the gradient of the second in
the mean of :math:`f_c`, and :math:`\partial F / \partial v = F'' / 2` gives the gradient in its variance.

F is an expectation over the narrower of the two terms of the distribution function of the other:

.. math:: F(x) = E \exp(-e^{f - x}) \;\text{ for a standard deviation } s \le 1.2, \qquad
   F(x) = E\, \Phi\big((x - m - g) / s\big) \;\text{ above},

by the Gauss rules of the normal and of the Gumbel density.

The trapezoidal rule is in u, :math:`x = x_0 + b \sinh u`, :math:`u \ge 0`. No class is narrower than a fifth of the
distance of its mean from the lowest x that matters, :math:`x_0 = \max_c (m_c - 5 s_c - 3)`, so nodes may spread in
proportion to that distance, and one grid suits classes of different variances. At u = 0 the integrands are even.

Cost: O(C) exponentials on a grid of X x R; memory of X C values. Symbols: C classes, X nodes in x, R nodes of the Gauss
rules.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from pyro_nngp._autograd import apply
from pyro_nngp.likelihoods.quadrature import gauss_hermite

_NARROW = 1.2  # standard deviation where both rules are equally accurate
_RANGE = 5.0  # standard deviations of f
_BELOW, _ABOVE = 3.0, 13.0  # the standard Gumbel density has 2e-9 and 2e-6 of its mass beyond them
_FURTHEST = 30.0  # largest f - x; F is 0 there


@functools.lru_cache(maxsize=16)
def gauss_gumbel(
    num_nodes: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, " Q"], Float[Tensor, " Q"]]:
    """Nodes and weights of Q-point Gauss quadrature for the standard Gumbel density; the weights sum to 1.

    Its orthogonal polynomials come from the Stieltjes procedure on a fine grid.

    Reference: Gautschi (2004), "Orthogonal polynomials: computation and approximation", section 2.2.
    """
    x = np.linspace(-5.0, 60.0, 20_001)
    mass = np.exp(-x - np.exp(-x))
    mass /= mass.sum()
    diagonal, beside = np.zeros(num_nodes), np.zeros(num_nodes)
    before, now = np.zeros_like(x), np.ones_like(x)
    for k in range(num_nodes):
        beside[k] = math.sqrt(mass @ now**2)
        now = now / beside[k]
        diagonal[k] = mass @ (x * now**2)
        before, now = now, (x - diagonal[k]) * now - (beside[k] * before if k else 0)
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside[1:], 1) + np.diag(beside[1:], -1))
    with torch.inference_mode(False):
        return (
            torch.as_tensor(nodes, dtype=dtype, device=device),
            torch.as_tensor(vectors[0] ** 2, dtype=dtype, device=device),
        )


def softmax_log_probs(
    loc: Float[Tensor, "C ..."], var: Float[Tensor, "C ..."], num_nodes: int = 48, rule: int = 12
) -> Float[Tensor, "C ..."]:
    """Logarithms of the expected softmax probabilities, accurate for rare classes too.

    Args:
        loc: means of f.
        var: variances of f, of the same shape.
        num_nodes: X.
        rule: R.
    """
    x, step = _grid(loc, var, num_nodes)
    log_cdf, log_density = (part.clamp(min=torch.finfo(loc.dtype).tiny).log() for part in _parts(loc, var, x, rule)[:2])
    return torch.logsumexp(log_cdf.sum(1, keepdim=True) - log_cdf + log_density + step.log(), 0)


def expected_logsumexp(
    loc: Float[Tensor, "C ..."], var: Float[Tensor, "C ..."], num_nodes: int = 32, rule: int = 8
) -> Float[Tensor, "..."]:
    """The expectation of log sum exp f, twice differentiable; arguments as in :func:`softmax_log_probs`."""
    return apply(_ExpectedLogSumExp, loc, var, num_nodes, rule)[0]


class _ExpectedLogSumExp(torch.autograd.Function):
    """Value and gradients in one pass over the nodes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(loc: Tensor, var: Tensor, num_nodes: int, rule: int) -> tuple[Tensor, Tensor, Tensor]:
        return _integrals(loc, var, num_nodes, rule)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        loc, var, ctx.num_nodes, ctx.rule = inputs
        _, slope, curvature = output
        ctx.mark_non_differentiable(slope, curvature)
        ctx.save_for_backward(loc, var, slope, curvature)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        loc, var, *slopes = ctx.saved_tensors
        if torch.is_grad_enabled():  # for gradients of these gradients
            slopes = _integrals(loc, var, ctx.num_nodes, ctx.rule)[1:]
        slope, curvature = slopes
        return grad * slope, grad * curvature / 2, None, None


def _integrals(loc: Tensor, var: Tensor, num_nodes: int, rule: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""E log sum exp f (\*batch), and its first two derivatives in each mean (C, \*batch)."""
    x, step = _grid(loc, var, num_nodes)
    cdf, density, bend = _parts(loc, var, x, rule)
    log_cdf = cdf.clamp(min=torch.finfo(loc.dtype).tiny).log()
    log_product = log_cdf.sum(1, keepdim=True)
    others = step * (log_product - log_cdf).exp()
    value = x[0, 0] - (step * torch.expm1(log_product))[:, 0].sum(0) - np.euler_gamma
    return value, (others * density).sum(0), -(others * bend).sum(0)


@torch.no_grad()
def _grid(loc: Tensor, var: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    r"""Nodes x (X, 1, \*batch) that hold the maximum of f + g, and their weights."""
    spread = _RANGE * var.sqrt()
    low, first = (loc - spread - _BELOW).max(0, keepdim=True)
    near = (spread + _BELOW).gather(0, first)
    far = (loc + spread).amax(0, keepdim=True) + _ABOVE - low
    unit = torch.linspace(0, 1, num_nodes, dtype=loc.dtype, device=loc.device).reshape(-1, *[1] * loc.dim())
    end = torch.asinh(far / near)
    u, step = end * unit, end / (num_nodes - 1) * torch.where(unit == 0, 0.5, 1.0)
    return low + near * u.sinh(), step * near * u.cosh()


def _parts(loc: Tensor, var: Tensor, x: Tensor, rule: int) -> tuple[Tensor, ...]:
    r"""F and its first two derivatives at x, (X, C, \*batch)."""
    narrow = var <= _NARROW**2
    if is_batchedtensor(narrow):  # vmap hides values
        first = _narrow_parts(loc, var.clamp(max=_NARROW**2), x, rule)
        second = _wide_parts(loc, var.clamp(min=_NARROW**2), x, rule)
        return tuple(torch.where(narrow, a, b) for a, b in zip(first, second, strict=True))
    if bool(narrow.all()):
        return _narrow_parts(loc, var, x, rule)
    if not bool(narrow.any()):
        return _wide_parts(loc, var, x, rule)
    x = x.expand(-1, *loc.shape)
    moments = [
        part(loc[chosen], var[chosen], x[:, chosen], rule)
        for part, chosen in ((_narrow_parts, narrow), (_wide_parts, ~narrow))
    ]
    where = narrow.expand(x.shape)
    return tuple(
        torch.empty_like(x).masked_scatter(where, a).masked_scatter(~where, b) for a, b in zip(*moments, strict=True)
    )


def _narrow_parts(loc: Tensor, var: Tensor, x: Tensor, rule: int) -> tuple[Tensor, Tensor, Tensor]:
    nodes, weights = gauss_hermite(rule, loc.dtype, loc.device)
    excess, scale = (loc - x).clamp(max=_FURTHEST).exp(), var.sqrt()
    cdf = first = second = torch.zeros_like(excess)
    for node, weight in zip(nodes, weights, strict=True):  # one node at a time: memory of X C values
        factor = (scale * node).exp()
        term = (-excess * factor).exp()
        slope = weight * factor
        cdf = cdf + weight * term
        first = torch.addcmul(first, term, slope)
        second = torch.addcmul(second, term, slope * factor)
    density = excess * first
    return cdf, density, excess.square() * second - density


def _wide_parts(loc: Tensor, var: Tensor, x: Tensor, rule: int) -> tuple[Tensor, Tensor, Tensor]:
    nodes, weights = gauss_gumbel(rule, loc.dtype, loc.device)
    scale = var.sqrt()
    away = (x - loc) / scale
    cdf = density = bend = torch.zeros_like(away)
    for node, weight in zip(nodes, weights, strict=True):
        z = away - node / scale
        term = weight / math.sqrt(2 * math.pi) * (-z.square() / 2).exp()
        cdf, density, bend = cdf + weight * torch.special.ndtr(z), density + term, torch.addcmul(bend, term, -z)
    return cdf, density / scale, bend / var
