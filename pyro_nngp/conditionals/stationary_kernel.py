r"""The nearest-neighbor conditional of one stationary kernel in one pass: kernel, factor, solves and gradient.

With :math:`s_i = (z_i - x) / \ell`, pairs :math:`q_{ij} = |s_i - s_j|^2`, slopes :math:`k'(q)` and the gradients of
:mod:`pyro_nngp.conditionals.nearest_neighbor`, symmetric weights :math:`W_{ij} = (\bar K_{ij} + \bar K_{ji})
k'(q_{ij})` give

.. math:: \bar s_i = 2 \sum_j W_{ij} (s_i - s_j) + 2 \bar k_i k'(q_i) s_i, \qquad
   \overline{\log \ell_d} = -\sum_i \bar s_{id} s_{id},

so all lengthscales and inputs cost one matrix of weights and one batched product. The variance :math:`\sigma^2` of the
kernel costs nothing: scaling it together with the noise leaves w unchanged and scales v, so that

.. math:: \overline{\log \sigma^2} = \bar v v - \sum_i \bar \delta_i \delta_i .

There are two engines: compiled code if it is available (:mod:`pyro_nngp.native`), and torch operations on chunks of
targets that stay in cache. The latter keep one matrix per target for the backward pass: the slopes below the diagonal,
the transposed Cholesky factor above. Second derivatives use the code for general kernels.

Cost: O(B K^3) time; O(B K^2) memory for gradients in torch, O(B K) in compiled code.
Symbols: as in :mod:`pyro_nngp.conditionals.nearest_neighbor`; s scaled neighbors relative to the target.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pyro_nngp import _memory as memory
from pyro_nngp.conditionals.general_kernel import block_conditional, chunks, each_member, solve, solve_gradient
from pyro_nngp.kernels import Covariance
from pyro_nngp.kernels.radial import Radial, block, squared_distance
from pyro_nngp.native import conditional as compiled
from pyro_nngp.native.conditional import Gradients, Problem


def radial_conditional(
    kernel: Radial, x: Tensor, points: Tensor, neighbors: Tensor, noise: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor]:
    """Weights (B, K) and variances (B,) of targets x (B, D) given rows `neighbors` (B, K) of `points`, -1 for none.

    Raises:
        NotPositiveDefiniteError: as in :func:`~pyro_nngp.conditionals.nearest_neighbor.nn_conditional`.
    """
    x, points = kernel.columns(x), kernel.columns(points)
    lengthscale, variance = kernel.lengthscale.to(x.dtype).expand(x.shape[1]), kernel.variance.to(x.dtype)
    return _compute(Problem(x, points, lengthscale, variance, noise, neighbors, kernel.profile, jitter))


def _compute(problem: Problem) -> tuple[Tensor, Tensor]:
    """Weights and variances, by compiled code if it supports the problem."""
    engine, noise = NATIVE if compiled.supported(problem) else TORCH, problem.noise
    w, var, failed, _ = _Fused.apply(engine, torch.is_grad_enabled(), *problem)
    if failed is not None and failed.any():  # torch finds the extra nuggets that they need
        rows = failed.nonzero()[:, 0]
        noise = None if noise is None else noise[rows]
        rest = problem._replace(x=problem.x[rows], neighbors=problem.neighbors[rows], noise=noise)
        again = _Fused.apply(TORCH, torch.is_grad_enabled(), *rest)
        w, var = w.index_copy(0, rows, again[0]), var.index_copy(0, rows, again[1])
    return w, var


class Engine(NamedTuple):
    """An implementation; both take a :class:`Problem` and pass what they keep from `forward` to `backward`.

    ``forward(problem, recording)`` returns w, v, which points have failed (None: none can) and what it keeps;
    ``backward(problem, kept, grad_w, grad_v, kernel=, noise=, inputs=)`` returns the gradients that the flags ask for.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]]
    backward: Callable[..., Gradients]


