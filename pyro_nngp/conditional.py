r"""The nearest-neighbor conditional: the one computation that every method here is made of.

For a target x with neighbors :math:`z_1..z_K`, kernel k and noise :math:`\delta` on the neighbors,

.. math:: w = (K_{nn} + \mathrm{diag}\,\delta)^{-1} k_n, \qquad v = k_{xx} - k_n^\top w,

so that :math:`f(x) \mid f(z) \sim N(w^\top f(z), v)` (Vecchia 1988; Datta et al. 2016, eq. 3). With incoming gradients
:math:`\bar w, \bar v` and :math:`a = (K_{nn} + \mathrm{diag}\,\delta)^{-1} \bar w`, the gradients are

.. math:: \bar k_n = a - 2 \bar v w, \quad \bar K_{nn} = (\bar v w - a) w^\top, \quad \bar k_{xx} = \bar v,

where :math:`\bar K_{nn}` stands for its symmetric part, which is all that a symmetric matrix can pass on. The backward
pass therefore reuses the Cholesky factor and costs one pair of triangular solves; nothing is differentiated through the
factorisation.

Jitter is a relative nugget of the process itself: :math:`k(x, x)` becomes :math:`(1 + \epsilon) k(x, x)` for every
point, among the neighbors and at the target, so the prior stays a valid Gaussian process and v stays positive even
where two points coincide.

Cost: O(B K^3) time; O(B K^2) memory while gradients are recorded, O(K^2) times a fixed chunk of points otherwise.
"""

import warnings
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyro_nngp._checks import check_same_kind, fail
from pyro_nngp.kernels import Covariance, bind

DEFAULT_JITTER = 1e-6
"""Relative nugget where none is given: a thousandth of the standard deviation."""

_ESCALATION = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
_CHUNK_BYTES = 2**22


class NotPositiveDefiniteError(torch.linalg.LinAlgError):
    """A neighbor covariance stayed indefinite after every jitter was tried."""


def nn_conditional(
    kernel: Any,
    x: Float[Tensor, "B D"],
    z: Float[Tensor, "B K D"],
    mask: Bool[Tensor, "B K"] | None = None,
    noise: Float[Tensor, "*#B #K"] | None = None,
    jitter: float | None = None,
) -> tuple[Float[Tensor, "B K"], Float[Tensor, " B"]]:
    r"""Weights and variance of f(x) given f at K neighbors, for a batch of targets.

    Args:
        kernel: a :class:`~pyro_nngp.kernels.Kernel`, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``.
        x: targets.
        z: neighbors of each target.
        mask: True where a neighbor is real. A masked neighbor gets weight exactly 0 and passes no gradient.
        noise: variance (not standard deviation) added to each neighbor's own, broadcastable to (B, K): 0 for latent
            values, the noise variance for observed ones, 1/omega under Polya-Gamma augmentation.
        jitter: relative nugget; None takes 1e-6.

    Returns:
        Weights w (B, K) and variances v (B,), v > 0.

    Raises:
        ValueError: if shapes, dtypes or devices disagree.
        NotPositiveDefiniteError: if some neighbor covariance cannot be factorised even with a nugget of 1e-2.

    Reference: Datta, Banerjee, Finley, Gelfand (2016), "Hierarchical nearest-neighbor Gaussian process models".
    """
    if x.dim() != 2 or z.dim() != 3 or z.shape[0] != x.shape[0] or z.shape[2] != x.shape[1]:
        fail("nn_conditional", "x, z", "of shapes (B, D), (B, K, D)", (tuple(x.shape), tuple(z.shape)), "Check both.")
    if mask is not None and mask.shape != z.shape[:2]:
        fail("nn_conditional", "mask", f"of shape {tuple(z.shape[:2])}", tuple(mask.shape), "One flag per neighbor.")
    check_same_kind("nn_conditional", x=x, z=z)

    def neighbors_of(part: slice) -> tuple[Tensor, Tensor | None]:
        return z[part], None if mask is None else mask[part]

    return _chunked(bind(kernel), x, z.shape[1], neighbors_of, noise, jitter)


def graph_conditional(
    kernel: Any,
    x: Float[Tensor, "B D"],
    points: Float[Tensor, "N D"],
    neighbors: Int[Tensor, "B K"],
    noise: Float[Tensor, "*L N"] | None = None,
    jitter: float | None = None,
) -> tuple[Float[Tensor, "*L B K"], Float[Tensor, "*L B"]]:
    """:func:`nn_conditional` with neighbors given as rows of `points`, gathered chunk by chunk; -1 is no neighbor.

    Args:
        kernel: as in :func:`nn_conditional`.
        x: targets.
        points: the points that may be neighbors.
        neighbors: rows of `points`, -1 padded.
        noise: variance added at each row of `points`, or None; (L, N) for L conditionals that differ in it alone, which
            share the kernel matrices.
        jitter: relative nugget; None takes 1e-6.

    Returns:
        Weights (B, K), 0 where there is no neighbor, and variances (B,); with L in front for L noises.

    Raises:
        NotPositiveDefiniteError: as in :func:`nn_conditional`.
    """
    rows = neighbors.clamp(min=0)
    padded = bool((neighbors < 0).any())

    def neighbors_of(part: slice) -> tuple[Tensor, Tensor | None]:
        return points[rows[part]], neighbors[part] >= 0 if padded else None

    added = None if noise is None else noise[..., rows]
    return _chunked(bind(kernel), x, neighbors.shape[1], neighbors_of, added, jitter)


