r"""Conjugate gradients for several positive definite systems at a time.

The iterations minimize the energy :math:`\tfrac12 z^\top A z - b^\top z`, and each lowers it by a known amount. The
last eight of these sum to an estimate, from below, of the energy that was missing eight iterations ago
(Strakoš and Tichý 2002).

Differs from ``scipy.sparse.linalg.cg``: torch tensors on any device, a batch of right-hand sides, each of which may
have a different system, and a stopping rule by energy. Cost: one product per iteration.
"""

import math
from collections import deque
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import warn

_DELAY = 8  # iterations in the estimate of the missing energy


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Float[Tensor, "*L N"],
    start: Float[Tensor, "*L N"] | None = None,
    diagonal: Float[Tensor, "*#L N"] | None = None,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
    norm: Callable[[Tensor], Tensor] | None = None,
    size: Float[Tensor, "*#L"] | None = None,
    every: int = 1,
    halving: bool = False,
    energy: bool = False,
    precondition: Callable[[Tensor], Tensor] | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Float[Tensor, "*L N"], float]:
    """Solve A z = right for positive definite A.

    Args:
        product: maps z to A z, for all right-hand sides at once.
        right: right-hand sides, in the precision of the solution; single precision serves well-conditioned A only.
        start: z to start from; None is zero.
        diagonal: positive diagonal preconditioner, such as the diagonal of A; None is the identity.
        tolerance: on the norm of the residual relative to `size`, or on the missing energy.
        max_iterations: largest number of iterations.
        norm: norm of residuals, (*L, N) to (*L); None is the Euclidean norm.
        size: None is the norm of the right-hand side.
        every: iterations between checks of the residual, for a norm that is expensive.
        halving: whether to stop when the residual has not halved since the last check.
        energy: whether the tolerance is on the energy missing at z relative to the energy of the solution, in place of
            the residual; from a start at zero only.
        precondition: maps residuals to the solutions of an approximate system; replaces `diagonal`.
        total: sums dot products over processes that hold parts of the vectors; `norm` does so itself.

    Returns:
        z, and the largest relative residual or missing energy: above `tolerance` if the iterations did not suffice, and
        NaN, at once, if a residual is NaN.
    """
    norm, total, tiny = _euclidean if norm is None else norm, total or _whole, torch.finfo(right.dtype).tiny
    z = torch.zeros_like(right) if start is None else start
    residual = right if start is None else right - product(start)
    size, worst = norm(right).clamp(min=tiny) if size is None else size, math.inf
    direction, before = torch.zeros_like(right), torch.ones_like(right[..., :1])
    gains: deque[Tensor] = deque(maxlen=_DELAY)

    def error() -> Tensor:
        if not energy:
            return norm(residual) / size
        missing = sum(gains) if len(gains) == _DELAY else math.inf
        return missing / (right * z).sum(-1).clamp(min=tiny)

    for iteration in range(max_iterations + 1):
        if iteration % every == 0 or iteration == max_iterations:
            last, worst = worst, float(error().max())
            if not worst > tolerance or iteration == max_iterations or (halving and worst > last / 2):
                break
        if precondition is not None:
            scaled = precondition(residual)
        else:
            scaled = residual if diagonal is None else residual / diagonal
        strength = total((residual * scaled).sum(-1, keepdim=True))
        direction = scaled + strength / before.clamp(min=tiny) * direction
        image = product(direction)
        step = strength / total((direction * image).sum(-1, keepdim=True)).clamp(min=tiny)
        z, residual, before = z + step * direction, residual - step * image, strength
        gains.append((step * strength)[..., 0])
    return z, worst


def warn_of_residual(where: str, residual: float, iterations: int) -> None:
    """Warn that the iterations ended at a relative residual above the tolerance, for a prior with Gaussian noise."""
    reached = f"after {iterations} iterations at a relative residual of {residual:.1e}"
    cause = "noise far below the conditional variances of the prior"
    if math.isnan(residual):
        reached, cause = "at a residual of NaN", "NaN among data or hyperparameters"
    warn(f"{where}: conjugate gradients stopped {reached}. The usual cause is {cause}.")


def _whole(part: Tensor) -> Tensor:
    return part


def _euclidean(residual: Tensor) -> Tensor:
    return residual.norm(dim=-1)
