"""The K x K systems of the nearest-neighbor conditional: assembled, factorized, solved, differentiated.

Formulas are in :mod:`pyro_nngp.conditionals.nearest_neighbor`. A covariance that is not positive definite in floating
point gets an extra nugget, for that matrix only, with a warning.

Cost: O(B K^3) time, O(B K^2) memory.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from pyro_nngp._autograd import apply
from pyro_nngp._checks import fail
from pyro_nngp._memory import at_once
from pyro_nngp.kernels import Covariance
from pyro_nngp.linalg import cholesky, factor_solve, half_solve
from pyro_nngp.linalg.dense_factor import factorize

_CHUNK_BYTES = 2**20


def block_conditional(
    cov: Covariance,
    x: Tensor,
    points: Tensor,
    neighbors: Tensor,
    noise: Tensor | None,
    jitter: float,
    explained: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights and variances for any covariance function, which is evaluated and differentiated chunk by chunk.

    Noise (*L, B, K) broadcasts against the batch dimensions of the kernel, which results begin with. `explained` are
    covariances to subtract: among the neighbors (B, K, K), of these with the target (B, K), and of the target (B,).
    """
    rows, parts = neighbors.clamp(min=0), []
    padded = may_lack(neighbors)
    batch = torch.Size() if noise is None else noise.shape[:-2]
    for part in chunks(x, neighbors.shape[1], batch.numel() * (cov.batch_shape or batch[:0]).numel()):
        target, z = x[part], points[rows[part]]
        mask = neighbors[part] >= 0 if padded else None
        cov_nn, cov_nx, cov_xx = cov(z, z), cov(target[:, None], z)[..., 0, :], cov.diag(target)
        if explained is not None:
            among, cross, own = (value[part] for value in explained)
            cov_nn, cov_nx, cov_xx = cov_nn - among, cov_nx - cross, (cov_xx - own).clamp(min=0)
        added = None if noise is None else noise[..., part, :]
        parts.append(_member_by_member(cov_nn, cov_nx, cov_xx, added, mask, jitter))
    if len(parts) == 1:
        return parts[0]
    weights, variances = zip(*parts, strict=True)
    return torch.cat(weights, -2), torch.cat(variances, -1)


def may_lack(neighbors: Tensor) -> bool:
    """Whether neighbors may be missing, so that masks are needed; True on a GPU, where looking would wait for it."""
    return neighbors.device.type != "cpu" or is_batchedtensor(neighbors) or bool((neighbors < 0).any())


def _member_by_member(
    cov_nn: Tensor, cov_nx: Tensor, cov_xx: Tensor, noise: Tensor | None, mask: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor]:
    """Apply :class:`Conditional` to arguments whose further leading dimensions broadcast."""
    given = (cov_nn, 2), (cov_nx, 1), (cov_xx, 0), (noise, 1), (mask, 1)
    batch = torch.broadcast_shapes(*(value.shape[: -rank - 1] for value, rank in given if value is not None))
    if not batch:
        return apply(Conditional, cov_nn, cov_nx, cov_xx, noise, mask, jitter)[:2]
    flat = [None if value is None else _flat(value, batch, rank) for value, rank in given]
    w, var = apply(Conditional, *flat, jitter)[:2]
    return w.view(*batch, *cov_nx.shape[-2:]), var.view(*batch, cov_xx.shape[-1])


def _flat(value: Tensor, batch: torch.Size, rank: int) -> Tensor:
    """Flatten the dimensions (*batch, B) of a value, B x `rank` further dimensions, into one."""
    inner = value.shape[value.dim() - rank - 1 :]
    return value.expand(*batch, *inner).reshape(-1, *inner[1:])