class _Fused(torch.autograd.Function):
    """(engine, whether gradients are recorded, *problem) -> (w, v, failed, what is kept for the gradient)."""

    @staticmethod
    def forward(
        engine: Engine, recording: bool, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]:
        return engine.forward(Problem(*arguments), recording)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        problem, (_, _, failed, kept) = Problem(*inputs[2:]), output
        ctx.engine, ctx.rest = inputs[0], problem[6:]
        ctx.save_for_backward(*problem[:6], *kept)
        if failed is not None:
            ctx.mark_non_differentiable(failed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, engine: Engine, recording: bool, *arguments: Any) -> tuple:
        """Compute one member at a time, since the treatment of an indefinite covariance depends on its values."""
        w, var = each_member(lambda *member: _compute(Problem(*member)), info.batch_size, in_dims[2:], arguments)
        return (w, var, None, ()), (0, 0, None, ())

    @staticmethod
    def backward(ctx: Any, grad_w: Tensor, grad_var: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
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
    """Differentiable gradients, from the code for general kernels."""
    x, points, lengthscale, variance, noise, neighbors, profile, jitter = problem
    cov = Covariance(lambda a, b: block(a, b, lengthscale, variance, profile), lambda a: variance.expand(a.shape[:-1]))
    values = block_conditional(cov, x, points, neighbors, noise, jitter)
    wanted = [cast(Tensor, value) for value, need in zip(problem[:5], needs, strict=True) if need]
    grads = iter(torch.autograd.grad(values, wanted, (grad_w, grad_var), create_graph=True))
    return tuple(next(grads) if need else None for need in needs)


def _forward(problem: Problem, recording: bool) -> tuple[Tensor, Tensor, None, tuple[Tensor, ...]]:
    """Torch operations, chunk by chunk, into memory allocated beforehand, which small results would fragment."""
    memory.keep_freed()
    (b, k), new = problem.neighbors.shape, problem.x.new_empty
    w, var, extra, inside = new(b, k), new(b), problem.x.new_zeros(b), new(b, dtype=torch.bool)
    packed = memory.empty((b, k, k), problem.x.dtype, problem.x.device) if recording else None
    below, padded = problem.x.new_ones(k, k).tril(-1), bool((problem.neighbors < 0).any())
    for part in chunks(problem.x, k):
        scaled, mask, noise = _chunk(problem, part, padded)
        cov_nn, slope = problem.profile.function(squared_distance(scaled, scaled), problem.variance)
        cov_nx = problem.profile.function(scaled.square().sum(-1), problem.variance)[0]
        cov_xx = problem.variance.expand(len(scaled))
        w[part], var[part], tril, more, inside[part] = solve(cov_nn, cov_nx, cov_xx, noise, mask, problem.jitter)
        if more is not None:
            extra[part] = more
        if packed is not None:
            torch.addcmul(tril.mT, slope, below, out=packed[part])
    return w, var, None, () if packed is None else (w, var, inside, extra, packed)


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
    w, var, inside, extra, packed = kept
    (b, k), d, scale = w.shape, problem.x.shape[1], problem.lengthscale * problem.profile.stretch
    grad_var = grad_var * inside
    below, padded = w.new_ones(k, k).tril(-1), bool((problem.neighbors < 0).any())
    log_lengthscale, log_variance = torch.zeros_like(problem.lengthscale), torch.dot(grad_var, var)
    grad_noise = torch.empty_like(w)
    grad_x, grad_z = (w.new_empty(b, d), w.new_empty(b, k, d)) if inputs else (None, None)
    for part in chunks(problem.x, k):
        scaled, mask, added = _chunk(problem, part, padded)
        left, vw = solve_gradient(grad_w[part], grad_var[part], w[part], packed[part].mT, mask)
        grad_diag = torch.mul(left, w[part], out=grad_noise[part])
        if not (kernel or inputs):
            continue
        log_variance -= (grad_diag * (extra[part, None] if added is None else extra[part, None] + added)).sum()
        pairs = (left[..., None] * w[part][..., None, :]).addcmul_(w[part][..., None], left[..., None, :])
        near = _pull_pairs(pairs.mul_(packed[part]).mul_(below), scaled)
        slope = problem.profile.function(scaled.square().sum(-1), problem.variance)[1]
        far = -2 * ((left + vw) * slope)[..., None] * scaled
        log_lengthscale -= ((near + far) * scaled).sum((0, 1))
        if grad_x is not None and grad_z is not None:
            torch.div(near + far, scale, out=grad_z[part])
            torch.div(-far.sum(1), scale, out=grad_x[part])
    return Gradients(log_lengthscale, log_variance, grad_noise if noise else None, grad_x, grad_z)


def _pull_pairs(weights: Tensor, s: Tensor) -> Tensor:
    """2 sum_j W_ij (s_i - s_j), W symmetric, of which `weights` is the part below the diagonal."""
    rows = torch.cat([s, torch.ones_like(s[..., :1])], -1).mT  # few long rows: several times faster than weights @ s
    total = (rows @ weights + rows @ weights.mT).mT
    return 2 * (total[..., -1:] * s - total[..., :-1])


def _chunk(problem: Problem, part: slice, padded: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scaled neighbors relative to the targets, mask and noise of a chunk."""
    rows = problem.neighbors[part]
    scaled = problem.points[rows.clamp(min=0)] - problem.x[part][:, None]
    scaled /= problem.lengthscale * problem.profile.stretch
    return scaled, rows >= 0 if padded else None, None if problem.noise is None else problem.noise[part]


TORCH, NATIVE = Engine(_forward, _backward), Engine(compiled.forward, compiled.backward)
