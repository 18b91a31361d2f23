"""Compiled operations on the rows that a minibatch uses, for CPUs: `rows.cpp`.

Cost: O(E + N / 64) for the distinct ones among E numbers below N; O(U L) for a step on U rows of L columns.
"""

import ctypes

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pyro_nngp._checks import fail
from pyro_nngp.native import enabled, loaded
from pyro_nngp.native.boundary import address, contiguous
from pyro_nngp.native.structures import AdamStep

_NO_MEMORY = -1
_MARKS_PER_NUMBER = 512  # rows of a table per number, up to which marks of all rows cost less than a sort


def distinct(numbers: Tensor, padded: bool = False) -> tuple[Tensor, Tensor] | None:
    """Distinct numbers, ascending, and the position of each given number among them.

    Args:
        numbers: int64, of any shape.
        padded: whether there may be negative ones, which are left out and have the position -1.

    Returns:
        None where compiled code is not available or switched off, for other dtypes and devices, for negative numbers
        that are not expected, and for numbers so large that a sort is quicker.
    """
    if numbers.device.type != "cpu" or numbers.dtype != torch.int64 or not numbers.numel() or not enabled():
        return None
    numbers = contiguous("distinct", "numbers", numbers)
    count, places, rows = numbers.numel(), torch.empty_like(numbers), numbers.new_empty(numbers.numel())
    at = address("distinct", "numbers", numbers, tuple(numbers.shape), torch.int64)
    written = rows.data_ptr(), places.data_ptr()
    num_rows = loaded().nn_distinct(at, count, _MARKS_PER_NUMBER * count, padded, *written)
    if num_rows == _NO_MEMORY:
        raise MemoryError("distinct: no memory for marks of rows")
    return None if num_rows < 0 else (rows[:num_rows], places)


def adam_supported(table: Tensor) -> bool:
    """Whether compiled code is available, switched on, and covers this table."""
    return (
        table.device.type == "cpu"
        and table.dtype in (torch.float32, torch.float64)
        and table.dim() == 2
        and table.is_contiguous()
        and enabled()
    )


def adam_step(
    table: Tensor,
    first: Tensor,
    second: Tensor,
    rows: Tensor,
    grad: Tensor,
    rate: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Move some rows of a table (N, L) and of its two moments by a step of Adam, in place.

    Args:
        table: (N, L).
        first: first moments, (N, L).
        second: second moments, (N, L).
        rows: distinct rows (U,).
        grad: their gradients (U, L).
        rate: learning rate, corrected for the bias of the moments.
        betas: decay rates of the moments.
        eps: added to the square root of the second moment.

    Raises:
        ValueError, TypeError: for other shapes, dtypes or devices.
        IndexError: for rows that the table does not have.
    """
    where, shape, dtype = "adam_step", tuple(table.shape), table.dtype
    if table.dim() != 2 or dtype not in (torch.float32, torch.float64):
        fail(where, "table", "with 2 dimensions, float32 or float64", f"{dtype}, {table.dim()}", "Ask adam_supported.")
    read = {"rows": contiguous(where, "rows", rows), "grad": contiguous(where, "grad", grad)}
    layout = {
        "rows": (read["rows"], (rows.numel(),), torch.int64),
        "grad": (read["grad"], (rows.numel(), shape[1]), dtype),
        "table": (table, shape, dtype),
        "first": (first, shape, dtype),
        "second": (second, shape, dtype),
    }
    pointers = {name: address(where, name, *expected) for name, expected in layout.items()}
    sizes = {"num_rows": shape[0], "num_moved": rows.numel(), "num_columns": shape[1]}
    step = AdamStep(**sizes, rate=rate, beta1=betas[0], beta2=betas[1], eps=eps, **pointers)
    if loaded().nn_adam_step(ctypes.byref(step), dtype == torch.float64):
        fail(where, "rows", f"in 0..{shape[0] - 1}", f"{int(rows.min())}..{int(rows.max())}", "Check them.", IndexError)
    increment_version(table)
