r"""Expectations under a standard normal variable t: fixed nodes for smooth integrands, moving ones for sharp ones.

* :func:`gauss_hermite`: :math:`E\, g(t) \approx \sum_q w_q g(t_q)`, exact for polynomials of degree below 2Q. For the
  expectation of a log-density, which is smooth in f.
* :func:`normal_nodes`: equally weighted quasi-random nodes in C dimensions.
* :func:`log_expectation`: :math:`\log E \exp g(t)` where :math:`\exp g` may be much narrower than the normal density
  (the likelihood of a count of 1000 under a vague latent), so that fixed nodes would miss it.

Cost: stated per function. Symbols: Q nodes, C latent dimensions.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.linalg.cholesky import cholesky

_SEARCH_ROUNDS, _SEARCH_NODES, _NODES = 4, 24, 64
_START = 9.0  # first search window, in standard deviations: the normal density is e^-40 at its ends
_DROP = 30.0  # nodes further than this below the largest log-integrand are outside


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


def log_expectation(
    log_function: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "..."]:
    r"""The logarithm of the expectation of :math:`\exp g(t)` over a standard normal t, elementwise.

    A search without gradients narrows (or moves) a window until it just holds the integrand; there the trapezoidal rule
    converges geometrically. The gradient is that of the rule with its nodes held fixed.

    Args:
        log_function: g, from t of shape (Q, \*shape) to values of that shape; :math:`\exp g` should have one peak.
        shape: shape of the result.
        dtype: of t.
        device: of t.

    Returns:
        Tensor of the given shape.

    Cost: 160 evaluations of g per element, 64 of them with gradient.
    """
    low = torch.full(shape, -_START, dtype=dtype, device=device)
    high = -low
    with torch.no_grad():
        for _ in range(_SEARCH_ROUNDS):
            t, step = _grid(low, high, _SEARCH_NODES)
            values = log_function(t) - t.square() / 2
            inside = (values > values.amax(0) - _DROP).byte()
            first, last = inside.argmax(0), inside.flip(0).argmax(0)
            low, high = (
                torch.where(first > 0, low + (first - 1) * step, 2 * low - high),
                torch.where(last > 0, high - (last - 1) * step, 2 * high - low),
            )
    t, step = _grid(low, high, _NODES)
    return torch.logsumexp(log_function(t) - t.square() / 2, 0) + step.log() - math.log(2 * math.pi) / 2


def _grid(low: Tensor, high: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Equally spaced nodes along a new first dimension, and their spacing."""
    unit = torch.linspace(0, 1, num_nodes, dtype=low.dtype, device=low.device)
    return low + (high - low) * unit.reshape(-1, *[1] * low.dim()), (high - low) / (num_nodes - 1)
