"""Laplace approximation to a density of few numbers without gradients: its mode and curvature by differences.

Newton steps with a quadratic function through (h^2 + 3 h + 2) / 2 points: near the mode of a posterior, where it fits,
about four steps are enough, and the last one gives the curvature.

Cost: (h^2 + 3 h + 2) / 2 evaluations per step, and one or a few more along it. Symbols: h numbers.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

_STEPS = 0.02, 0.1  # of differences, least and most; between them the standard deviation
_MOST_STEPS, _HALVINGS, _RETRIES = 12, 8, 4
_FURTHEST = 1.0  # step in any number
_GAIN = 0.02  # nats: the maximum of the quadratic function counts as the mode if it gains less
_WIDEST = 1.0  # standard deviation where the density is almost flat
_CLIFF = 1e6  # nats: a fall beyond which the quadratic function uses closer points


def mode(
    log_density: Callable[[np.ndarray], float],
    start: Float[np.ndarray, " h"],
    move: Callable[[np.ndarray, float], float],
) -> tuple[Float[np.ndarray, " h"], Float[np.ndarray, "h h"]]:
    """The mode, and the inverse of the negative Hessian there, with standard deviations of at most 1.

    Args:
        log_density: the log density, or what has its gradient and curvature near the last point of `move`.
        start: where the search begins.
        move: returns the log density at a point; if it is above its second argument, `log_density` holds around this
            point from now on.
    """
    at, value, cov = start, move(start, -np.inf), np.eye(len(start))
    for _ in range(_MOST_STEPS):
        gradient, cov = _quadratic(log_density, at, log_density(at), np.clip(np.sqrt(np.diag(cov)), *_STEPS))
        step = cov @ gradient
        if gradient @ step / 2 < _GAIN:
            return at + step, cov
        step *= min(1.0, _FURTHEST / np.abs(step).max())
        for _ in range(_HALVINGS):
            reached = move(at + step, value)
            if reached > value:
                break
            step = step / 2
        else:
            break
        at, value = at + step, reached
    return at, cov


def _quadratic(
    log_density: Callable[[np.ndarray], float], at: Float[np.ndarray, " h"], value: float, widths: np.ndarray
) -> tuple[Float[np.ndarray, " h"], Float[np.ndarray, "h h"]]:
    """Gradient, and inverse of the negative Hessian, by differences."""
    for _ in range(_RETRIES):
        steps = np.diag(widths)
        plus, minus = (np.array([log_density(at + sign * step) for step in steps]) for sign in (1, -1))
        if min(plus.min(), minus.min()) > value - _CLIFF:
            break
        widths = widths / 4
    gradient, rise = (plus - minus) / 2, plus + minus - 2 * value
    hessian = np.diag(rise)
    for i in range(len(at)):
        for j in range(i):
            both = log_density(at + steps[i] + steps[j]) - value
            hessian[i, j] = hessian[j, i] = both - gradient[i] - gradient[j] - (rise[i] + rise[j]) / 2
    values, vectors = np.linalg.eigh(-hessian / np.outer(widths, widths))
    return gradient / widths, (vectors / np.maximum(values, _WIDEST**-2)) @ vectors.T
