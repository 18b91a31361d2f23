"""Batch dimensions of hyperparameters: several sets of values at once, in front of each value's shape.

They come from vectorized plates (``num_particles``, ``Predictive(parallel=True)``), from enumerated sites and from
``torch.vmap``. A value without them is one set.

Cost: O(1).
"""

from typing import Any

import torch
from pyro.nn import PyroModule
from pyro.poutine import runtime
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor


def is_computed(value: Any) -> bool:
    """Whether a tensor is a value to be used as it is, rather than a parameter's start.

    That is one with a gradient, one within ``torch.func``, and any in a running Pyro program.
    """
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return False
    return value.requires_grad or is_functorch_wrapped_tensor(value) or runtime.am_i_wrapped()


def batch_shape_of(module: PyroModule, name: str, value: Tensor, size: int = 1) -> torch.Size:
    """Batch shape of a hyperparameter's value: what is in front of a number or of one number for each column.

    The shape of a prior distribution says which dimensions belong to the value. Without one a last dimension of `size`
    > 1 belongs to the columns, and all others are batch dimensions.

    Args:
        module: the module that owns the hyperparameter.
        name: of its attribute.
        value: its value.
        size: number of columns.
    """
    shape, prior = value.shape, module._pyro_samples.get(name)
    own = getattr(prior, "batch_shape", ()) + getattr(prior, "event_shape", ())
    if own and shape[-len(own) :] == own:
        return shape[: len(shape) - len(own)]
    if hasattr(prior, "event_shape") and not own:
        return shape
    vector = value.dim() > 0 and (shape[-1] == size > 1 or shape == (1,))
    return shape[:-1] if vector else shape


def declared_batch_shape(module: Any, name: str, value: Tensor) -> torch.Size:
    """:func:`batch_shape_of` with what the module declares: the sizes of a kernel, or numbers of event dimensions.

    Modules whose priors are functions have these numbers as ``event_dims``.
    """
    own = getattr(module, "event_dims", {}).get(name)
    if own is not None:
        return value.shape[: value.dim() - own]
    return batch_shape_of(module, name, value, getattr(module, "_sizes", {}).get(name, 1))


def placed(batch: torch.Size) -> torch.Size:
    """A batch shape with its first dimension at the vectorized plate from which it comes.

    ``Predictive(parallel=True)`` puts the dimension of the draws directly in front of a vector, whatever plates there
    are in between. Leading dimensions of one are left out.
    """
    while batch and batch[0] == 1:
        batch = batch[1:]
    if not batch:
        return batch
    frames = [frame for frame in runtime.get_plates() if frame.vectorized]
    outer = [frame.dim for frame in frames if frame.dim < -len(batch) and frame.size == batch[0]]
    if any(frame.dim == -len(batch) and frame.size == batch[0] for frame in frames) or len(outer) != 1:
        return batch
    return torch.Size((batch[0], *[1] * (-outer[0] - len(batch)), *batch[1:]))


def programs_are_vectorized() -> bool:
    """Whether sites of the present program may have batch dimensions."""
    return any(frame.vectorized for frame in runtime.get_plates()) or any(
        isinstance(handler, EnumMessenger) for handler in runtime._PYRO_STACK
    )