class Conditional(torch.autograd.Function):
    """(K_nn, k_n, k_xx, noise) -> (w, v, saved tensors), with the analytic gradient."""

    @staticmethod
    def forward(
        cov_nn: Tensor, cov_nx: Tensor, cov_xx: Tensor, noise: Tensor | None, mask: Tensor | None, jitter: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        w, var, *kept = solve(cov_nn.clone(), cov_nx, cov_xx, noise, mask, jitter)
        return w, var, tuple(kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        (cov_nn, cov_nx, _, noise, mask, ctx.jitter), (w, _, kept) = inputs, output
        if not kept:
            cure = "Take the gradient of vmap, grad(vmap(...)), or one RBF or Matern kernel."
            expectation, actual = "outside torch.func.vmap for a general kernel", "one inside, vmap(grad(...))"
            fail("nn_conditional", "a gradient", expectation, actual, cure, NotImplementedError)
        tril, extra, inside = kept
        ctx.save_for_backward(cov_nn, cov_nx, noise, mask, tril, w, extra, inside)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
        """Make the mapped dimension a batch dimension; each covariance is factorized separately."""
        pairs = zip(in_dims[:5], arguments[:5], strict=True)
        nn, nx, xx, noise, mask = (value.movedim(dim, 0) if isinstance(dim, int) else value for dim, value in pairs)
        w, var = _member_by_member(nn, nx, xx, noise, mask, arguments[5])
        return (w, var, ()), (0, 0, ())

    @staticmethod
    def backward(ctx: Any, grad_w: Tensor, grad_var: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        cov_nn, cov_nx, noise, mask, tril, w, extra, inside = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: redo the forward pass under autograd
            system = _system(cov_nn.clone(), noise, mask, ctx.jitter)
            if extra is not None:
                system.diagonal(dim1=-2, dim2=-1).add_(extra[:, None])
            tril = cholesky(system, 0.0)
            w = factor_solve(tril, (cov_nx if mask is None else cov_nx * mask)[..., None])[..., 0]
        left, vw = solve_gradient(grad_w, grad_var * inside, w, tril, mask)
        grad_nn = left[..., None] * w[..., None, :]
        grad_diag = left * w
        grad_nn.diagonal(dim1=-2, dim2=-1).add_(grad_diag, alpha=ctx.jitter)
        grad_noise = None if noise is None else grad_diag
        return grad_nn, -left - vw, grad_var * inside * (1 + ctx.jitter), grad_noise, None, None


def each_member(
    function: Callable[..., tuple[Tensor, ...]], size: int, in_dims: tuple, arguments: tuple
) -> tuple[Tensor, ...]:
    """Stack the results of a function for each member that :func:`torch.func.vmap` maps over."""
    members = zip(in_dims, arguments, strict=True)
    parts = [a.unbind(dim) if isinstance(dim, int) else (a,) * size for dim, a in members]
    return tuple(torch.stack(values) for values in zip(*map(function, *parts), strict=True))


def chunks(x: Tensor, num_neighbors: int, num_sets: int = 1) -> Iterator[slice]:
    """Slices of the targets x whose K x K temporaries stay in the processor's cache; on a GPU one slice of all.

    Each target has `num_sets` of them. Without targets there is one empty slice.
    """
    size = len(x)
    if x.device.type == "cpu":
        size = max(16 if num_sets == 1 else 1, at_once(_CHUNK_BYTES // x.element_size(), num_sets * num_neighbors**2))
    return (slice(start, start + size) for start in range(0, max(1, len(x)), size))


def solve(
    cov_nn: Tensor, cov_nx: Tensor, cov_xx: Tensor, noise: Tensor | None, mask: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """w, v, the Cholesky factor, the extra nugget (None: nothing), and where v is above its floor.

    K_nn is overwritten.
    """
    tril, extra = factorize(_system(cov_nn, noise, mask, jitter))
    rhs = cov_nx if mask is None else cov_nx * mask
    half = half_solve(tril, rhs[..., None])
    w = half_solve(tril, half, transposed=True)[..., 0]
    var, inside = variance_left(cov_xx, half[..., 0], jitter)
    return w, var, tril, extra, inside


def variance_left(cov_xx: Tensor, half: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """v = (1 + jitter) k_xx - |half|^2, half = L^-1 k, not below its floor; and where it is above."""
    var = cov_xx * (1 + jitter) - half.square().sum(-1)
    # In exact arithmetic v >= jitter * k_xx; rounding can violate this.
    floor = (jitter * cov_xx).clamp(min=torch.finfo(var.dtype).tiny)
    return torch.maximum(var, floor), var >= floor


def solve_gradient(
    grad_w: Tensor, grad_var: Tensor, w: Tensor, tril: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """grad_v w - a and grad_v w, from which all gradients follow, with a = K_nn^-1 grad_w."""
    if mask is not None:
        grad_w = grad_w * mask
    vw = grad_var[..., None] * w
    return vw - half_solve(tril, half_solve(tril, grad_w[..., None]), transposed=True)[..., 0], vw


def _system(cov_nn: Tensor, noise: Tensor | None, mask: Tensor | None, jitter: float) -> Tensor:
    """Add nugget and noise to the diagonal of K_nn, and zero the rows and columns of masked neighbors off the diagonal.

    The diagonal of masked neighbors stays as it is, since an extra nugget is relative to the mean of the diagonal.
    """
    diagonal = cov_nn.diagonal(dim1=-2, dim2=-1)
    added = diagonal * jitter if noise is None else diagonal * jitter + noise
    if mask is not None:
        added = torch.where(mask, added, diagonal)
        cov_nn.mul_(mask[..., None] & mask[..., None, :])
    cov_nn.diagonal(dim1=-2, dim2=-1).add_(added)
    return cov_nn
