"""Sums and products of stationary kernels as one value: a sum of products of parts, each with columns of its own.

Code that has gradients of each part's profile computes the whole in one pass over pairs of points.

Cost: O(F) beside the parts. Symbols: F parts, D columns of all of them, S batch of hyperparameters.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_nngp.kernels import radial
from pyro_nngp.kernels.radial import Combination, Profile, Radial

MAX_PARTS = 8
"""Most parts of a combination."""


def added(one: Radial | None, two: Radial | None) -> Radial | None:
    """The sum; None if one of them is None, or there are too many parts."""
    return _combined(one, two, lambda terms, others: terms + others)


def multiplied(one: Radial | None, two: Radial | None) -> Radial | None:
    """The product; None if one of them is None, or there are too many parts."""
    return _combined(one, two, lambda terms, others: tuple(a + b for a in terms for b in others))


def block(
    x: Tensor,
    z: Tensor,
    lengthscale: Tensor,
    variance: Tensor,
    profile: Profile | Combination,
    smoothness: Tensor | None = None,
) -> Tensor:
    """Covariance block of raw inputs, as :func:`pyro_nngp.kernels.radial.block`, of a combination too.

    Its variances, and smoothnesses, are in the last dimension, its columns and lengthscales side by side.
    """
    if not isinstance(profile, Combination):
        return radial.block(x, z, lengthscale, variance, profile, smoothness)
    blocks, first, table = [], 0, 0
    for part, (own, dim) in enumerate(zip(profile.parts, profile.dims, strict=True)):
        columns, nu = slice(first, first + dim), None
        if own.correlation is not None and smoothness is not None:
            nu, table = smoothness[..., table], table + 1
        left = x[..., columns]
        right = left if z is x else z[..., columns]
        blocks.append(radial.block(left, right, lengthscale[..., columns], variance[..., part], own, nu))
        first += dim
    return profile.of_values(blocks)


def _combined(one: Radial | None, two: Radial | None, join: Callable[[tuple, tuple], tuple]) -> Radial | None:
    """Both as parts of one kernel, whose terms are the join of theirs."""
    if one is None or two is None:
        return None
    both = one, two
    first, second = (kernel.profile.combined(kernel.dim) for kernel in both)
    count, parts = len(first.parts), first.parts + second.parts
    if len(parts) > MAX_PARTS:
        return None
    renumbered = tuple(tuple(part + count for part in term) for term in second.terms)
    smoothness = [_last(kernel, kernel.smoothness) for kernel in both if kernel.smoothness is not None]
    return Radial(
        Combination(parts, first.dims + second.dims, join(first.terms, renumbered)),
        _side_by_side([kernel.lengthscale.expand(*kernel.lengthscale.shape[:-1], kernel.dim) for kernel in both]),
        _side_by_side([_last(kernel, kernel.variance) for kernel in both]),
        lambda x: torch.cat([kernel.columns(x) for kernel in both], -1),
        one.dim + two.dim,
        _side_by_side(smoothness) if smoothness else None,
    )


def _last(kernel: Radial, value: Tensor) -> Tensor:
    """A number per part in the last dimension."""
    return value if kernel.profile.rank else value[..., None]


def _side_by_side(values: list[Tensor]) -> Tensor:
    """Concatenate along the last dimension, after expanding the others to one batch shape."""
    batch = torch.broadcast_shapes(*(value.shape[:-1] for value in values))
    return torch.cat([value.expand(*batch, value.shape[-1]) for value in values], -1)
