r"""Levels that data do not bound: the likelihood does not fall as a level goes to infinity on one side.

Labels of one class, counts that are all zero and data that are all beyond their limit of detection are most likely at
an infinite level. Under a flat prior the level has no posterior then, so that its mean function holds it where it is
(:class:`~pyro_nngp.means.BasisMean`). A start is the nearest level at which all data lose half a nat, about where half
of one more datum of the other kind would put it.

Cost: five expectations at 1,000 rows for each function that shares data with others, or for all; where these do not
bound a level, five at all rows, and twenty for the nearest level. Symbols: N data, L functions, G levels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.bound import Bound
from pyro_nngp.rows import Rows

_ROWS = 1000  # that tell at first
_FAR, _NARROW = 30.0, 1e-6  # distance in units of f; standard deviation of f
_ROUNDING = 1e-2  # nats; a datum that bounds the level loses far more
_LOST, _HALVINGS = 0.5, 20  # nats at the nearest level, and steps of the search for it


class Unbounded(NamedTuple):
    """Levels that data leave unbounded.

    Attributes:
        held: whether they do, for each function, or for all where they have one level.
        move: distance of the nearest level that loses half a nat, (G,); 0 where there is none, or it is nearer still.
    """

    held: tuple[bool, ...]
    move: Float[Tensor, " G"]


@torch.no_grad()
def unbounded_levels(rows: Rows, bound: Bound, unit: float) -> Unbounded:
    """Find the levels of the mean that data leave unbounded.

    Args:
        rows: the data. All processes must call it.
        bound: the hyperparameters, with a mean function that is linear in coefficients.
        unit: typical spread of f.
    """
    zero = rows.x.new_zeros(bound.mean_function.own_shape or 1)
    sides = _sides(_density(rows, bound, slice(_ROWS)), zero, unit)
    if not bool(sides.any()):
        return Unbounded((False,) * len(zero), zero)
    density = _density(rows, bound, rows.own)
    sides = _sides(density, zero, unit)
    return Unbounded(tuple((sides != 0).tolist()), _nearest(density, sides * _FAR * unit))


def _density(rows: Rows, bound: Bound, part: slice) -> Callable[[Tensor], Tensor]:
    """The log likelihood of some rows as a function of moves of the levels, (G,) -> (G,), each of which moves alone."""
    likelihood, y, own = rows.likelihood(bound, part), rows.targets()[..., part], bound.mean_function.own_shape
    f = rows.mean(bound, part)
    f = f.expand(*bound.latent_shape, f.shape[-1])
    var = torch.full_like(f, _NARROW**2)

    def density(move: Float[Tensor, " G"]) -> Float[Tensor, " G"]:
        if not own:
            moved = [f + move]
        elif likelihood.num_latents is None:  # each function has data of its own
            moved = [f + move[:, None]]
        else:
            moved = [f + alone[:, None] for alone in torch.diag(move)]
        each = [likelihood.expected_log_prob(y, loc, var).sum(-1) for loc in moved]
        return rows.total(torch.stack(each) if own else each[0].sum()).reshape(-1)

    return density


def _sides(density: Callable[[Tensor], Tensor], zero: Float[Tensor, " G"], unit: float) -> Float[Tensor, " G"]:
    """The side on which each level is unbounded; 0 for none."""
    here, sides = density(zero), zero
    for side in (-1.0, 1.0):
        far, farther = density(zero + side * _FAR * unit), density(zero + 2 * side * _FAR * unit)
        sides = torch.where((far >= here) & (farther >= far - _ROUNDING), side, sides)
    return sides


def _nearest(density: Callable[[Tensor], Tensor], end: Float[Tensor, " G"]) -> Float[Tensor, " G"]:
    """The least move towards an end, 0 or far, that loses no more than half a nat on the end."""
    least = density(end) - _LOST
    near, far = torch.zeros_like(end), torch.where(density(torch.zeros_like(end)) >= least, 0.0, end)
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        fits = density(middle) >= least
        near, far = torch.where(fits, near, middle), torch.where(fits, middle, far)
    return far


__all__ = ["Unbounded", "unbounded_levels"]
