r"""The nearest-neighbor conditional of one stationary kernel in one piece: kernel, factor, solves and gradient.

With :math:`s_i = (z_i - x) / \ell`, pairs :math:`q_{ij} = |s_i - s_j|^2`, slopes :math:`k'(q)` and the gradients of
:mod:`pyro_nngp.conditional`, symmetric weights :math:`W_{ij} = (\bar K_{ij} + \bar K_{ji}) k'(q_{ij})` give

.. math:: \bar s_i = 2 \sum_j W_{ij} (s_i - s_j) + 2 \bar k_i k'(q_i) s_i, \qquad
   \overline{\log \ell_d} = -\sum_i \bar s_{id} s_{id},

so all lengthscales and inputs cost one matrix of weights and one batched product. Two ways to compute the same:
compiled code where it is there (:mod:`pyro_nngp.native`), and torch operations on chunks of targets that stay in cache,
which keep the Cholesky factors and evaluate the kernel again in the backward pass. A second derivative goes through the
general way.

Cost: O(B K^3) time; O(B K^2) memory for gradients in torch, O(B K) in compiled code.
Symbols: as in :mod:`pyro_nngp.conditional`; s scaled neighbors relative to the target.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pyro_nngp import native
from pyro_nngp.kernels import Covariance
from pyro_nngp.kernels.radial import Radial, block, pull, squared_distance
from pyro_nngp.native import Gradients, Problem
from pyro_nngp.nn_systems import block_conditional, chunks, solve, solve_gradient


def radial_conditional(
    kernel: Radial, x: Tensor, points: Tensor, neighbors: Tensor, noise: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor]:
    """Weights (B, K) and variances (B,) of targets x (B, D) given rows `neighbors` (B, K) of `points`, -1 for none.

    Raises:
        NotPositiveDefiniteError: as in :func:`~pyro_nngp.conditional.nn_conditional`.
    """
    x, points = kernel.columns(x), kernel.columns(points)
    lengthscale, variance = kernel.lengthscale.to(x.dtype).expand(x.shape[1]), kernel.variance.to(x.dtype)
    problem = Problem(x, points, lengthscale, variance, noise, neighbors, kernel.profile, jitter)
    if not native.supported(problem):
        return _Fused.apply(_TORCH, torch.is_grad_enabled(), *problem)[:2]
    w, var, failed = _Fused.apply(_NATIVE, torch.is_grad_enabled(), *problem)
    if failed.any():  # torch finds out what they need on their diagonals
        rows = failed.nonzero()[:, 0]
        rest = problem._replace(x=x[rows], neighbors=neighbors[rows], noise=None if noise is None else noise[rows])
        again = _Fused.apply(_TORCH, torch.is_grad_enabled(), *rest)
        w, var = w.index_copy(0, rows, again[0]), var.index_copy(0, rows, again[1])
    return w, var


class _Engine(NamedTuple):
    """One way to compute; both take a :class:`Problem` and hand what they keep from one pass to the other.

    ``forward(problem, recording)`` returns w, v, which points have failed (None: none can) and what it keeps;
    ``backward(problem, kept, grad_w, grad_v, kernel=, noise=, inputs=)`` returns the gradients that the flags ask for.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]]
    backward: Callable[..., Gradients]


