"""Checks of what an argument is: an instance, a flag, a shape, values that broadcast."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions.utils import broadcast_all

from pyro_nngp._checks import check_tensor, fail


def check_kind(where: str, arg: str, value: Any, kinds: type | tuple[type, ...], expectation: str, cure: str) -> None:
    """Raise ``TypeError`` unless `value` is an instance of one of some classes."""
    if not isinstance(value, kinds):
        fail(where, arg, f"to be {expectation}", type(value).__name__, cure, TypeError)


def check_flag(where: str, arg: str, value: Any) -> None:
    """Raise ``TypeError`` unless `value` is True or False."""
    check_kind(where, arg, value, (bool, np.bool_), "True or False", "Pass one of them.")


def check_sequence(where: str, arg: str, value: Any, cure: str) -> None:
    """Raise ``TypeError`` unless `value` has a length, an order and is no text."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        fail(where, arg, "to be a list or tuple", type(value).__name__, cure, TypeError)


def draws_shape(where: str, sample_shape: Any) -> torch.Size:
    """The shape of draws that a caller asks for.

    Raises:
        TypeError: if it is no shape.
    """
    if type(sample_shape) is torch.Size:
        return sample_shape
    if isinstance(sample_shape, Sequence) and not isinstance(sample_shape, str | bytes):
        sizes = [int(size) if isinstance(size, int | np.integer) else -1 for size in sample_shape]
        if all(0 <= size < 2**62 for size in sizes):
            return torch.Size(sizes)
    cure = "Pass a tuple such as (10,)."
    fail(where, "sample_shape", "to be a tuple of integers >= 0", f"{sample_shape!r:.40}", cure, TypeError)


def broadcast(where: str, **values: Any) -> tuple[Tensor, ...]:
    """Parameters of a distribution as tensors of one shape.

    Raises:
        TypeError: if one is neither a number nor a tensor.
        ValueError: if their shapes do not broadcast.
    """
    for arg, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            check_tensor(where, arg, value)
    try:
        torch.broadcast_shapes(*(value.shape for value in values.values() if isinstance(value, Tensor)))
    except RuntimeError:
        shapes = tuple(tuple(value.shape) for value in values.values() if isinstance(value, Tensor))
        fail(where, ", ".join(values), "of shapes that broadcast", shapes, "Add or expand dimensions.")
    return tuple(broadcast_all(*values.values()))
