"""Checks of memory before compiled code reads or writes it: device, dtype, shape, layout, row numbers.

Every address that crosses the boundary comes from :func:`address`; row numbers that compiled code does not check
pass :func:`check_range`.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_nngp._checks import fail

_CURE = "Check the shapes and dtypes of what you pass; if they are right, report this as a bug."


def address(where: str, arg: str, memory: Any, shape: tuple[int, ...], dtype: Any, alignment: int = 1) -> int:
    """Address of a tensor or array that holds exactly `shape` values of `dtype`, one after the other, on the CPU.

    Args:
        where: the function, for the message.
        arg: the name of the argument, for the message.
        memory: a tensor, with a torch dtype, or an array, with a NumPy one.
        shape: its shape.
        dtype: its dtype.
        alignment: required divisor of the address.

    Raises:
        ValueError, TypeError: for other memory.
    """
    if isinstance(memory, Tensor):
        _check_dense(where, arg, memory)
        is_contiguous, at = memory.is_contiguous(), memory.data_ptr()
    elif isinstance(memory, np.ndarray):
        is_contiguous, at = memory.flags.c_contiguous, memory.ctypes.data
    else:
        fail(where, arg, "to be a tensor or an array", type(memory).__name__, _CURE, TypeError)
    if memory.dtype != dtype:
        fail(where, arg, f"of dtype {dtype}", memory.dtype, _CURE, TypeError)
    if tuple(memory.shape) != shape:
        fail(where, arg, f"of shape {shape}", tuple(memory.shape), _CURE)
    if not is_contiguous:
        fail(where, arg, "to be contiguous", "other strides", _CURE)
    if at % alignment:
        fail(where, arg, f"to start at a multiple of {alignment} bytes", at, _CURE)
    return at


def contiguous(where: str, arg: str, tensor: Tensor) -> Tensor:
    """A dense CPU tensor in contiguous memory, copied if necessary; for reading only."""
    _check_dense(where, arg, tensor)
    return tensor.contiguous()


def _check_dense(where: str, arg: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        actual = f"{tensor.layout} on {tensor.device}"
        fail(where, arg, "to be a dense tensor on the CPU", actual, _CURE, TypeError)


def check_range(where: str, arg: str, numbers: NDArray[np.int64], stop: int) -> None:
    """Raise `IndexError` unless all numbers are in 0..stop-1."""
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= stop):
        fail(where, arg, f"in 0..{stop - 1}", f"{numbers.min()}..{numbers.max()}", _CURE, IndexError)
