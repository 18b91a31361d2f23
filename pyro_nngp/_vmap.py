"""Batch dimensions under :func:`torch.func.vmap`, for autograd functions that broadcast."""

from collections.abc import Iterable

from torch import Tensor


def mapped_first(values: Iterable[Tensor], in_dims: Iterable[int | None], own: Iterable[int]) -> list[Tensor]:
    """Values whose mapped dimension, if they have one, is the first of batch dimensions that broadcast as before.

    Args:
        values: the arguments.
        in_dims: their mapped dimensions.
        own: their numbers of trailing dimensions that are no batch dimensions.
    """
    given = list(zip(values, in_dims, own, strict=True))
    most = max(value.dim() - (dim is not None) - rank for value, dim, rank in given)
    found = []
    for value, dim, rank in given:
        if dim is not None:
            value = value.movedim(dim, 0)
            value = value.reshape(len(value), *[1] * (most + 1 + rank - value.dim()), *value.shape[1:])
        found.append(value)
    return found