def _chunked(
    cov: Covariance, x: Tensor, k: int, neighbors_of: Any, noise: Tensor | None, jitter: float | None
) -> tuple[Tensor, Tensor]:
    """Run the conditional over chunks of targets whose K x K temporaries stay in the processor's cache."""
    jitter = DEFAULT_JITTER if jitter is None else jitter
    if noise is not None:
        noise = noise.expand(torch.broadcast_shapes(noise.shape, (x.shape[0], k)))
    size = x.shape[0]
    if x.device.type == "cpu":
        size = max(16, _CHUNK_BYTES // (k * k * x.element_size()))
    parts = []
    for start in range(0, x.shape[0], size):
        part = slice(start, start + size)
        z, mask = neighbors_of(part)
        target = x[part]
        cov_nn, cov_nx, cov_xx = cov(z, z), cov(target[:, None], z)[:, 0], cov.diag(target)
        if noise is None or noise.dim() == 2:
            added = None if noise is None else noise[part]
            parts.append(_Conditional.apply(cov_nn, cov_nx, cov_xx, added, mask, jitter))
        else:
            each = [_Conditional.apply(cov_nn, cov_nx, cov_xx, added[part], mask, jitter) for added in noise]
            parts.append(tuple(torch.stack(values) for values in zip(*each, strict=True)))
    if len(parts) == 1:
        return parts[0]
    weights, variances = zip(*parts, strict=True)
    return torch.cat(weights, -2), torch.cat(variances, -1)


class _Conditional(torch.autograd.Function):
    """(K_nn, k_n, k_xx, noise) -> (w, v) with the gradient of the module's docstring."""

    @staticmethod
    def forward(ctx, cov_nn, cov_nx, cov_xx, noise, mask, jitter):
        system = _system(cov_nn, noise, mask, jitter)
        tril, extra = factorise(system)
        rhs = cov_nx if mask is None else cov_nx * mask
        half = torch.linalg.solve_triangular(tril, rhs[..., None], upper=False)
        w = torch.linalg.solve_triangular(tril.mT, half, upper=True)[..., 0]
        var = cov_xx * (1 + jitter) - half[..., 0].square().sum(-1)
        # In exact arithmetic v >= jitter * k_xx; rounding may not know it.
        floor = (jitter * cov_xx).clamp(min=torch.finfo(var.dtype).tiny)
        ctx.save_for_backward(cov_nn, cov_nx, noise, mask, tril, w, extra, var >= floor)
        ctx.jitter = jitter
        return w, torch.maximum(var, floor)

    @staticmethod
    def backward(ctx, grad_w, grad_var):
        cov_nn, cov_nx, noise, mask, tril, w, extra, inside = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: redo the forward pass under autograd
            system = _system(cov_nn, noise, mask, ctx.jitter)
            if extra is not None:
                system.diagonal(dim1=-2, dim2=-1).add_(extra[:, None])
            tril = torch.linalg.cholesky(system)
            w = torch.cholesky_solve((cov_nx if mask is None else cov_nx * mask)[..., None], tril)[..., 0]
        if mask is not None:
            grad_w = grad_w * mask
        grad_var = grad_var * inside
        a = torch.cholesky_solve(grad_w[..., None], tril)[..., 0]
        vw = grad_var[:, None] * w
        left = vw - a
        grad_nn = left[..., None] * w[..., None, :]
        grad_diag = left * w
        grad_nn.diagonal(dim1=-2, dim2=-1).add_(grad_diag, alpha=ctx.jitter)
        grad_noise = None if noise is None else grad_diag
        return grad_nn, -left - vw, grad_var * (1 + ctx.jitter), grad_noise, None, None


def _system(cov_nn: Tensor, noise: Tensor | None, mask: Tensor | None, jitter: float) -> Tensor:
    """K_nn with nugget and noise on its diagonal, and rows and columns of masked neighbors those of the identity."""
    own = cov_nn.diagonal(dim1=-2, dim2=-1)
    added = own * jitter if noise is None else own * jitter + noise
    if mask is None:
        system = cov_nn.clone()
    else:
        added = torch.where(mask, added, 1.0)
        system = cov_nn * (mask[..., None] & mask[..., None, :])
    system.diagonal(dim1=-2, dim2=-1).add_(added)
    return system


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
                f"nn_conditional: {count} of {len(scale)} neighbor covariances were indefinite in {system.dtype} and "
                f"took an extra nugget of up to {step:.0e} of the variance. Near-duplicate points or a long "
                "lengthscale are the usual cause; a larger jitter or float64 makes the nugget deliberate.",
                stacklevel=2,
            )
            return tril, extra
    # Pyro's Hamiltonian Monte Carlo takes errors with these words for a divergence and goes on.
    raise NotPositiveDefiniteError(
        f"nn_conditional: input is not positive-definite: {int(failed.sum())} of {len(scale)} neighbor covariances of "
        f"size {system.shape[-1]} in {system.dtype} stayed indefinite with relative nuggets {_ESCALATION}. NaN "
        "hyperparameters, or a kernel that is not positive definite, are the usual cause."
    )
