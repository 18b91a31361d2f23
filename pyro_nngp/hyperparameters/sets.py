"""Batches of hyperparameters one set after the other, for code that takes one set at a time.

Within vectorized plates, and where an upstream site is enumerated, hyperparameters have batch dimensions
(:mod:`pyro_nngp.hyperparameters.batches`). Code whose cost per set is far above that of a step of a Python loop loses
nothing by taking the sets in turn, and needs the memory of one.

Cost: that of the function, once for each set.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from pyro.poutine import runtime
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor, nn

from pyro_nngp.hyperparameters.batches import declared_batch_shape, placed
from pyro_nngp.hyperparameters.priors import sampled_attributes, site_name

Result = TypeVar("Result")


def each_set(owner: nn.Module, compute: Callable[[], Result]) -> tuple[list[Result], torch.Size]:
    """Results of a function at each of the sets of hyperparameters that have been read in this Pyro context.

    Args:
        owner: the module whose :class:`~pyro.nn.PyroSample` attributes have batch dimensions.
        compute: reads them, one set at a time, and may read everything else.

    Returns:
        The results, and the batch shape that they have in row-major order: one result and () where no plate is
        vectorized and no site enumerated, or no attribute has batch dimensions.
    """
    read = [(module, name, getattr(module, name)) for module, name in sampled_attributes(owner)]
    values = [(module, name, value, declared_batch_shape(module, name, value)) for module, name, value in read]
    batch = torch.broadcast_shapes(*(placed(own) for *_, own in values)) if _is_vectorized() else torch.Size()
    if not batch:
        return [compute()], batch
    flat = [
        (module, site_name(owner, module, name), value, _flat(value, own, batch)) for module, name, value, own in values
    ]
    results = []
    try:
        for index in range(batch.numel()):
            for module, site, _, sets in flat:
                module._pyro_context.set(site, sets[index])
            results.append(compute())
    finally:
        for module, site, value, _ in flat:
            module._pyro_context.set(site, value)
    return results, batch


def stacked(values: list[Tensor], batch: torch.Size) -> Tensor:
    """The results of :func:`each_set` with the batch dimensions in front."""
    return torch.stack(values).unflatten(0, batch) if batch else values[0]


def _flat(value: Tensor, own: torch.Size, batch: torch.Size) -> Tensor:
    """A value with one leading dimension of sets."""
    event = value.shape[len(own) :]
    return value.reshape(*placed(own), *event).expand(*batch, *event).reshape(-1, *event)


def _is_vectorized() -> bool:
    """Whether sites of the present program may have batch dimensions."""
    handlers = runtime._PYRO_STACK
    return any(frame.vectorized for frame in runtime.get_plates()) or any(
        isinstance(handler, EnumMessenger) for handler in handlers
    )
