"""Checks of user input: messages name the caller, the argument, the expected and the actual value, and the cure."""

import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

_LARGEST = 1e150  # larger coordinates have no finite squared distances
_INNER = ("pyro_nngp", "pyro", "torch", "contextlib")
_ROWS_TRUSTED: ContextVar[int] = ContextVar("rows_trusted", default=0)


@contextmanager
def trusted_rows() -> Iterator[None]:
    """Leave the values of row numbers unchecked within this block, in this thread: on a GPU each check waits for it."""
    _ROWS_TRUSTED.set(_ROWS_TRUSTED.get() + 1)  # counted: blocks may not end in the order of nesting
    try:
        yield
    finally:
        _ROWS_TRUSTED.set(_ROWS_TRUSTED.get() - 1)


def fail(
    where: str,
    arg: str,
    expectation: str,
    actual: Any,
    cure: str,
    error: type[Exception] = ValueError,
    cause: BaseException | None = None,
) -> NoReturn:
    """Raise `error` with the message `"{where}: expected {arg} {expectation}, got {actual}. {cure}"`.

    `cause` is the underlying error of another library, if any.
    """
    raised = error(f"{where}: expected {arg} {expectation}, got {actual}. {cure}")
    if cause is not None:
        raise raised from cause
    raise raised


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the first caller outside this package, Pyro and torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, level)


def undefined(instance: Any, hook: str, kind: str, cure: str = "See docs/howto/write_a_method.md.") -> NoReturn:
    """Raise ``NotImplementedError`` for a method that a subclass has to define."""
    fail(type(instance).__name__, hook, f"to be defined by the {kind}", "nothing", cure, NotImplementedError)


def check_tensor(where: str, arg: str, value: Any) -> None:
    """Raise `TypeError` unless `value` is a dense tensor with values, in a dtype that LAPACK or indexing supports."""
    if not isinstance(value, Tensor):
        source = f"{arg}.to_numpy()" if hasattr(value, "to_numpy") else arg
        cure = f"Convert it with torch.as_tensor({source})."
        fail(where, arg, "to be a torch.Tensor", type(value).__name__, cure, TypeError)
    if value.layout != torch.strided:
        fail(where, arg, "to be a dense tensor", value.layout, "Call .to_dense() on it.", TypeError)
    if value.is_meta and type(value) is Tensor and not is_batchedtensor(value):
        fail(where, arg, "to have values", "a meta tensor", "Move it with .to_empty() and fill it.", TypeError)
    if value.is_complex() or value.dtype in (torch.float16, torch.bfloat16):
        cure = "Call .float() or .double() on it."
        fail(where, arg, "in float32, float64, integers or booleans", value.dtype, cure, TypeError)


def check_int(where: str, arg: str, value: Any, least: int | None = None, cure: str = "Pass a plain integer.") -> None:
    """Raise unless `value` is an int, and at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        fail(where, arg, "to be an int", f"{value!r:.40}", cure, TypeError)
    if least is not None and value < least:
        fail(where, arg, f">= {least}", value, cure)


def check_seed(where: str, seed: Any) -> None:
    """Raise unless `seed` is an integer that torch's generators accept."""
    check_int(where, "seed", seed)
    if not -(2**63) <= seed < 2**64:
        fail(where, "seed", "in -2**63..2**64-1", seed, "Pass a smaller integer.")


def check_number(where: str, arg: str, value: Any, least: float = 0.0, cure: str = "Pass a number.") -> None:
    """Raise unless `value` is a finite number, and at least `least`."""
    _check_real(where, arg, value, cure)
    if not (math.isfinite(value) and value >= least):
        fail(where, arg, f"to be finite and >= {least:g}", value, cure)


def check_fraction(where: str, arg: str, value: Any, cure: str) -> None:
    """Raise unless `value` is a number in (0, 1)."""
    check_number(where, arg, value, cure=cure)
    if not 0 < value < 1:
        fail(where, arg, "in (0, 1)", value, cure)


def check_positive(where: str, arg: str, value: Any, cure: str = "Pass a number.", most: float = math.inf) -> None:
    """Raise unless `value` is a finite number > 0, and at most `most`."""
    _check_real(where, arg, value, cure)
    if not (0 < value <= most and value < math.inf):
        fail(where, arg, "to be finite and > 0" + (f" and <= {most:g}" if most < math.inf else ""), value, cure)