class _Fused(torch.autograd.Function):
    """(engine, whether gradients are recorded, *problem) -> (w, v, failed)."""

    @staticmethod
    def forward(ctx: Any, engine: _Engine, recording: bool, *arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        problem = Problem(*arguments)
        w, var, failed, kept = engine.forward(problem, recording)
        ctx.engine, ctx.rest = engine, problem[6:]
        ctx.save_for_backward(*problem[:6], *kept)
        if failed is not None:
            ctx.mark_non_differentiable(failed)
        return w, var, failed

    @staticmethod
    def backward(ctx: Any, grad_w: Tensor, grad_var: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        tensors, kept = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        problem, needs = Problem(*tensors, *ctx.rest), ctx.needs_input_grad[2:7]
        if torch.is_grad_enabled():  # a second derivative is wanted
            grads = _differentiable_gradients(problem, needs, grad_w, grad_var)
        else:
            flags = {"inputs": needs[0] or needs[1], "kernel": needs[2] or needs[3], "noise": needs[4]}
            grads = _gradients(problem, needs, ctx.engine.backward(problem, kept, grad_w, grad_var, **flags))
        return None, None, *grads, None, None, None


def _gradients(problem: Problem, needs: tuple[bool, ...], found: Gradients) -> tuple[Tensor | None, ...]:
    """Gradients of x, points, lengthscale, variance and noise where they are needed."""
    points = scale = variance = None
    if needs[1]:
        rows = problem.neighbors.clamp(min=0).flatten()
        points = torch.zeros_like(problem.points).index_add_(0, rows, cast(Tensor, found.z).flatten(0, 1))
    if needs[2]:
        scale = cast(Tensor, found.log_lengthscale) / problem.lengthscale
    if needs[3]:
        variance = cast(Tensor, found.log_variance) / problem.variance
    return found.x if needs[0] else None, points, scale, variance, found.noise


def _differentiable_gradients(
    problem: Problem, needs: tuple[bool, ...], grad_w: Tensor, grad_var: Tensor
) -> tuple[Tensor | None, ...]:
    """The same with a graph of their own, from the general code."""
    x, points, lengthscale, variance, noise, neighbors, profile, jitter = problem
    cov = Covariance(lambda a, b: block(a, b, lengthscale, variance, profile), lambda a: variance.expand(a.shape[:-1]))
    values = block_conditional(cov, x, points, neighbors, noise, jitter)
    wanted = [cast(Tensor, value) for value, need in zip(problem[:5], needs, strict=True) if need]
    grads = iter(torch.autograd.grad(values, wanted, (grad_w, grad_var), create_graph=True))
    return tuple(next(grads) if need else None for need in needs)


def _forward(problem: Problem, recording: bool) -> tuple[Tensor, Tensor, None, tuple[Tensor, ...]]:
    """Torch operations, chunk by chunk."""
    weights, variances, above, factors = [], [], [], []
    padded = bool((problem.neighbors < 0).any())
    for part in chunks(problem.x, problem.neighbors.shape[1]):
        scaled, mask, noise = _chunk(problem, part, padded)
        cov_nn = problem.profile.function(squared_distance(scaled, scaled), problem.variance)[0]
        cov_nx = problem.profile.function(scaled.square().sum(-1), problem.variance)[0]
        w, var, tril, _, inside = solve(
            cov_nn, cov_nx, problem.variance.expand(len(scaled)), noise, mask, problem.jitter
        )
        weights.append(w)
        variances.append(var)
        if recording:
            above.append(inside)
            factors.append(tril)
    w = torch.cat(weights)
    return w, torch.cat(variances), None, (w, torch.cat(above), *factors) if recording else ()


def _backward(
    problem: Problem,
    kept: tuple[Tensor, ...],
    grad_w: Tensor,
    grad_var: Tensor,
    *,
    kernel: bool,
    noise: bool,
    inputs: bool,
) -> Gradients:
    w, inside, *factors = kept
    grad_var = grad_var * inside
    padded = bool((problem.neighbors < 0).any())
    log_lengthscale, log_variance = torch.zeros_like(problem.lengthscale), torch.zeros_like(problem.variance)
    grad_noise, grad_x, grad_z = [], [], []
    for part, tril in zip(chunks(problem.x, w.shape[1]), factors, strict=True):
        scaled, mask, _ = _chunk(problem, part, padded)
        left, vw = solve_gradient(grad_w[part], grad_var[part], w[part], tril, mask)
        grad_diag = left * w[part]
        grad_noise.append(grad_diag)
        if not (kernel or inputs):
            continue
        k, slope = problem.profile.function(squared_distance(scaled, scaled), problem.variance)
        pairs = (left[..., None] * w[part][..., None, :]).addcmul_(w[part][..., None], left[..., None, :])
        log_variance += 0.5 * torch.dot(pairs.flatten(), k.flatten())
        near = pull(pairs.mul_(slope), scaled, scaled)
        k, slope = problem.profile.function(scaled.square().sum(-1), problem.variance)
        cross = -left - vw
        far = 2 * (cross * slope)[..., None] * scaled
        nugget = (grad_diag.sum() * problem.jitter + grad_var[part].sum() * (1 + problem.jitter)) * problem.variance
        log_variance += (cross * k).sum() + nugget
        log_lengthscale -= ((near + far) * scaled).sum((0, 1))
        if inputs:
            scale = problem.lengthscale * problem.profile.stretch
            grad_z.append((near + far) / scale)
            grad_x.append(-far.sum(1) / scale)
    return Gradients(
        log_lengthscale,
        log_variance,
        torch.cat(grad_noise) if noise else None,
        torch.cat(grad_x) if inputs else None,
        torch.cat(grad_z) if inputs else None,
    )


def _chunk(problem: Problem, part: slice, padded: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scaled neighbors relative to the targets, mask and noise of a chunk."""
    rows = problem.neighbors[part]
    scaled = problem.points[rows.clamp(min=0)] - problem.x[part][:, None]
    scaled /= problem.lengthscale * problem.profile.stretch
    return scaled, rows >= 0 if padded else None, None if problem.noise is None else problem.noise[part]


_TORCH, _NATIVE = _Engine(_forward, _backward), _Engine(native.forward, native.backward)
