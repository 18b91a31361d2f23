r"""Conjugate gradients for several positive definite systems at a time.

Differs from ``scipy.sparse.linalg.cg``: torch tensors on any device, and right-hand sides in a batch that may each have
a system of their own. Cost: one product per iteration.
"""

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
) -> tuple[Float[Tensor, "*L N"], float]:
    """Solve A z = right for positive definite A.

    Args:
        product: z to A z, for all right-hand sides at once.
        right: right-hand sides, in double precision.
        start: z to start from; None is zero.
        diagonal: positive, the preconditioner, such as the diagonal of A; None is the identity.
        tolerance: on the norm of the residual relative to that of the right-hand side.
        max_iterations: at most so many.

    Returns:
        z, and the largest relative residual: above `tolerance` if the iterations did not suffice.
    """
    z = torch.zeros_like(right) if start is None else start
    residual = right if start is None else right - product(start)
    size = right.norm(dim=-1).clamp(min=_TINY)
    direction, before = torch.zeros_like(right), torch.ones_like(right[..., :1])
    for iteration in range(max_iterations + 1):
        worst = float((residual.norm(dim=-1) / size).max())
        if worst <= tolerance or iteration == max_iterations:
            break
        scaled = residual if diagonal is None else residual / diagonal
        strength = (residual * scaled).sum(-1, keepdim=True)
        direction = scaled + strength / before.clamp(min=_TINY) * direction
        image = product(direction)
        step = strength / (direction * image).sum(-1, keepdim=True).clamp(min=_TINY)
        z, residual, before = z + step * direction, residual - step * image, strength
    return z, worst
