r"""Levels that data do not bound: the likelihood does not fall as a level goes to infinity on one side.

Labels of one class, counts that are all zero and data that are all beyond their limit of detection are most likely at
an infinite level. Under a flat prior the level has no posterior then, so that its mean function holds it where it is
(:class:`~pyro_nngp.means.BasisMean`). A start is the nearest level at which all data lose half a nat, about where half
of one more datum of the other kind would put it.

Cost: five expectations at 1,000 rows for each function that shares data with others, or for all; where these may not
bound a level, fifteen more, and as many and twenty more at all rows. Symbols: N data, L functions, G levels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.bound import Bound
from pyro_nngp.rows import Rows

_ROWS = 1000  # that tell at first
_FAR, _NARROW, _GRID = 30.0, 1e-6, 17  # distance in units of f; standard deviation of f; moves tried on a side
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
    zero, f = rows.x.new_zeros(bound.mean_function.own_shape or 1), rows.mean(bound)
    far = 2 * _FAR * unit + float(f.amax() - f.amin() if rows.is_whole else rows.total(f.square().sum()).sqrt())
    ends = _ends(_density(rows, bound, slice(_ROWS)), zero, far)
    if not bool(ends.any()):
        return Unbounded((False,) * len(zero), zero)
    density = _density(rows, bound, rows.own)
    ends = _ends(density, zero, far)
    return Unbounded(tuple((ends != 0).tolist()), _nearest(density, ends))


def _density(rows: Rows, bound: Bound, part: slice) -> Callable[[Tensor], Tensor]:
    """The log likelihood of some rows as a function of moves of the levels, (G,) -> (G,), each of which moves alone."""
    likelihood, y, own = rows.likelihood(bound, part), rows.targets()[..., part], bound.mean_function.own_shape
    f = rows.mean(bound, part)
    f = f.expand(*bound.latent_shape, f.shape[-1])
    var = torch.full_like(f, _NARROW**2)

    def density(move: Float[Tensor, " G"]) -> Float[Tensor, " G"]:
        if not own:
            moved = [f + move]
        elif likelihood.num_latents is None and not likelihood.shares_rows:  # each function has data of its own
            moved = [f + move[:, None]]
        else:
            moved = [f + alone[:, None] for alone in torch.diag(move)]
        each = [likelihood.expected_log_prob(y, loc, var).sum(-1) for loc in moved]
        by_function = own and len(moved) == 1
        return rows.total(each[0] if by_function else torch.stack([value.sum() for value in each])).reshape(-1)

    return density


def _ends(density: Callable[[Tensor], Tensor], zero: Float[Tensor, " G"], far: float) -> Float[Tensor, " G"]:
    """For each level the move, of size `far`, than which none is better on its side; 0 where there is none."""
    here, ends = density(zero), zero
    for end in (-far, far):
        value = density(zero + end)
        best = torch.maximum(here, density(zero + end / 2))
        if bool((value >= best - _ROUNDING).any()):
            between = [density(zero + end * share) for share in torch.linspace(0, 1, _GRID)[1:-1].tolist()]
            best = torch.stack([best, *between]).amax(0)
        ends = torch.where((value >= best - _ROUNDING) & (value >= here), end, ends)
    return ends


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
