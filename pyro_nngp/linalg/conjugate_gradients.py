r"""Conjugate gradients for several positive definite systems at a time.

Differs from ``scipy.sparse.linalg.cg``: torch tensors on any device, and right-hand sides in a batch that may each have
a system of their own. Cost: one product per iteration.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

_TINY = torch.finfo(torch.float64).tiny


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
) -> tuple[Float[Tensor, "*L N"], float]:
    """Solve A z = right for positive definite A.

    Args:
        product: z to A z, for all right-hand sides at once.
        right: right-hand sides, in double precision.
        start: z to start from; None is zero.
        diagonal: positive, the preconditioner, such as the diagonal of A; None is the identity.
        tolerance: on the norm of the residual relative to `size`.
        max_iterations: at most so many.
        norm: of residuals, (*L, N) to (*L); None is the Euclidean one.
        size: None is the norm of the right-hand side.
        every: iterations between looks at the residual, where its norm is expensive.
        halving: whether to stop where the residual is not half of what it was at the look before.

    Returns:
        z, and the largest relative residual: above `tolerance` if the iterations did not suffice.
    """
    norm = _euclidean if norm is None else norm
    z = torch.zeros_like(right) if start is None else start
    residual = right if start is None else right - product(start)
    size, worst = norm(right).clamp(min=_TINY) if size is None else size, math.inf
    direction, before = torch.zeros_like(right), torch.ones_like(right[..., :1])
    for iteration in range(max_iterations + 1):
        if iteration % every == 0 or iteration == max_iterations:
            last, worst = worst, float((norm(residual) / size).max())
            if worst <= tolerance or iteration == max_iterations or (halving and worst > last / 2):
                break
        scaled = residual if diagonal is None else residual / diagonal
        strength = (residual * scaled).sum(-1, keepdim=True)
        direction = scaled + strength / before.clamp(min=_TINY) * direction
        image = product(direction)
        step = strength / (direction * image).sum(-1, keepdim=True).clamp(min=_TINY)
        z, residual, before = z + step * direction, residual - step * image, strength
    return z, worst


def _euclidean(residual: Tensor) -> Tensor:
    return residual.norm(dim=-1)
