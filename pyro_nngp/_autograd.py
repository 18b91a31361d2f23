"""Helpers of custom autograd functions: Pyro's provenance, and batch dimensions under vmap.

``pyro.infer.inspect`` and ``render_model`` wrap tensors to follow which sites and parameters a value comes from; an
``autograd.Function`` returns them unwrapped. Cost: O(arguments).
"""

from collections.abc import Iterable
from typing import Any

import torch
from pyro.ops.provenance import ProvenanceTensor, detach_provenance, get_provenance, track_provenance
from torch import Tensor
from torch.autograd import forward_ad


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply``, whose results get the provenance of all arguments.

    Where nothing can be differentiated, only the forward pass is called, without the bookkeeping of autograd.
    """
    if not any(isinstance(arg, ProvenanceTensor) for arg in args):
        is_pure = function.setup_context is not torch.autograd.Function.setup_context  # forward(*args), without context
        return function.forward(*args) if is_pure and not _may_be_differentiated() else function.apply(*args)
    return track_provenance(function.apply(*detach_provenance(args)), get_provenance(args))


def _may_be_differentiated() -> bool:
    """Whether gradients, duals, or transforms of torch.func are in use."""
    return torch.is_grad_enabled() or is_transformed() or forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether a transform of torch.func, such as ``vmap``, is in use."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def mapped_first(values: Iterable[Tensor], in_dims: Iterable[int | None], ranks: Iterable[int]) -> list[Tensor]:
    """Move mapped dimensions to the front of the values, as a batch dimension against which the others broadcast.

    Args:
        values: the arguments of a function under :func:`torch.func.vmap`.
        in_dims: mapped dimension of each, or None.
        ranks: number of trailing dimensions of each that are no batch dimensions.
    """
    given = list(zip(values, in_dims, ranks, strict=True))
    most = max(value.dim() - (dim is not None) - rank for value, dim, rank in given)
    moved = []
    for value, dim, rank in given:
        if dim is not None:
            value = value.movedim(dim, 0)
            value = value.reshape(len(value), *[1] * (most + 1 + rank - value.dim()), *value.shape[1:])
        moved.append(value)
    return moved
