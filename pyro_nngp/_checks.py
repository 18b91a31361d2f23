"""Checks of user input: a message names the place, the argument, what was expected, what came, and the cure."""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor


def fail(
    where: str, arg: str, expectation: str, actual: Any, cure: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raise `error` in the house format `"{where}: expected {arg} {expectation}, got {actual}. {cure}"`."""
    raise error(f"{where}: expected {arg} {expectation}, got {actual}. {cure}")


def check_tensor(where: str, arg: str, value: Any) -> None:
    """Raise `TypeError` unless `value` is a dense tensor."""
    if not isinstance(value, Tensor):
        fail(where, arg, "to be a torch.Tensor", type(value).__name__, "Convert it with torch.as_tensor.", TypeError)
    if value.layout != torch.strided:
        fail(where, arg, "to be a dense tensor", value.layout, "Call .to_dense() on it.", TypeError)


def check_finite(where: str, arg: str, value: Tensor) -> None:
    """Raise `ValueError` if a floating-point tensor holds NaN or infinity."""
    if value.is_meta:
        fail(where, arg, "to hold values", "a meta tensor", "Put it on a device that has memory.")
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        fail(where, arg, "to be finite", f"{bad} NaN or infinite entries", "Drop or impute them first.")


def check_inputs(where: str, arg: str, x: Any, cure: str = "Use x[:, None] for one input dimension.") -> None:
    """Raise unless `x` is a finite floating-point tensor of shape (N, D) with N, D >= 1."""
    check_tensor(where, arg, x)
    if x.dim() != 2 or x.shape[0] < 1 or x.shape[1] < 1:
        fail(where, arg, "of shape (N, D) with N, D >= 1", tuple(x.shape), cure)
    if not x.is_floating_point():
        fail(where, arg, "of a floating-point dtype", x.dtype, "Call .float() or .double() on it.", TypeError)
    check_finite(where, arg, x)


def check_new_inputs(where: str, x_new: Any, x: Tensor) -> None:
    """Raise unless `x_new` are inputs of the same number of columns, dtype and device as `x`."""
    one = "Use x_new[:, None] for one input dimension."
    check_inputs(where, "x_new", x_new, one if x.shape[1] == 1 else "Use x_new[None] for a single point.")
    check_same_kind(where, x=x, x_new=x_new)
    if x_new.shape[1] != x.shape[1]:
        expectation = f"with {x.shape[1]} columns, as x has"
        fail(where, "x_new", expectation, x_new.shape[1], "Give the same input dimensions.")


def check_choice(where: str, arg: str, value: Any, choices: Iterable[str], cure: str = "Choose one of them.") -> None:
    """Raise `ValueError` unless `value` is one of a few names."""
    choices = tuple(choices)
    if value not in choices:
        fail(where, arg, "to be " + " or ".join(map(repr, choices)), repr(value), cure)


def check_num_neighbors(where: str, k: Any, limit: int, arg: str = "num_neighbors") -> None:
    """Raise unless `k` is an integer with 1 <= k <= limit."""
    if isinstance(k, bool) or not isinstance(k, int):
        fail(where, arg, "to be an int", type(k).__name__, "Pass a plain integer.", TypeError)
    if not 1 <= k <= limit:
        fail(where, arg, f"in 1..{limit}", k, "Choose fewer neighbors, or give more points.")


def check_rows(where: str, arg: str, rows: Any, num_points: int, size: int | None = None, lowest: int = 0) -> None:
    """Raise unless `rows` holds `size` (None: at least one) row numbers in lowest..num_points-1."""
    check_tensor(where, arg, rows)
    if rows.dtype != torch.int64:
        fail(where, arg, "of dtype torch.int64", rows.dtype, "Give row numbers of x.", TypeError)
    if rows.dim() != 1 or (len(rows) == 0 if size is None else len(rows) != size):
        expectation = "of shape (B,) with B >= 1" if size is None else f"of shape ({size},)"
        fail(where, arg, expectation, tuple(rows.shape), "Give a vector of row numbers of x.")
    if len(rows) and (rows.min() < lowest or rows.max() >= num_points):
        actual = f"{int(rows.min())}..{int(rows.max())}"
        fail(where, arg, f"in {lowest}..{num_points - 1}", actual, "Give row numbers of x.")


def check_row_numbers(where: str, arg: str, rows: Tensor, num_points: int) -> None:
    """Raise unless `rows`, of any shape, is int64 with numbers of -1..num_points-1.

    Values are looked at on a CPU alone, where that costs next to nothing, and not under :func:`torch.func.vmap`.
    """
    if rows.dtype != torch.int64:
        fail(where, arg, "of dtype torch.int64", rows.dtype, "Give row numbers, -1 for none.", TypeError)
    if rows.device.type != "cpu" or is_batchedtensor(rows) or not rows.numel():
        return
    low, high = (int(bound) for bound in rows.aminmax())
    if low < -1 or high >= num_points:
        fail(where, arg, f"in -1..{num_points - 1}", f"{low}..{high}", "Give row numbers, -1 for none.", IndexError)


def check_batch(where: str, arg: str, rows: Any, num_points: int) -> None:
    """Raise unless `rows` holds distinct row numbers in 0..num_points-1, at least one.

    Under :func:`torch.func.vmap`, which has no values to look at, it passes.
    """
    if isinstance(rows, Tensor) and is_batchedtensor(rows):
        return
    check_rows(where, arg, rows, num_points)
    if repeats := len(rows) - len(rows.unique()):
        fail(where, arg, "without repeats", f"{repeats} repeats", "Draw without replacement.")


def check_same_kind(where: str, **tensors: Tensor) -> None:
    """Raise unless all floating-point tensors share one dtype and one device."""
    (first, ref), *rest = tensors.items()
    for arg, value in rest:
        if value.device != ref.device:
            fail(where, arg, f"on the device of {first} ({ref.device})", value.device, "Move it with .to(device).")
        if value.is_floating_point() and ref.is_floating_point() and value.dtype != ref.dtype:
            fail(where, arg, f"of the dtype of {first} ({ref.dtype})", value.dtype, "Convert one of them.", TypeError)
