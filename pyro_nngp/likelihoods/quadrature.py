r"""Expectations under a standard normal variable t: fixed nodes for smooth integrands, moving ones for sharp ones.

* :func:`gauss_hermite`: :math:`E\, g(t) \approx \sum_q w_q g(t_q)`, exact for polynomials of degree below 2Q.
* :func:`normal_nodes`: equally weighted quasi-random nodes in C dimensions.
* :func:`expectation`: :math:`E\, g(t)` for a log-density g, which may have a kink or a narrow dip anywhere.
* :func:`log_expectation`: :math:`\log E \exp g(f)` for a normal f, where :math:`\exp g` may be much narrower than its
  density (the likelihood of a count of 1000 under a vague latent), so that fixed nodes would miss it.

The last two try 24 Gauss-Hermite nodes first. Their values give the Hermite coefficients of the integrand below order
24; where the highest four are small in every element of the batch, so is the error (about their square if they fall
geometrically), and the sum is the answer. Otherwise they use the trapezoidal rule in a variable u that concentrates
the nodes around one place c, the focus,

.. math:: t = c + L \,\mathrm{asinh}\big(\tfrac{a}{L} \sinh u\big),

with spacing proportional to a near c, to the distance from c between a and L, and to L further out, where it has to
resolve the normal density only. A feature of width a thus costs :math:`O(\log L / a)` nodes, and the error falls
geometrically in their number. If c and a are not given, a search without gradients finds them: it locates the largest
fourth difference of g on a grid, which is small for smooth functions, and repeats that on finer grids around it.

Differs from the sinh transformation of Johnston and Elliott (2005), which grows without bound away from c: its outer
nodes miss the normal density when c lies in a tail.

Cost: stated per function. Symbols: Q nodes, C latent dimensions, L a tenth of the window of t.

Reference: Johnston, Elliott (2005), "A sinh transformation for evaluating nearly singular boundary element integrals",
International Journal for Numerical Methods in Engineering.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from pyro_nngp.linalg import cholesky, half_solve

_HERMITE_NODES, _HERMITE_TAIL = 24, 4
_SMOOTH = 2e-4  # largest coefficient of the tail, of the norm of all: relative errors below 1e-4
_WINDOW_ROUNDS, _WINDOW_NODES, _NODES = 4, 24, 64
_START = 9.0  # first window of log_expectation: the normal density is e^-40 at its ends
_RANGE = 8.0  # window of expectation: the normal density is 1e-14 of its peak at its ends
_DROP = 30.0  # nodes whose log-integrand is further than this below the largest are outside the window
_FOCUS_ROUNDS, _FOCUS_NODES = 5, 17
_FOCUS_WEIGHT = 4e-5  # a focus lies where the weight is at least this part of its maximum
_FURTHEST = 4.5  # |t| at which the normal density has this weight
_BROAD = 1.2  # functions whose singularities are further off the real axis, in sd, suit Gauss-Hermite quadrature
_SHARP = 0.5  # features of a smaller scale stay where they are when the mean and variance of f move
_KINK = 1 / 8  # of the finest spacing of the search, the scale of a feature that it did not resolve

Focus: TypeAlias = tuple[Tensor, Tensor]
"""Center of the sharpest feature of an integrand, and its scale: the distance of the nearest singularity (a kink, a
pole or branch point in the complex plane) from the real axis, or less."""

BRANCH = 2.7
"""Distance of the singularities of log Phi from the real axis, a little less than the sigmoid's (pi)."""


def at_zero(y: Tensor) -> Focus:
    """The focus of sigmoid and softplus, whose logarithms bend at 0 and have their nearest branch points above it."""
    return torch.zeros((), device=y.device), torch.full((), BRANCH, device=y.device)


