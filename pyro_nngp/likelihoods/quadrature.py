r"""Expectations under a standard normal variable t: fixed nodes for smooth integrands, moving ones for sharp ones.

* :func:`gauss_hermite`: :math:`E\, g(t) \approx \sum_q w_q g(t_q)`, exact for polynomials of degree below 2Q.
* :func:`normal_nodes`: equally weighted quasi-random nodes in C dimensions.
* :func:`expectation`: :math:`E\, g(t)` for a log-density g, which may have a kink or a narrow dip anywhere.
* :func:`log_expectation`: :math:`\log E \exp g(t)` where :math:`\exp g` may be much narrower than the normal density
  (the likelihood of a count of 1000 under a vague latent), so that fixed nodes would miss it.

The last two use the trapezoidal rule in a variable u that crowds the nodes around one place c, the focus,

.. math:: t = c + L \,\mathrm{asinh}\big(\tfrac{a}{L} \sinh u\big),

with spacing proportional to a near c, to the distance from c between a and L, and to L further out, where it has to
resolve the normal density only. A feature of width a thus costs :math:`O(\log L / a)` nodes, and the error falls
geometrically in their number. Where c and a are not given, a search without gradients finds them: it looks on a grid
for the largest fourth difference of g, which smooth functions do not have, and repeats that on finer grids around it.

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

from pyro_nngp.linalg.cholesky import cholesky

_WINDOW_ROUNDS, _WINDOW_NODES, _NODES = 4, 24, 64
_START = 9.0  # first window of log_expectation: the normal density is e^-40 at its ends
_RANGE = 8.0  # window of expectation: the normal density is 1e-14 of its peak at its ends
_DROP = 30.0  # nodes further than this below the largest log-integrand are outside
_FOCUS_ROUNDS, _FOCUS_NODES = 5, 17
_FOCUS_WEIGHT = 4e-5  # a focus lies where the weight is at least this part of its maximum
_FURTHEST = 4.5  # from 0, where the normal density has that weight
_KINK = 1 / 8  # of the finest spacing of the search, the scale of a feature that it did not resolve

Focus: TypeAlias = tuple[Tensor, Tensor]
"""Center and scale of the sharpest feature of an integrand."""


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
def normal_nodes(num_dims: int, num_nodes: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "C Q"]:
    """Q fixed quasi-random nodes of a C-dimensional standard normal, for equally weighted means.

    Scrambled Sobol points and their negatives, transformed to unit covariance: exact for polynomials of degree 3 (for
    more dimensions than half the nodes: of odd degree). The remaining error is a fixed bias, not noise.
    """
    with torch.inference_mode(False):
        engine = torch.quasirandom.SobolEngine(num_dims, scramble=True, seed=0)
        half = torch.special.ndtri(engine.draw((num_nodes + 1) // 2, dtype=torch.float64).clamp(1e-10, 1 - 1e-10)).mT
        if half.shape[1] > num_dims:
            root = cholesky(half @ half.mT / half.shape[1], 0.0)
            half = torch.linalg.solve_triangular(root, half, upper=False)
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

    The gradient is that of the rule with its nodes held fixed.

    Args:
        function: g, from t of shape (Q, \*shape) to values of that shape, with one kink or narrow feature at most.
        shape: shape of the result.
        dtype: of t.
        device: of t.
        num_nodes: Q.
        focus: center and scale of the sharpest feature of g, of the shape of the result; None finds them.

    Returns:
        Tensor of the given shape.

    Cost: Q evaluations of g per element, with gradient, and 85 without where the focus has to be found.
    """
    with torch.no_grad():
        low = torch.full(shape, -_RANGE, dtype=dtype, device=device)
        focus = _find_focus(function, lambda t, _: -t.square() / 2, low, -low) if focus is None else focus
        t, weights = _nodes(focus, low, -low, _FURTHEST, num_nodes)
        weights = weights * (-t.square() / 2).exp()
        weights = weights / weights.sum(0)
    return (weights * function(t)).sum(0)


def log_expectation(
    log_function: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    focus: Focus | None = None,
) -> Float[Tensor, "..."]:
    r"""The logarithm of the expectation of :math:`\exp g(t)` over a standard normal t, elementwise.

    A search without gradients narrows (or moves) a window until it just holds the integrand. The gradient is that of
    the rule with its nodes held fixed.

    Args:
        log_function: g, from t of shape (Q, \*shape) to values of that shape; :math:`\exp g` should have one peak.
        shape: shape of the result.
        dtype: of t.
        device: of t.
        focus: center and scale of the sharpest feature of g, of the shape of the result; None finds them.

    Returns:
        Tensor of the given shape.

    Cost: 160 evaluations of g per element, 64 of them with gradient, and 85 where the focus has to be found.
    """

    def log_integrand(t: Tensor, values: Tensor) -> Tensor:
        return torch.nan_to_num(values, -math.inf, math.inf, -math.inf) - t.square() / 2

    with torch.no_grad():
        low = torch.full(shape, -_START, dtype=dtype, device=device)
        high = -low
        for _ in range(_WINDOW_ROUNDS):
            t, step = _grid(low, high, _WINDOW_NODES)
            values = log_integrand(t, log_function(t))
            inside = (values > values.amax(0) - _DROP).byte()
            first, last = inside.argmax(0), inside.flip(0).argmax(0)
            low, high = (
                torch.where(first > 0, low + (first - 1) * step, 2 * low - high),
                torch.where(last > 0, high - (last - 1) * step, 2 * high - low),
            )
        focus = _find_focus(log_function, log_integrand, low, high) if focus is None else focus
        t, step = _nodes(focus, low, high, math.inf, _NODES)
    return torch.logsumexp(log_function(t) - t.square() / 2 + step.log(), 0) - math.log(2 * math.pi) / 2


def _find_focus(
    function: Callable[[Tensor], Tensor], log_weight: Callable[[Tensor, Tensor], Tensor], low: Tensor, high: Tensor
) -> Focus:
    """Center and scale of the sharpest feature of a function of t within a window, weighted.

    Each round looks at a grid over three spacings of the one before. The scale is the last spacing at which halving it
    still uncovers more than a jump of the second derivative would; a function that is smooth throughout has the first.

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
        found = rough.gather(0, best)[0] / step**3
        if round_ == 0:
            scale, roughness = step, found
        else:
            scale, roughness = torch.where(found > roughness, step, scale), torch.maximum(found, roughness)
        low, high = center - 1.5 * step, center + 1.5 * step
    return center, torch.where(scale == step, _KINK * step, scale)


def _nodes(focus: Focus, low: Tensor, high: Tensor, furthest: float, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes (Q, ..) in a window, crowded around the focus, and their spacings; one node lies at the center.

    Args:
        focus: center and scale.
        low: lower ends of the window.
        high: upper ends.
        furthest: centers are at most so far from 0.
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
