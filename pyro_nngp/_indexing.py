"""Row numbers: values at them by ``index_select``, on CPUs several times as fast as indexing; repeats, distinct."""

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad


def values_at(values: Float[Tensor, "*S N"], numbers: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``values[..., numbers]``; at -1, which is padding, the value is arbitrary."""
    selected = values.index_select(-1, numbers.clamp(min=0).flatten())
    return selected if numbers.dim() == 1 else selected.unflatten(-1, numbers.shape)


def repeats(ordered: Int[Tensor, "... n"]) -> Bool[Tensor, "... n"]:
    """Whether each entry of a sorted vector equals the entry before it."""
    return pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct numbers of a vector, in order.

    A sort takes an eighth to a fiftieth of the time of ``np.unique``, which hashes integers from NumPy 2.3 on.
    """
    values = np.sort(values)
    is_new = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=is_new[1:])
    return values[is_new]
