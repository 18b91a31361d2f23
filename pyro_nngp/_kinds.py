"""Checks of what an argument is: an instance, a flag, a shape, values that broadcast."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions.utils import broadcast_all

from pyro_nngp._checks import check_int, check_lengthscales, check_number, check_tensor, fail


def check_kind(where: str, arg: str, value: Any, kinds: type | tuple[type, ...], expectation: str, cure: str) -> None:
    """Raise ``TypeError`` unless `value` is an instance of one of some classes."""
    if not isinstance(value, kinds):
        fail(where, arg, f"to be {expectation}", type(value).__name__, cure, TypeError)


def check_flags(where: str, **flags: Any) -> None:
    """Raise ``TypeError`` unless all arguments are True or False."""
    for arg, value in flags.items():
        check_kind(where, arg, value, (bool, np.bool_), "True or False", "Pass one of them.")


def validation(where: str, validate_args: Any) -> bool | None:
    """Whether a distribution checks its arguments; None is torch's default.

    Raises:
        TypeError: if it is neither True, False nor None.
    """
    if validate_args is not None:
        check_flags(where, validate_args=validate_args)
    return validate_args


def check_sequence(where: str, arg: str, value: Any, cure: str) -> None:
    """Raise ``TypeError`` unless `value` has a length, an order and is no text."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        fail(where, arg, "to be a list or tuple", type(value).__name__, cure, TypeError)


def check_callable(where: str, arg: str, value: Any, cure: str, num_args: int | None = None) -> None:
    """Raise ``TypeError`` unless `value` can be called, with so many arguments if their number is given.

    A class is no function here.
    """
    if not callable(value) or isinstance(value, type):
        actual = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        fail(where, arg, "to be callable", actual, cure, TypeError)
    if num_args is not None and not takes(value, num_args):
        fail(where, arg, f"to be callable with {num_args} arguments", type(value).__name__, cure, TypeError)


def takes(function: Callable, num_args: int) -> bool:
    """Whether a function, or the forward pass of a module, can be called with so many arguments; True if unknown."""
    called: Any = function
    if isinstance(called, torch.nn.Module):
        called = called.forward
    elif not inspect.isroutine(called) and not isinstance(called, partial):
        called = called.__call__  # an object may have the signature of its class
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * num_args)
    except TypeError:
        return False
    return True


def check_metric(where: str, arg: str, metric: Any, num_columns: int) -> None:
    """Raise unless `metric` is None, a function, or lengthscales."""
    if isinstance(metric, Tensor):
        check_lengthscales(where, arg, metric, num_columns)
    elif metric is not None:
        check_callable(where, arg, metric, "Pass lengthscales, or a function (n, D), (m, D) -> (n, m).", 2)


def check_steps(where: str, max_steps: Any, tolerance: Any) -> None:
    """Raise unless a solver gets a number of steps and a tolerance."""
    check_int(where, "max_steps", max_steps, 0)
    check_number(where, "tolerance", tolerance)


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


def check_broadcast(where: str, **values: Any) -> None:
    """Raise ``ValueError`` unless the shapes of all tensors among the values broadcast."""
    shapes = tuple(tuple(value.shape) for value in values.values() if isinstance(value, Tensor))
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        fail(where, ", ".join(values), "of shapes that broadcast", shapes, "Add or expand dimensions.")


def broadcast(where: str, **values: Any) -> tuple[Tensor, ...]:
    """Parameters of a distribution as tensors of one shape.

    Raises:
        TypeError: if one is neither a number nor a tensor.
        ValueError: if their shapes do not broadcast.
    """
    for arg, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            check_tensor(where, arg, value)
    check_broadcast(where, **values)
    return tuple(broadcast_all(*values.values()))
