"""Values at row numbers: ``index_select``, on CPUs several times as fast as indexing, forward and backward."""

from jaxtyping import Float, Int
from torch import Tensor


def values_at(values: Float[Tensor, "*S N"], numbers: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``values[..., numbers]``; at -1, which is padding, the value is arbitrary."""
    found = values.index_select(-1, numbers.clamp(min=0).flatten())
    return found if numbers.dim() == 1 else found.unflatten(-1, numbers.shape)
