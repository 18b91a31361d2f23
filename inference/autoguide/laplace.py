"""Laplace approximation to a density of few numbers without gradients: its mode and curvature by differences.

Newton steps with a quadratic function through (h^2 + 3 h + 2) / 2 points: near the mode of a posterior, where it fits,
about four steps are enough, and the last one gives the curvature. Further away the density need not be concave, and a
step goes uphill along each axis of the quadratic function, as far as its curvature of either sign suggests. There, and
for more than 20 numbers, the curvature is that of each number alone, through 2 h + 1 points.

Cost: (h^2 + 3 h + 2) / 2 evaluations per step near the mode and 2 h + 1 elsewhere, and one or a few more along it.
Symbols: h numbers.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from tqdm.auto import tqdm

from pyro_nngp._checks import warn

_STEPS = 0.02, 0.1  # of differences, least and most; between them the standard deviation
_MOST_STEPS, _HALVINGS, _RETRIES = 30, 8, 4
_FURTHEST = 1.0  # step along an axis
_GAIN = 0.02  # nats: the maximum of the quadratic function counts as the mode if it gains less
_MUCH = 1.0  # nats that a next step promises where the search ends, for a warning
_NEAR = 5.0  # nats to the mode, for differences of pairs
_WIDEST = 1.0  # standard deviation where the density is almost flat
_CLIFF = 1e6  # nats: a fall beyond which the quadratic function uses closer points

PAIRED = 20
"""Most numbers for differences of pairs: of more, the Hessian is taken as diagonal."""


def mode(
    log_density: Callable[[np.ndarray], float],
    start: Float[np.ndarray, " h"],
    move: Callable[[np.ndarray, float], float],
    names: Sequence[str] = ("the density",),
) -> tuple[Float[np.ndarray, " h"], Float[np.ndarray, "h h"]]:
    """The mode, and the inverse of the negative Hessian there, with standard deviations of at most 1.

    Args:
        log_density: the log density, or what has its gradient and curvature near the last point of `move`.
        start: where the search begins.
        move: returns the log density at a point; if it is above its second argument, `log_density` holds around this
            point from now on.
        names: of the sites of the numbers, for a warning.

    A bar shows the steps if they take more than two seconds.

    Warns:
        UserWarning: if the search ends where its next step promises more than a nat.
    """
    at, value, cov, promised = start, move(start, -np.inf), np.eye(len(start)), np.inf
    for _ in tqdm(range(_MOST_STEPS), delay=2, desc="mode of the hyperparameters", unit="step"):
        widths = np.clip(np.sqrt(np.diag(cov)), *_STEPS)
        pairs = len(start) <= PAIRED and promised < _NEAR
        gradient, curvatures, axes = _quadratic(log_density, at, log_density(at), widths, pairs)
        cov = (axes / np.maximum(curvatures, _WIDEST**-2)) @ axes.T
        along = axes.T @ gradient
        step = np.clip(along / np.maximum(np.abs(curvatures), _WIDEST**-2), -_FURTHEST, _FURTHEST)
        step, promised = axes @ step, float(along @ step) / 2
        if promised < _GAIN:
            if pairs or len(start) > PAIRED:
                return at + step, cov
            continue  # with pairs
        for _ in range(_HALVINGS):
            reached = move(at + step, value)
            if reached > value:
                break
            step = step / 2
        else:
            break
        at, value = at + step, reached
    if promised > _MUCH:
        text = f"a density that still rises, by {promised:.2g} nats with the next step"
        cure = "Start nearer to the data, by init_loc_fn=init_to_value(values={...}), or look for runaway ones."
        warn(f"AutoNNGP: expected the mode of {', '.join(names)}, got {text}. {cure}")
    return at, cov


def _quadratic(
    log_density: Callable[[np.ndarray], float],
    at: Float[np.ndarray, " h"],
    value: float,
    widths: np.ndarray,
    pairs: bool,
) -> tuple[Float[np.ndarray, " h"], Float[np.ndarray, " h"], Float[np.ndarray, "h h"]]:
    """Gradient, and eigenvalues and eigenvectors of the negative Hessian, by differences."""
    for _ in range(_RETRIES):
        steps = np.diag(widths)
        plus, minus = (np.array([log_density(at + sign * step) for step in steps]) for sign in (1, -1))
        if min(plus.min(), minus.min()) > value - _CLIFF:
            break
        widths = widths / 4
    gradient, rise = (plus - minus) / 2, plus + minus - 2 * value
    hessian = np.diag(rise)
    for i in range(len(at) if pairs else 0):
        for j in range(i):
            both = log_density(at + steps[i] + steps[j]) - value
            hessian[i, j] = hessian[j, i] = both - gradient[i] - gradient[j] - (rise[i] + rise[j]) / 2
    return gradient / widths, *np.linalg.eigh(-hessian / np.outer(widths, widths))
