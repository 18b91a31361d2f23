"""The K x K systems of the nearest-neighbor conditional: assembled, factorised, solved, differentiated.

Formulas are in :mod:`pyro_nngp.conditional`. A covariance that is not positive definite in floating point takes an
extra nugget, its own and no one else's, and says so.

Cost: O(B K^3) time, O(B K^2) memory.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_nngp.kernels import Covariance

_ESCALATION = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
_CHUNK_BYTES = 2**20


class NotPositiveDefiniteError(torch.linalg.LinAlgError):
    """A neighbor covariance stayed indefinite after every jitter was tried."""


def block_conditional(
    cov: Covariance, x: Tensor, points: Tensor, neighbors: Tensor, noise: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor]:
    """Any covariance function: its blocks are evaluated, and differentiated, chunk by chunk."""
    rows, padded, parts = neighbors.clamp(min=0), bool((neighbors < 0).any()), []
    for part in chunks(x, neighbors.shape[1]):
        target, z = x[part], points[rows[part]]
        mask = neighbors[part] >= 0 if padded else None
        cov_nn, cov_nx, cov_xx = cov(z, z), cov(target[:, None], z)[:, 0], cov.diag(target)
        if noise is None or noise.dim() == 2:
            added = None if noise is None else noise[part]
            parts.append(Conditional.apply(cov_nn, cov_nx, cov_xx, added, mask, jitter))
        else:
            each = [Conditional.apply(cov_nn, cov_nx, cov_xx, added[part], mask, jitter) for added in noise]
            parts.append(tuple(torch.stack(values) for values in zip(*each, strict=True)))
    if len(parts) == 1:
        return parts[0]
    weights, variances = zip(*parts, strict=True)
    return torch.cat(weights, -2), torch.cat(variances, -1)


class Conditional(torch.autograd.Function):
    """(K_nn, k_n, k_xx, noise) -> (w, v) with the gradient of :mod:`pyro_nngp.conditional`."""

    @staticmethod
    def forward(
        ctx: Any,
        cov_nn: Tensor,
        cov_nx: Tensor,
        cov_xx: Tensor,
        noise: Tensor | None,
        mask: Tensor | None,
        jitter: float,
    ) -> tuple[Tensor, Tensor]:
        w, var, tril, extra, inside = solve(cov_nn.clone(), cov_nx, cov_xx, noise, mask, jitter)
        ctx.save_for_backward(cov_nn, cov_nx, noise, mask, tril, w, extra, inside)
        ctx.jitter = jitter
        return w, var

    @staticmethod
    def backward(ctx: Any, grad_w: Tensor, grad_var: Tensor) -> tuple[Tensor | None, ...]:
        cov_nn, cov_nx, noise, mask, tril, w, extra, inside = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: redo the forward pass under autograd
            system = _system(cov_nn.clone(), noise, mask, ctx.jitter)
            if extra is not None:
                system.diagonal(dim1=-2, dim2=-1).add_(extra[:, None])
            tril = torch.linalg.cholesky(system)
            w = torch.cholesky_solve((cov_nx if mask is None else cov_nx * mask)[..., None], tril)[..., 0]
        left, vw = solve_gradient(grad_w, grad_var * inside, w, tril, mask)
        grad_nn = left[..., None] * w[..., None, :]
        grad_diag = left * w
        grad_nn.diagonal(dim1=-2, dim2=-1).add_(grad_diag, alpha=ctx.jitter)
        grad_noise = None if noise is None else grad_diag
        return grad_nn, -left - vw, grad_var * inside * (1 + ctx.jitter), grad_noise, None, None


def chunks(x: Tensor, num_neighbors: int) -> Iterator[slice]:
    """Slices of the targets x whose K x K temporaries stay in the processor's cache; on a GPU one slice is all."""
    size = len(x)
    if x.device.type == "cpu":
        size = max(16, _CHUNK_BYTES // (num_neighbors**2 * x.element_size()))
    return (slice(start, start + size) for start in range(0, len(x), size))


def solve(
    cov_nn: Tensor, cov_nx: Tensor, cov_xx: Tensor, noise: Tensor | None, mask: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """w, v, the Cholesky factor, what it took beyond the nugget (None: nothing), and where v is above its floor.

    K_nn is overwritten.
    """
    tril, extra = factorise(_system(cov_nn, noise, mask, jitter))
    rhs = cov_nx if mask is None else cov_nx * mask
    half = torch.linalg.solve_triangular(tril, rhs[..., None], upper=False)
    w = torch.linalg.solve_triangular(tril.mT, half, upper=True)[..., 0]
    var, inside = variance_left(cov_xx, half[..., 0], jitter)
    return w, var, tril, extra, inside


def variance_left(cov_xx: Tensor, half: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """v = (1 + jitter) k_xx - |half|^2, half = L^-1 k, not below its floor; and where it is above."""
    var = cov_xx * (1 + jitter) - half.square().sum(-1)
    # In exact arithmetic v >= jitter * k_xx; rounding may not know it.
    floor = (jitter * cov_xx).clamp(min=torch.finfo(var.dtype).tiny)
    return torch.maximum(var, floor), var >= floor


def solve_gradient(
    grad_w: Tensor, grad_var: Tensor, w: Tensor, tril: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """grad_v w - a and grad_v w, of which every gradient is made, with a = K_nn^-1 grad_w."""
    if mask is not None:
        grad_w = grad_w * mask
    vw = grad_var[:, None] * w
    return vw - torch.cholesky_solve(grad_w[..., None], tril)[..., 0], vw


def _system(cov_nn: Tensor, noise: Tensor | None, mask: Tensor | None, jitter: float) -> Tensor:
    """Put nugget and noise on the diagonal of K_nn, and for masked neighbors rows and columns of the identity."""
    own = cov_nn.diagonal(dim1=-2, dim2=-1)
    added = own * jitter if noise is None else own * jitter + noise
    if mask is not None:
        added = torch.where(mask, added, 1.0)
        cov_nn.mul_(mask[..., None] & mask[..., None, :])
    cov_nn.diagonal(dim1=-2, dim2=-1).add_(added)
    return cov_nn


def factorise(system: Tensor) -> tuple[Tensor, Tensor | None]:
    """Cholesky factors, and what had to be added to the diagonal of the members that failed (None: nothing)."""
    tril, info = torch.linalg.cholesky_ex(system)
    failed = info > 0
    if not failed.any():
        return tril, None
    scale = system.diagonal(dim1=-2, dim2=-1).mean(-1)
    extra = torch.zeros_like(scale)
    for step in _ESCALATION:
        extra[failed] = step * scale[failed]
        retry = system[failed]
        retry.diagonal(dim1=-2, dim2=-1).add_(extra[failed][:, None])
        tril[failed], info = torch.linalg.cholesky_ex(retry)
        again = torch.zeros_like(failed)
        again[failed] = info > 0
        count, failed = int((extra > 0).sum()), again
        if not failed.any():
            warnings.warn(
                f"nn_conditional: {count} of the neighbor covariances were indefinite in {system.dtype} and took an "
                f"extra nugget of up to {step:.0e} of the variance. Near-duplicate points or a long lengthscale are "
                "the usual cause; a larger jitter or float64 makes the nugget deliberate.",
                stacklevel=2,
            )
            return tril, extra
    # Pyro's Hamiltonian Monte Carlo takes errors with these words for a divergence and goes on.
    raise NotPositiveDefiniteError(
        f"nn_conditional: input is not positive-definite: {int(failed.sum())} of the neighbor covariances of "
        f"size {system.shape[-1]} in {system.dtype} stayed indefinite with relative nuggets {_ESCALATION}. NaN "
        "hyperparameters, or a kernel that is not positive definite, are the usual cause."
    )