def _check_real(where: str, arg: str, value: Any, cure: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail(where, arg, "to be a number", f"{value!r:.40}", cure, TypeError)
    if isinstance(value, int) and abs(value) >= 2**63:
        fail(where, arg, "in the range of 64-bit integers", f"{value!r:.40}", "Pass a float for such a number.")


def check_gradients(where: str, tensors: Iterable[Tensor]) -> None:
    """Raise ``RuntimeError`` if gradients are switched off, or tensors come from ``torch.inference_mode``."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        how = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        fail(where, "gradients", "to be on", how, f"Call {where} outside of it.", RuntimeError)
    if any(tensor.is_inference() for tensor in tensors):
        cure = "Build the method outside of torch.inference_mode()."
        fail(where, "parameters", "that can have gradients", "some made in torch.inference_mode()", cure, RuntimeError)


def check_memory(
    where: str, what: str, entries: int, dtype: torch.dtype, cure: str = "Ask for less at a time."
) -> None:
    """Raise `MemoryError` if a result of that many entries exceeds the memory of the machine."""
    if not hasattr(os, "sysconf"):  # not on Windows
        return
    size, total = entries * dtype.itemsize, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > total:
        cure = f"The machine has {total / 2**30:.0f} GiB. {cure}"
        fail(where, what, "to fit into memory", f"{size / 2**30:.0f} GiB", cure, MemoryError)


def check_path(where: str, arg: str, value: Any) -> None:
    """Raise ``TypeError`` unless `value` names a file."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        fail(where, arg, "to be a path", type(value).__name__, "Name a file.", TypeError)


def import_extra(where: str, name: str, extra: str) -> Any:
    """A module that an extra of the package installs, or one that it has.

    Raises:
        ImportError: if it is not installed.
    """
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        missing_extra(where, package, extra, error)


def missing_extra(where: str, package: str, extra: str, cause: Exception | None = None) -> NoReturn:
    """Raise ``ImportError`` for a package that an extra of this one installs."""
    cure = f"Run pip install 'pyro-nngp[{extra}]'."
    fail(where, package, "to be installed", "no such package", cure, ImportError, cause)


def check_device(where: str, device: Any) -> None:
    """Raise unless `device` names a device of torch that this process can use."""
    try:
        torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        fail(where, "device", "to be a device of torch", f"{device!r:.40}", 'Pass "cpu" or "cuda".')
    try:
        torch.empty(0, device=device)
    except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:
        actual, cure = f"{str(device)!r} ({error!s:.120})", 'Pass "cpu", or install a build of torch for that device.'
        fail(where, "device", "that torch can use here", actual, cure, cause=error)


def check_finite(where: str, arg: str, value: Tensor) -> None:
    """Raise `ValueError` if a floating-point tensor holds NaN or infinity."""
    if value.is_meta and type(value) is Tensor and not is_batchedtensor(value):
        fail(where, arg, "to hold values", "a meta tensor", "Put it on a device that has memory.")
    finite = torch.isfinite(value)
    if not finite.all():
        bad, rows = int((~finite).sum()), ""
        if value.dim() == 2:
            rows = f" in {int((~finite).any(1).sum())} of {len(value)} rows"
        fail(where, arg, "to be finite", f"{bad} NaN or infinite entries{rows}", "Drop or impute them first.")


def check_floating(where: str, arg: str, value: Any) -> None:
    """Raise ``TypeError`` unless `value` is a dense floating-point tensor."""
    check_tensor(where, arg, value)
    if not value.is_floating_point():
        fail(where, arg, "of a floating-point dtype", value.dtype, "Call .float() or .double() on it.", TypeError)


def check_inputs(where: str, arg: str, x: Any, cure: str = "Use x[:, None] for one input dimension.") -> None:
    """Raise unless `x` is a finite floating-point tensor of shape (N, D) with N, D >= 1."""
    check_tensor(where, arg, x)
    if x.dim() != 2 or x.shape[0] < 1 or x.shape[1] < 1:
        cure = cure if x.dim() != 2 else "Give at least one row and one column."
        fail(where, arg, "of shape (N, D) with N, D >= 1", tuple(x.shape), cure)
    check_floating(where, arg, x)
    check_finite(where, arg, x)


def check_coordinates(where: str, arg: str, x: Any) -> None:
    """As :func:`check_inputs`; raise ``ValueError`` also for coordinates whose squared distances may not be finite."""
    check_inputs(where, arg, x)
    largest = float(x.detach().abs().max())
    if largest > _LARGEST:
        fail(where, arg, f"at most {_LARGEST:g} in size", f"{largest:g}", "Rescale the inputs.")


def check_lengthscales(where: str, arg: str, value: Any, num_columns: int) -> None:
    """Raise unless `value` holds positive numbers, one for each column or one for all."""
    check_tensor(where, arg, value)
    if value.shape not in ((), (num_columns,)):
        cure = "Give one per input dimension."
        fail(where, arg, f"a scalar or of shape ({num_columns},)", tuple(value.shape), cure)
    check_finite(where, arg, value)
    if (value <= 0).any():
        fail(where, arg, "> 0", float(value.min()), "Inputs are divided by it.")


def check_new_inputs(where: str, x_new: Any, x: Tensor) -> None:
    """Raise unless `x_new` has the number of columns, dtype and device of `x`."""
    one = "Use x_new[:, None] for one input dimension."
    check_inputs(where, "x_new", x_new, one if x.shape[1] == 1 else "Use x_new[None] for a single point.")
    check_same_kind(where, x=x, x_new=x_new)
    if x_new.shape[1] != x.shape[1]:
        expectation = f"with {x.shape[1]} columns, as x has"
        fail(where, "x_new", expectation, x_new.shape[1], "Give the same input dimensions.")


def check_choice(where: str, arg: str, value: Any, choices: Iterable[str], cure: str = "Choose one of them.") -> None:
    """Raise `ValueError` unless `value` is one of a few names."""
    choices = tuple(choices)
    if not isinstance(value, str | None) or value not in choices:
        fail(where, arg, "to be " + " or ".join(map(repr, choices)), repr(value), cure)


def check_num_neighbors(where: str, k: Any, limit: int, arg: str = "num_neighbors") -> None:
    """Raise unless `k` is an integer with 1 <= k <= limit."""
    if isinstance(k, bool) or not isinstance(k, int):
        fail(where, arg, "to be an int", type(k).__name__, "Pass a plain integer.", TypeError)
    if not 1 <= k <= limit:
        fail(where, arg, f"in 1..{limit}", k, "Choose fewer neighbors, or give more points.")


def check_rows(where: str, arg: str, rows: Any, num_points: int, size: int | None = None, lowest: int = 0) -> None:
    """Raise unless `rows` holds `size` (None: at least one) row numbers in lowest..num_points-1.

    Within :func:`trusted_rows`, and under :func:`torch.func.vmap`, which hides them, values are not checked.
    """
    check_tensor(where, arg, rows)
    if rows.dtype != torch.int64:
        fail(where, arg, "of dtype torch.int64", rows.dtype, "Give row numbers of x.", TypeError)
    if rows.dim() != 1 or (len(rows) == 0 if size is None else len(rows) != size):
        expectation = "of shape (B,) with B >= 1" if size is None else f"of shape ({size},)"
        fail(where, arg, expectation, tuple(rows.shape), "Give a vector of row numbers of x.")
    if _ROWS_TRUSTED.get() or is_batchedtensor(rows):
        return
    if len(rows) and (rows.min() < lowest or rows.max() >= num_points):
        actual = f"{int(rows.min())}..{int(rows.max())}"
        fail(where, arg, f"in {lowest}..{num_points - 1}", actual, "Give row numbers of x.")


def check_row_numbers(where: str, arg: str, rows: Tensor, num_points: int) -> None:
    """Raise unless `rows`, of any shape, is int64 with numbers of -1..num_points-1.

    Values are checked on a CPU only, and neither under :func:`torch.func.vmap` nor within :func:`trusted_rows`.
    """
    if rows.dtype != torch.int64:
        fail(where, arg, "of dtype torch.int64", rows.dtype, "Give row numbers, -1 for none.", TypeError)
    if rows.device.type != "cpu" or is_batchedtensor(rows) or not rows.numel() or _ROWS_TRUSTED.get():
        return
    low, high = (int(bound) for bound in rows.aminmax())
    if low < -1 or high >= num_points:
        fail(where, arg, f"in -1..{num_points - 1}", f"{low}..{high}", "Give row numbers, -1 for none.", IndexError)


def check_batch(where: str, arg: str, rows: Any, num_points: int) -> None:
    """Raise unless `rows` holds distinct row numbers in 0..num_points-1, at least one.

    Under :func:`torch.func.vmap`, which hides values, they are not checked, nor within :func:`trusted_rows`.
    """
    if isinstance(rows, Tensor) and is_batchedtensor(rows):
        return
    check_rows(where, arg, rows, num_points)
    if _ROWS_TRUSTED.get():
        return
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


def warn_if_coarse(where: str, x: Tensor) -> None:
    """Warn if the dtype of a column barely resolves its values, as with UTM meters in float32."""
    sample = x.detach()[:: max(1, len(x) // 4096)].double()
    largest = sample.abs().amax(0)
    values = sample.sort(0).values.diff(dim=0)
    coarse = torch.finfo(x.dtype).eps * largest
    apart = values > 0
    typical = torch.where(apart, values, torch.nan).nanmedian(0).values
    total = sample.amax(0) - sample.amin(0)
    bad = apart.any(0) & (typical * len(sample) / len(x) <= 4 * coarse) & (total < 1e4 * coarse)
    if bool(bad.any()):
        columns = bad.nonzero()[:, 0].tolist()
        warn(
            f"{where}: columns {columns} of x hold {float(largest[columns[0]]):.3g} +- {float(total[columns[0]]):.2g}, "
            f"of which {x.dtype} keeps steps of {float(coarse[columns[0]]):.2g}. Subtract their means before the "
            "conversion, or pass float64."
        )
