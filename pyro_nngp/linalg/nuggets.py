"""Extra nuggets of covariances that are not positive definite in floating point: levels, warnings and errors.

A failed factorization is tried again with the levels of `ESCALATION`, relative to the variance. Code on a GPU adds
nuggets without asking the host; it counts them in flags, which :func:`report_nuggets` reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Int
from torch import Tensor

from pyro_nngp._checks import warn

DEFAULT_JITTER = 1e-6
"""Relative nugget where none is given: a thousandth of the standard deviation."""

ESCALATION = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Extra nuggets relative to the mean of the diagonal, in the order in which they are tried."""

_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quiet_nuggets() -> Iterator[None]:
    """Do not warn of extra nuggets within this block, in this thread."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def are_quiet() -> bool:
    """Whether extra nuggets go without a warning in this thread now."""
    return _QUIET.get()


class NotPositiveDefiniteError(torch.linalg.LinAlgError):
    """A neighbor covariance stayed indefinite after every jitter was tried."""


def warn_of_nuggets(count: int, step: float, dtype: torch.dtype) -> None:
    """Warn that `count` covariances took extra nuggets of up to `step` of the variance."""
    warn(
        f"cholesky: {count} of the covariances were indefinite in {dtype} and took an extra nugget of "
        f"up to {step:.0e} of the variance. Near-duplicate points or a long lengthscale are the usual cause; a larger "
        "jitter or float64 makes the nugget deliberate."
    )


def indefinite(count: str, size: int, dtype: torch.dtype) -> NotPositiveDefiniteError:
    """Error for `count` covariances that stayed indefinite with the largest nugget.

    Pyro's Hamiltonian Monte Carlo treats errors with these words as divergences.
    """
    return NotPositiveDefiniteError(
        f"cholesky: input is not positive-definite: {count} of the covariances of size {size} in "
        f"{dtype} stayed indefinite with relative nuggets {ESCALATION}. NaN hyperparameters, or a kernel that is not "
        "positive definite, are the usual cause."
    )


_FLAGS: dict[tuple[torch.device, torch.dtype, int, bool], Tensor] = {}


def nugget_flags(device: torch.device, dtype: torch.dtype, size: int) -> Int[Tensor, " 2"]:
    """Counters of nuggets on a device, for code that factorizes there without the host.

    The first is the number of the largest extra nugget that some matrix needed, 1 to 5, or 6 where none sufficed; the
    second is how many matrices needed one. :func:`report_nuggets` reads them.
    """
    key = device, dtype, size, _QUIET.get()
    if key not in _FLAGS:
        _FLAGS[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _FLAGS[key]


def report_nuggets() -> None:
    """Warn of extra nuggets that were added on a device since the last call; the host waits for the device.

    Conditionals on a GPU add nuggets without asking the host, and give NaN where none suffices. ``fit`` calls this once
    per epoch and at its end.

    Raises:
        NotPositiveDefiniteError: if some matrix stayed indefinite.
    """
    reports = [(key, flags.tolist()) for key, flags in _FLAGS.items()]
    for flags in _FLAGS.values():
        flags.zero_()
    for (_, dtype, size, quiet), (level, count) in reports:
        if level > len(ESCALATION):
            raise indefinite(f"some of {count}", size, dtype)
        if level and not quiet:
            warn_of_nuggets(count, ESCALATION[level - 1], dtype)
