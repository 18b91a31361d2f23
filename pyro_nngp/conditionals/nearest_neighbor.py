r"""The nearest-neighbor conditional, on which every method is built.

For a target x with neighbors :math:`z_1..z_K`, kernel k and noise :math:`\delta` on the neighbors,

.. math:: w = (K_{nn} + \mathrm{diag}\,\delta)^{-1} k_n, \qquad v = k_{xx} - k_n^\top w,

so that :math:`f(x) \mid f(z) \sim N(w^\top f(z), v)` (Vecchia 1988; Datta et al. 2016, eq. 3). With incoming gradients
:math:`\bar w, \bar v` and :math:`a = (K_{nn} + \mathrm{diag}\,\delta)^{-1} \bar w`, the gradients are

.. math:: \bar k_n = a - 2 \bar v w, \quad \bar K_{nn} = (\bar v w - a) w^\top, \quad \bar k_{xx} = \bar v,

where :math:`\bar K_{nn}` denotes its symmetric part, the only part that a symmetric matrix passes on. The backward
pass therefore reuses the Cholesky factor and costs one pair of triangular solves; nothing is differentiated through the
factorization. For stationary kernels, sums and products of them, kernel, factor and gradient are computed in one pass
(:mod:`pyro_nngp.conditionals.stationary_kernel`); any other covariance function is evaluated in blocks that autograd
differentiates.

Jitter is a relative nugget of the process itself: :math:`k(x, x)` becomes :math:`(1 + \epsilon) k(x, x)` for every
point, among the neighbors and at the target, so the prior stays a valid Gaussian process and v stays positive even
where two points coincide.

A kernel may have S sets of hyperparameters, as batch dimensions: compiled code computes all of them in one call, which
gathers the points once.

Conditionals of float32 data are computed in float64, but for targets that compiled code resolves in float32
(:mod:`pyro_nngp.conditionals.mixed_precision`), and on GPUs only without noise.

Cost: O(S B K^3) time; O(S B K^2) memory while gradients are recorded, O(K^2) times a fixed chunk of points otherwise.
Compiled code (:mod:`pyro_nngp.native`) needs half of the former, and for small K the latter in any case.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from pyro_nngp._checks import check_floating, check_number, check_row_numbers, check_same_kind, check_tensor, fail
from pyro_nngp._indexing import values_at
from pyro_nngp.conditionals.complete import complete_conditional
from pyro_nngp.conditionals.general_kernel import block_conditional
from pyro_nngp.conditionals.low_rank import residual_conditional
from pyro_nngp.conditionals.mixed_precision import needed, needs_float64, warn_of_unresolved
from pyro_nngp.conditionals.stationary_kernel import radial_conditional
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.linalg import DEFAULT_JITTER


def nn_conditional(
    kernel: Any,
    x: Float[Tensor, "B D"],
    z: Float[Tensor, "B K D"],
    mask: Bool[Tensor, "B K"] | None = None,
    noise: Float[Tensor, "..."] | None = None,
    jitter: float | None = None,
) -> tuple[Float[Tensor, "*S B K"], Float[Tensor, "*S B"]]:
    r"""Weights and variance of f(x) given f at K neighbors, for a batch of targets.

    Args:
        kernel: a :class:`~pyro_nngp.kernels.Kernel`, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``.
        x: targets.
        z: neighbors of each target.
        mask: True where a neighbor is real. Other neighbors get weight exactly 0 and pass no gradient.
        noise: variance (not standard deviation) added at each neighbor, broadcastable to (B, K): 0 for latent
            values, the noise variance for observed ones, 1/omega under Polya-Gamma augmentation.
        jitter: relative nugget; None takes 1e-6.

    Returns:
        Weights w (B, K) and variances v (B,), v > 0; the batch dimensions of the kernel's hyperparameters lead.

    Raises:
        ValueError: if shapes, dtypes or devices disagree.
        NotPositiveDefiniteError: if some neighbor covariance cannot be factorized even with a nugget of 1e-2.

    Reference: Datta, Banerjee, Finley, Gelfand (2016), "Hierarchical nearest-neighbor Gaussian process models".
    """
    for arg, value in (("x", x), ("z", z)):
        check_floating("nn_conditional", arg, value)
    if jitter is not None:
        check_number("nn_conditional", "jitter", jitter)
    if x.dim() != 2 or z.dim() != 3 or z.shape[0] != x.shape[0] or z.shape[2] != x.shape[1]:
        fail("nn_conditional", "x, z", "of shapes (B, D), (B, K, D)", (tuple(x.shape), tuple(z.shape)), "Check both.")
    if mask is not None:
        check_tensor("nn_conditional", "mask", mask)
    if mask is not None and mask.shape != z.shape[:2]:
        fail("nn_conditional", "mask", f"of shape {tuple(z.shape[:2])}", tuple(mask.shape), "One flag per neighbor.")
    check_same_kind("nn_conditional", x=x, z=z)
    if noise is not None:
        check_tensor("nn_conditional", "noise", noise)
        if noise.dim() > 2 or any(
            have not in (1, need) for have, need in zip(noise.shape[::-1], z.shape[1::-1], strict=False)
        ):
            cure = "Give a variance for each neighbor of each point."
            fail("nn_conditional", "noise", f"to broadcast to {tuple(z.shape[:2])}", tuple(noise.shape), cure)

    rows = torch.arange(z.shape[0] * z.shape[1], device=z.device).reshape(z.shape[:2])
    rows = rows if mask is None else torch.where(mask, rows, -1)
    return _conditional(bind(kernel), x, z.reshape(-1, z.shape[2]), rows, noise, jitter)


def graph_conditional(
    kernel: Any,
    x: Float[Tensor, "B D"],
    points: Float[Tensor, "N D"],
    neighbors: Int[Tensor, "B K"],
    noise: Float[Tensor, "*L N"] | None = None,
    jitter: float | None = None,
) -> tuple[Float[Tensor, "*S B K"], Float[Tensor, "*S B"]]:
    """Weights and variance of f(x) given f at neighbors that are rows of `points`, gathered chunk by chunk.

    Args:
        kernel: as in :func:`nn_conditional`.
        x: targets.
        points: the points that may be neighbors.
        neighbors: rows of `points`, -1 padded.
        noise: variance added at each row of `points`, or None; (*L, N) for conditionals that differ in it. Its leading
            dimensions broadcast against the batch dimensions of the kernel.
        jitter: relative nugget; None takes 1e-6.

    Returns:
        Weights (B, K), 0 where there is no neighbor, and variances (B,); the batch dimensions of the kernel's
        hyperparameters and of the noise, S, lead.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices disagree, or `neighbors` holds other numbers than rows.
        NotPositiveDefiniteError: as in :func:`nn_conditional`.
    """
    _check_graph(x, points, neighbors, noise)
    cov = bind(kernel)
    whole = complete_conditional(cov, x, points, neighbors, noise, DEFAULT_JITTER if jitter is None else jitter)
    if whole is not None:
        return whole
    added = None if noise is None else values_at(noise, neighbors)
    return _conditional(cov, x, points, neighbors, added, jitter)


def _check_graph(x: Tensor, points: Tensor, neighbors: Tensor, noise: Tensor | None) -> None:
    where = "graph_conditional"
    for arg, value in (("x", x), ("points", points), ("neighbors", neighbors)):
        check_tensor(where, arg, value)
    if x.dtype not in (torch.float32, torch.float64) or points.dtype != x.dtype:
        dtypes, cure = (x.dtype, points.dtype), "Call .float() or .double() on them."
        fail(where, "x, points", "of one dtype, torch.float32 or torch.float64", dtypes, cure, TypeError)
    if x.dim() != 2 or points.dim() != 2 or x.shape[1] != points.shape[1]:
        shapes = tuple(x.shape), tuple(points.shape)
        fail(where, "x, points", "of shapes (B, D), (N, D)", shapes, "Give the same input dimensions.")
    if neighbors.dim() != 2 or len(neighbors) != len(x):
        fail(where, "neighbors", f"of shape ({len(x)}, K)", tuple(neighbors.shape), "Give one row for each of x.")
    check_row_numbers(where, "neighbors", neighbors, len(points))
    check_same_kind(where, x=x, points=points, neighbors=neighbors)
    if noise is None:
        return
    check_tensor(where, "noise", noise)
    check_same_kind(where, x=x, noise=noise.to(x.dtype))
    if noise.shape[-1:] != points.shape[:1]:
        expectation, cure = f"of shape (..., {len(points)})", "Give one variance for each of points."
        fail(where, "noise", expectation, tuple(noise.shape), cure)


def _conditional(
    cov: Covariance, x: Tensor, points: Tensor, neighbors: Tensor, noise: Tensor | None, jitter: float | None
) -> tuple[Tensor, Tensor]:
    """Weights and variances for neighbors as rows of points and noise of shape (*L, B, K)."""
    if jitter is not None:
        check_number("nn_conditional", "jitter", jitter, cure="It is a relative nugget; the default is 1e-6.")
    jitter = DEFAULT_JITTER if jitter is None else jitter
    if noise is not None:
        same = noise.shape == neighbors.shape
        noise = (noise if same else noise.expand(torch.broadcast_shapes(noise.shape, neighbors.shape))).to(x.dtype)
    if cov.radial is not None:
        return radial_conditional(cov.radial, x, points, neighbors, noise, jitter)
    if needs_float64(x, noise, [cov]):
        near, own = needed(points, neighbors)
        w, var = _general(cov, x.double(), near.double(), own, None if noise is None else noise.double(), jitter)
        return w.float(), var.float()
    w, var = _general(cov, x, points, neighbors, noise, jitter)
    looks = x.dtype == torch.float32 and x.device.type == "cpu"  # a GPU is not waited for
    if looks and not torch.is_grad_enabled() and not is_batchedtensor(var):
        warn_of_unresolved(cov.diag(x), noise, var)
    return w, var


def _general(
    cov: Covariance, x: Tensor, points: Tensor, neighbors: Tensor, noise: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor]:
    """Weights and variances of a kernel without radial parts, in the dtype of the points."""
    if cov.whole is not None:
        return residual_conditional(cov.whole, x, points, neighbors, noise, jitter)
    return block_conditional(cov, x, points, neighbors, noise, jitter)