@functools.lru_cache(maxsize=64)
def gauss_hermite(
    num_nodes: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, " Q"], Float[Tensor, " Q"]]:
    """Nodes and weights of Q-point Gauss-Hermite quadrature for the standard normal density; the weights sum to 1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    with torch.inference_mode(False):
        return (
            torch.as_tensor(nodes, dtype=dtype, device=device),
            torch.as_tensor(weights / weights.sum(), dtype=dtype, device=device),
        )


@functools.lru_cache(maxsize=64)
def _hermite_tail(dtype: torch.dtype, device: torch.device) -> Float[Tensor, "H Q"]:
    """Rows that map values at the Gauss-Hermite nodes to the highest coefficients in normalized Hermite polynomials."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_HERMITE_NODES)
    orders = np.arange(_HERMITE_NODES - _HERMITE_TAIL, _HERMITE_NODES)
    norms = np.array([math.sqrt(math.factorial(order)) for order in orders])
    values = np.polynomial.hermite_e.hermevander(nodes, _HERMITE_NODES - 1)[:, orders] / norms
    with torch.inference_mode(False):
        return torch.as_tensor(values.T * (weights / weights.sum()), dtype=dtype, device=device)


@functools.lru_cache(maxsize=64)
def normal_nodes(num_dims: int, num_nodes: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "C Q"]:
    """Q fixed quasi-random nodes of a C-dimensional standard normal, for equally weighted means.

    Scrambled Sobol points and their negatives, transformed to unit covariance: exact for polynomials of degree 3 (for
    more dimensions than half the nodes: of odd degree). The remaining error is a fixed bias, not noise.
    """
    with torch.inference_mode(False):
        engine = torch.quasirandom.SobolEngine(num_dims, scramble=True, seed=0)
        half = torch.special.ndtri(engine.draw((num_nodes + 1) // 2, dtype=torch.float64).clamp(1e-10)).mT
        if half.shape[1] > num_dims:
            root = cholesky(half @ half.mT / half.shape[1], 0.0)
            half = half_solve(root, half)
        return torch.cat([half, -half], -1).to(dtype=dtype, device=device)


def expectation(
    function: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    num_nodes: int = 48,
    focus: Focus | None = None,
) -> Float[Tensor, "..."]:
    r"""The expectation of g(t) over a standard normal t, elementwise.

    The gradient is the gradient of the rule with its nodes held fixed.

    Args:
        function: g, from t of shape (Q, \*shape) to values of that shape, with one kink or narrow feature at most.
        shape: shape of the result.
        dtype: dtype of t.
        device: device of t.
        num_nodes: Q, for integrands that are not smooth.
        focus: center and scale of the sharpest feature of g, of the shape of the result; None finds them.

    Returns:
        Tensor of the given shape.

    Cost: 24 evaluations of g per element if it is smooth throughout the batch. Otherwise Q more, and 85 without
    gradient where the focus has to be computed.
    """
    nodes, weights = gauss_hermite(_HERMITE_NODES, dtype, device)
    nodes = nodes.reshape(-1, *[1] * len(shape))

    def hermite(smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
        values = function(nodes if smooth is None else nodes * smooth)
        return torch.tensordot(weights, values, 1), values

    def graded() -> Tensor:
        with torch.no_grad():
            low = torch.full(shape, -_RANGE, dtype=dtype, device=device)
            place = _find_focus(function, lambda t, _: -t.square() / 2, low, -low) if focus is None else focus
            t, spacing = _nodes(place, low, -low, _FURTHEST, num_nodes)
            mass = spacing * (-t.square() / 2).exp()
            mass = mass / mass.sum(0)
        return (mass * function(t)).sum(0)

    return _either(hermite, _smooth if focus is None else (focus[1] >= _BROAD).expand(shape), graded)


def log_expectation(
    log_function: Callable[[Tensor], Tensor],
    loc: Float[Tensor, "..."],
    scale: Float[Tensor, "..."],
    focus: Focus | None = None,
) -> Float[Tensor, "..."]:
    r"""The logarithm of the expectation of :math:`\exp g(f)` over a normal f, elementwise.

    A search without gradients narrows (or moves) a window until it just holds the integrand. A sharp integrand stays
    where it is when loc and scale change, so its nodes are held fixed in f and the gradient comes from the normal
    density; nodes that moved with loc would need the slope of g, which they do not resolve. A broad integrand has nodes
    fixed in :math:`t = (f - loc) / scale`, because the gradients of the normal density at fixed f would cancel there.

    Args:
        log_function: g, from f of shape (Q, \*shape) to values of that shape; :math:`\exp g` should have one peak.
        loc: mean of f.
        scale: standard deviation of f, of the same shape.
        focus: center and scale of the sharpest feature of g as a function of t, of the shape of the result; None finds
            them.

    Returns:
        Tensor of the shape of loc.

    Cost: 24 evaluations of g per element if :math:`\exp g` is smooth throughout the batch. Otherwise 160 more, 64 of
    them with gradient, and 85 where the focus has to be computed.
    """
    nodes, weights = gauss_hermite(_HERMITE_NODES, loc.dtype, loc.device)
    nodes = nodes.reshape(-1, *[1] * loc.dim())

    def hermite(smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
        values = standardized(nodes if smooth is None else nodes * smooth)
        peak = values.detach().amax(0)
        values = (values - peak).exp()
        return torch.tensordot(weights, values, 1).log() + peak, values

    def standardized(t: Tensor) -> Tensor:
        return log_function(loc + scale * t)

    def log_integrand(t: Tensor, values: Tensor) -> Tensor:
        return torch.nan_to_num(values, -math.inf, math.inf, -math.inf) - t.square() / 2

    def graded() -> Tensor:
        with torch.no_grad():
            low = torch.full_like(loc, -_START)
            high = -low
            for _ in range(_WINDOW_ROUNDS):
                t, step = _grid(low, high, _WINDOW_NODES)
                values = log_integrand(t, standardized(t))
                inside = (values > values.amax(0) - _DROP).byte()
                first, last = inside.argmax(0), inside.flip(0).argmax(0)
                low, high = (
                    torch.where(first > 0, low + (first - 1) * step, 2 * low - high),
                    torch.where(last > 0, high - (last - 1) * step, 2 * high - low),
                )
            place = _find_focus(standardized, log_integrand, low, high) if focus is None else focus
            t, step = _nodes(place, low, high, math.inf, _NODES)
            sharp = torch.minimum(place[1], (high - low) / (2 * _START)) < _SHARP
            fixed = loc + scale * t
            log_step = step.log() + torch.where(sharp, scale.log(), 0)
        f = torch.where(sharp, fixed, loc + scale * t)
        log_normal = torch.where(sharp, -((fixed - loc) / scale).square() / 2 - scale.log(), -t.square() / 2)
        return torch.logsumexp(log_function(f) + log_normal + log_step, 0) - math.log(2 * math.pi) / 2

    return _either(hermite, functools.partial(_smooth, relative_to_mean=True), graded)


def _either(
    hermite: Callable[..., tuple[Tensor, Tensor]],
    smooth: Tensor | Callable[[Tensor], Tensor],
    graded: Callable[[], Tensor],
) -> Tensor:
    """Gauss-Hermite quadrature for smooth elements, the graded rule for others; only one of them if it suffices.

    The value of an element does not depend on the other elements of the batch.

    Args:
        hermite: results and values at the nodes; given the smooth elements, with nodes at 0 for the others, whose
            gradients may be infinite elsewhere.
        smooth: flags of smooth elements, or a function that computes them from values at the nodes.
        graded: results.
    """
    if callable(smooth):
        result, values = hermite()
        smooth = smooth(values)
        if _all(smooth):
            return result
    elif _all(smooth):
        return hermite()[0]
    if _all(~smooth):
        return graded()
    return torch.where(smooth, hermite(smooth)[0], graded())


def _smooth(values: Tensor, relative_to_mean: bool = False) -> Tensor:
    """Whether Gauss-Hermite quadrature suffices for functions with these values (Q, ..) at its nodes, elementwise."""
    with torch.no_grad():
        weights = gauss_hermite(_HERMITE_NODES, values.dtype, values.device)[1]
        mean = torch.tensordot(weights, values, 1)
        square = torch.tensordot(weights, (values - mean).square(), 1)  # of all coefficients but the first
        tail = torch.tensordot(_hermite_tail(values.dtype, values.device), values, 1).abs().amax(0)
        size = torch.minimum(square.sqrt(), mean.abs()) if relative_to_mean else square.sqrt()
        rounding = torch.finfo(values.dtype).eps * (square + mean.square()).sqrt()
        return tail <= _SMOOTH * size + rounding


def _all(conditions: Tensor) -> bool:
    """Whether all flags are True; False under :func:`torch.func.vmap`, which hides values."""
    return not is_batchedtensor(conditions) and bool(conditions.all())


def _find_focus(
    function: Callable[[Tensor], Tensor], log_weight: Callable[[Tensor, Tensor], Tensor], low: Tensor, high: Tensor
) -> Focus:
    """Center and scale of the sharpest feature of a function of t within a window, weighted.

    Each round searches a grid over three spacings of the previous one. The scale is the last spacing at which halving
    it still reveals more than a jump of the second derivative would; for a smooth function it is the first spacing.

    Args:
        function: of t (Q, ..).
        log_weight: of t and the values of the function.
        low: lower ends of the window.
        high: upper ends.
    """
    limits = torch.finfo(low.dtype)
    offsets = torch.arange(3, device=low.device).reshape(-1, *[1] * low.dim())
    for round_ in range(_FOCUS_ROUNDS):
        t, step = _grid(low, high, _FOCUS_NODES)
        values = function(t)
        bend = torch.nan_to_num(values[2:] - 2 * values[1:-1] + values[:-2], 0.0, 0.0, 0.0)
        rough = (bend[2:] - 2 * bend[1:-1] + bend[:-2]).abs()
        rounding = 16 * limits.eps * torch.nan_to_num(values, 0.0, 0.0, 0.0).abs().amax(0)
        rough = torch.nan_to_num(rough - rounding, 0.0, 0.0, 0.0).clamp(min=0)
        log_weights = log_weight(t[2:-2], values[2:-2])
        score = (log_weights - log_weights.amax(0)).exp()
        score = torch.where(score > _FOCUS_WEIGHT, score * (rough + limits.tiny), 0)
        best = score.argmax(0, keepdim=True)
        bends = bend.gather(0, best + offsets).abs() + limits.tiny
        center = (bends / bends.sum(0) * t[1:-1].gather(0, best + offsets)).sum(0)  # exact for one kink
        third = rough.gather(0, best)[0] / step**3
        if round_ == 0:
            scale, roughness = step, third
        else:
            scale, roughness = torch.where(third > roughness, step, scale), torch.maximum(third, roughness)
        low, high = center - 1.5 * step, center + 1.5 * step
    return center, torch.where(scale == step, _KINK * step, scale)


def _nodes(focus: Focus, low: Tensor, high: Tensor, furthest: float, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes (Q, ..) in a window, crowded around the focus, and their spacings; one node lies at the center.

    Args:
        focus: center and scale.
        low: lower ends of the window.
        high: upper ends.
        furthest: largest distance of centers from 0.
        num_nodes: Q.
    """
    broad = (high - low) / 10
    center = torch.nan_to_num(focus[0].clamp(-furthest, furthest)).clamp(low, high)
    ratio = torch.nan_to_num(focus[1] / broad, nan=1.0).clamp(1e-6, 1.0)

    def inverse(x: Tensor) -> Tensor:
        return torch.asinh(torch.sinh(x / broad) / ratio)

    first, last = inverse(low - center), inverse(high - center)
    step = (last - first) / (num_nodes - 1)
    index = torch.arange(num_nodes, dtype=low.dtype, device=low.device).reshape(-1, *[1] * low.dim())
    u = (index + torch.round(first / step)) * step
    inner = ratio * torch.sinh(u)
    spacing = step * broad * ((ratio.square() + inner.square()) / (1 + inner.square())).sqrt()
    return center + broad * torch.asinh(inner), spacing


def _grid(low: Tensor, high: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Equally spaced nodes along a new first dimension, and their spacing."""
    unit = torch.linspace(0, 1, num_nodes, dtype=low.dtype, device=low.device)
    return low + (high - low) * unit.reshape(-1, *[1] * low.dim()), (high - low) / (num_nodes - 1)
