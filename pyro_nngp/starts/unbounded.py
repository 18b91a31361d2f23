r"""Levels that data do not bound: the likelihood does not fall as a level goes to infinity on one side.

Labels of one class, counts that are all zero and data that are all beyond their limit of detection are most likely at
an infinite level. Under a flat prior the level has no posterior then, so that its mean function holds it where it is
(:class:`~pyro_nngp.means.BasisMean`).

Cost: five expectations at 1,000 rows for each function that shares data with others, or for all; at all rows where
these do not bound a level. Symbols: N data, L functions, G levels.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from pyro_nngp.bound import Bound
from pyro_nngp.rows import Rows

_ROWS = 1000  # that tell at first
_FAR, _NARROW = 30.0, 1e-3  # distances from the level and standard deviation, in units of f


@torch.no_grad()
def unbounded_levels(rows: Rows, bound: Bound, unit: float) -> tuple[bool, ...]:
    """Whether the data leave a level of the mean unbounded, for each function, or for all where they have one level.

    Args:
        rows: the data. All processes must call it.
        bound: the hyperparameters, with a mean function that is linear in coefficients.
        unit: typical spread of f.
    """
    found = _unbounded(rows, bound, unit, slice(_ROWS))
    return tuple((_unbounded(rows, bound, unit, rows.own) if bool(found.any()) else found).tolist())


def _unbounded(rows: Rows, bound: Bound, unit: float, part: slice) -> Bool[Tensor, " G"]:
    likelihood, y, own = rows.likelihood(bound, part), rows.targets()[..., part], bound.mean_function.own_shape
    f = rows.mean(bound, part)
    f = f.expand(*bound.latent_shape, f.shape[-1])
    var = torch.full_like(f, (_NARROW * unit) ** 2)
    has_own_data = likelihood.num_latents is None
    moves = [torch.ones(()).to(f)] if has_own_data or not own else list(torch.eye(len(f)).to(f)[..., None])

    def density(distance: float) -> Tensor:
        each = [likelihood.expected_log_prob(y, f + distance * unit * move, var).sum(-1) for move in moves]
        return rows.total(torch.stack(each) if own else torch.stack(each).sum()).reshape(-1)

    here = density(0.0)
    ends = [(density(side * _FAR), density(2 * side * _FAR)) for side in (-1, 1)]
    above, below = ((far >= here) & (farther >= far) for far, farther in ends)
    return above | below


__all__ = ["unbounded_levels"]
