"""Cholesky factors of covariance matrices: with a relative nugget, in batches, and with more nugget where one fails.

A covariance that is not positive definite in floating point gets an extra nugget, for that matrix only, with a warning.

Cost: O(B M^3). Symbols: B matrices of M x M.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

DEFAULT_JITTER = 1e-6
"""Relative nugget where none is given: a thousandth of the standard deviation."""

_ESCALATION = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
_PANEL, _PANELED = 16, range(80, 129)  # columns of a panel, and sizes at which LAPACK itself does not work in blocks


_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quiet_nuggets() -> Iterator[None]:
    """Do not warn of extra nuggets within this block, in this thread: for neighbors that the user did not ask for."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


class NotPositiveDefiniteError(torch.linalg.LinAlgError):
    """A neighbor covariance stayed indefinite after every jitter was tried."""


def cholesky(
    cov: Float[Tensor, "*B M M"], jitter: float = DEFAULT_JITTER, *, escalate: bool = False
) -> Float[Tensor, "*B M M"]:
    """Cholesky factors of covariance matrices with a relative nugget.

    Args:
        cov: covariance matrices.
        jitter: relative nugget.
        escalate: whether a matrix that has no factor gets a larger nugget, with a warning, instead of an error.

    Raises:
        NotPositiveDefiniteError: if some matrix has no factor; with `escalate`, not even with a nugget of 1e-2.
    """
    system = _with_nugget(cov, jitter) if jitter else cov
    if escalate:
        return _escalated(system)
    try:
        return torch.linalg.cholesky(system)
    except torch.linalg.LinAlgError as error:
        # Pyro's Hamiltonian Monte Carlo treats errors with these words as divergences.
        raise NotPositiveDefiniteError(
            f"cholesky: input is not positive-definite: a covariance of size {cov.shape[-1]} in {cov.dtype} with a "
            f"relative nugget of {jitter:.0e}. Coinciding points, a long lengthscale or NaN hyperparameters are the "
            "usual cause; a larger jitter or float64 helps with the first two."
        ) from error


def _with_nugget(cov: Tensor, jitter: float) -> Tensor:
    if torch.is_grad_enabled():
        return cov + torch.diag_embed(cov.diagonal(dim1=-2, dim2=-1) * jitter)
    system = cov.clone()
    system.diagonal(dim1=-2, dim2=-1).mul_(1 + jitter)
    return system


def _escalated(system: Tensor) -> Tensor:
    tril, info = torch.linalg.cholesky_ex(system)
    if not info.any():
        return tril
    with torch.no_grad():
        _, extra = factorize(system.detach().reshape(-1, *system.shape[-2:]))
    more = cast(Tensor, extra).reshape(*system.shape[:-2], 1).expand(system.shape[:-1])
    return torch.linalg.cholesky(system + torch.diag_embed(more))


def factorize(
    system: Tensor, cholesky_ex: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.linalg.cholesky_ex
) -> tuple[Tensor, Tensor | None]:
    """Cholesky factors, and what was added to the diagonals of members that failed (None: nothing)."""
    tril, info = cholesky_ex(system)
    failed = info > 0
    if not failed.any():
        return tril, None
    scale = system.diagonal(dim1=-2, dim2=-1).mean(-1)
    extra = torch.zeros_like(scale)
    for step in _ESCALATION:
        extra[failed] = step * scale[failed]
        retry = system[failed]
        retry.diagonal(dim1=-2, dim2=-1).add_(extra[failed][:, None])
        tril[failed], info = cholesky_ex(retry)
        again = torch.zeros_like(failed)
        again[failed] = info > 0
        count, failed = int((extra > 0).sum()), again
        if not failed.any():
            if not _QUIET.get():
                _warn_of_nuggets(count, step, system.dtype)
            return tril, extra
    raise _indefinite(str(int(failed.sum())), system.shape[-1], system.dtype)


def _warn_of_nuggets(count: int, step: float, dtype: torch.dtype) -> None:
    warnings.warn(
        f"cholesky: {count} of the covariances were indefinite in {dtype} and took an extra nugget of "
        f"up to {step:.0e} of the variance. Near-duplicate points or a long lengthscale are the usual cause; a larger "
        "jitter or float64 makes the nugget deliberate.",
        stacklevel=3,
    )


def _indefinite(count: str, size: int, dtype: torch.dtype) -> NotPositiveDefiniteError:
    # Pyro's Hamiltonian Monte Carlo treats errors with these words as divergences.
    return NotPositiveDefiniteError(
        f"cholesky: input is not positive-definite: {count} of the covariances of size {size} in "
        f"{dtype} stayed indefinite with relative nuggets {_ESCALATION}. NaN hyperparameters, or a kernel that is not "
        "positive definite, are the usual cause."
    )


_FLAGS: dict[tuple[torch.device, torch.dtype, int, bool], Tensor] = {}


def nugget_flags(device: torch.device, dtype: torch.dtype, size: int) -> Int[Tensor, " 2"]:
    """Counters on a device for code that factorizes there without the host: :func:`report_nuggets` reads them.

    The first is the number of the largest extra nugget that some matrix needed, 1 to 5, or 6 where none sufficed; the
    second is how many matrices needed one.
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
    found = [(key, flags.tolist()) for key, flags in _FLAGS.items()]
    for flags in _FLAGS.values():
        flags.zero_()
    for (_, dtype, size, quiet), (level, count) in found:
        if level > len(_ESCALATION):
            raise _indefinite(f"some of {count}", size, dtype)
        if level and not quiet:
            _warn_of_nuggets(count, _ESCALATION[level - 1], dtype)


def cholesky_ex(system: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factors of a batch, and LAPACK's info numbers: positive where the factorization failed.

    Where that is faster than one call of LAPACK per member, in batched products and on the transpose, whose rows lie
    together: each panel of rows less what those above it contribute, then times the inverse of its own triangle.
    """
    size = system.shape[-1]
    if system.device.type != "cpu" or size not in _PANELED:
        return torch.linalg.cholesky_ex(system)
    triu, info = torch.zeros_like(system), system.new_zeros(system.shape[:-2], dtype=torch.int32)
    for start in range(0, size, _PANEL):
        stop = min(start + _PANEL, size)
        panel = system[..., start:stop, start:]
        if start:
            panel = panel - triu[..., :start, start:stop].mT @ triu[..., :start, start:]
        tril, failed = torch.linalg.cholesky_ex(panel[..., : stop - start])
        eye = torch.eye(stop - start, dtype=system.dtype, device=system.device)
        triu[..., start:stop, start:stop] = tril.mT
        triu[..., start:stop, stop:] = (
            torch.linalg.solve_triangular(tril, eye, upper=False) @ panel[..., stop - start :]
        )
        info |= failed
    return triu.mT, info
