r"""The nearest-neighbor conditional of stationary kernels in one pass: kernel, factor, solves and gradient.

With :math:`s_i = (z_i - x) / \ell`, pairs :math:`q_{ij} = |s_i - s_j|^2`, slopes :math:`k'(q)` and the gradients of
:mod:`pyro_nngp.conditionals.nearest_neighbor`, symmetric weights :math:`W_{ij} = (\bar K_{ij} + \bar K_{ji})
k'(q_{ij})` give

.. math:: \bar s_i = 2 \sum_j W_{ij} (s_i - s_j) + 2 \bar k_i k'(q_i) s_i, \qquad
   \overline{\log \ell_d} = -\sum_i \bar s_{id} s_{id},

so all lengthscales and inputs cost one matrix of weights and one batched product. The variance :math:`\sigma^2` of the
kernel costs nothing: scaling it together with the noise leaves w unchanged and scales v, so that

.. math:: \overline{\log \sigma^2} = \bar v v - \sum_i \bar \delta_i \delta_i .

A sum of products of kernels, :math:`k = \sum_t \prod_{p \in t} k_p(q^{(p)})`, has such weights for each part, with
:math:`\partial k / \partial k_p = \sum_{t \ni p} \prod_{r \in t \setminus p} k_r` as a further factor.

There are two engines: compiled code if it is available (:mod:`pyro_nngp.native`), and torch operations on chunks of
targets that stay in cache. The latter keep one matrix per target for the backward pass: the slopes below the diagonal,
the transposed Cholesky factor above. Second derivatives use the code for general kernels, as do kernels of any
smoothness, and of several parts, where there is no compiled code.

Cost: O(B K^3) time; O(B K^2) memory for gradients in torch, O(B K) in compiled code.
Symbols: as in :mod:`pyro_nngp.conditionals.nearest_neighbor`; s scaled neighbors relative to the target.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import vjp

from pyro_nngp import _memory as memory
from pyro_nngp._autograd import apply
from pyro_nngp.conditionals import mixed_precision
from pyro_nngp.conditionals.general_kernel import (
    block_conditional,
    chunks,
    each_member,
    may_lack,
    solve,
    solve_gradient,
)
from pyro_nngp.gpu import conditional as on_gpu
from pyro_nngp.kernels import Covariance
from pyro_nngp.kernels.combination import block
from pyro_nngp.kernels.radial import Profile, Radial, broadcast_columns, broadcast_numbers, squared_distance
from pyro_nngp.native import conditional as compiled
from pyro_nngp.native.conditional import Gradients, Problem, Wanted


def radial_conditional(
    kernel: Radial, x: Tensor, points: Tensor, neighbors: Tensor, noise: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor]:
    """Weights (B, K) and variances (B,) of targets x (B, D) given rows `neighbors` (B, K) of `points`, -1 for none.

    Batch dimensions of the kernel and of the noise (*L, B, K) lead; all their sets are computed in one call.

    Raises:
        NotPositiveDefiniteError: as in :func:`~pyro_nngp.conditionals.nearest_neighbor.nn_conditional`.
    """
    inputs, x = x, kernel.columns(x)
    if x is not inputs:  # map the points that serve, not all
        points, neighbors = mixed_precision.needed(points, neighbors)
    points = kernel.columns(points)
    lengthscale, variance, dim = kernel.lengthscale.to(x), kernel.variance.to(x), x.shape[1]
    smoothness, rest = kernel.smoothness, (neighbors, kernel.profile, jitter)
    smoothness, rank = None if smoothness is None else smoothness.to(x.device), kernel.profile.rank
    given = [value.shape[: value.dim() - rank] for value in (variance, smoothness) if value is not None]
    given += [lengthscale.shape[:-1], torch.Size() if noise is None else noise.shape[:-2]]
    batch = torch.broadcast_shapes(*given) if any(given) else ()
    if not batch:
        return _compute(Problem(x, points, lengthscale.expand(dim), variance, noise, *rest, smoothness))

    def sets(value: Tensor) -> Tensor:
        own = value.shape[value.dim() - rank :]
        return value.expand(*batch, *own).reshape(-1, *own)

    lengthscale, variance = lengthscale.expand(*batch, dim).reshape(-1, dim), sets(variance)
    smoothness = None if smoothness is None else sets(smoothness)
    if noise is not None and noise.dim() > 2:
        noise = noise.expand(*batch, *neighbors.shape).reshape(-1, *neighbors.shape)
    w, var = _compute(Problem(x, points, lengthscale, variance, noise, *rest, smoothness))
    return w.view(*batch, *neighbors.shape), var.view(*batch, len(x))


def _compute(problem: Problem) -> tuple[Tensor, Tensor]:
    """Weights and variances, by compiled code if it covers the problem, which knows what float32 does not resolve."""
    engine = NATIVE if compiled.supported(problem) else GPU if on_gpu.supported(problem) else TORCH
    if engine is not NATIVE and mixed_precision.needs_float64(problem.x, problem.noise):
        w, var = _compute(mixed_precision.in_float64(problem))
        return w.float(), var.float()
    if engine is TORCH and not _in_torch(problem):
        return _general(problem)
    w, var, failed, _ = apply(_Fused, engine, torch.is_grad_enabled(), *problem)
    if failed is None or not failed.any():
        return w, var
    if not problem.sets:
        return _again(problem, w, var, failed)
    each = [_again(problem.one(i), *result) for i, result in enumerate(zip(w, var, failed, strict=True))]
    weights, variances = zip(*each, strict=True)
    return torch.stack(weights), torch.stack(variances)


def _again(problem: Problem, w: Tensor, var: Tensor, failed: Tensor) -> tuple[Tensor, Tensor]:
    """Compute failed targets again in torch, which finds a nugget that suffices."""
    rows, noise = failed.nonzero()[:, 0], problem.noise
    if not len(rows):
        return w, var
    noise = None if noise is None else noise[rows]
    rest = problem._replace(x=problem.x[rows], neighbors=problem.neighbors[rows], noise=noise)
    again = apply(_Fused, TORCH, torch.is_grad_enabled(), *rest) if _in_torch(rest) else _general(rest)
    return w.index_copy(0, rows, again[0]), var.index_copy(0, rows, again[1])


def _in_torch(problem: Problem) -> bool:
    """Whether the engine of torch operations covers the kernel: one of fixed smoothness."""
    return problem.smoothness is None and not problem.profile.rank


def _general(problem: Problem) -> tuple[Tensor, Tensor]:
    """Weights and variances by the code for general kernels."""
    x, points, lengthscale, variance, noise, neighbors, profile, jitter, smoothness = problem
    own = problem.prior_variance
    cov = Covariance(
        lambda a, b: block(a, b, lengthscale, variance, profile, smoothness),
        lambda a: broadcast_numbers(own, a.dim() - 1).expand(*own.shape, *a.shape[:-1]),
        batch_shape=own.shape,
    )
    return block_conditional(cov, x, points, neighbors, noise, jitter)


class Engine(NamedTuple):
    """An implementation of the conditional and its gradient.

    ``forward(problem, wanted)`` returns w, v, flags of failed targets (None: none can fail) and tensors for `backward`;
    ``backward(problem, kept, grad_w, grad_v, wanted)`` returns the gradients.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]]
    backward: Callable[..., Gradients]


class _Fused(torch.autograd.Function):
    """(engine, whether gradients are recorded, *problem) -> (w, v, failed, tensors kept for the gradient)."""

    @staticmethod
    def forward(
        engine: Engine, recording: bool, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]:
        problem = Problem(*arguments)
        tensors = (getattr(problem, name) for name in _DIFFERENTIABLE)
        needs = tuple(tensor is not None and tensor.requires_grad for tensor in tensors)
        return engine.forward(problem, _wanted(needs) if recording else None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        problem, (_, _, failed, kept) = Problem(*inputs[2:]), output
        ctx.engine, ctx.rest = inputs[0], problem[6:8]
        ctx.save_for_backward(*problem[:6], problem.smoothness, *kept)
        if failed is not None:
            ctx.mark_non_differentiable(failed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, engine: Engine, recording: bool, *arguments: Any) -> tuple:
        """Make mapped hyperparameters further sets of one problem; where the points differ, solve member by member."""
        problem, dims = Problem(*arguments), Problem(*in_dims[2:])
        if any(isinstance(dim, int) for dim in (dims.x, dims.points, dims.neighbors)):
            w, var = each_member(lambda *member: _compute(Problem(*member)), info.batch_size, in_dims[2:], arguments)
            return (w, var, None, ()), (0, 0, None, ())
        sets = (info.batch_size, *problem.sets[isinstance(dims.variance, int) :])

        def flat(value: Tensor | None, dim: Any, rank: int) -> Tensor | None:
            if value is None or (not isinstance(dim, int) and value.dim() == rank == 2):
                return value  # noise of all sets
            value = value.movedim(dim, 0) if isinstance(dim, int) else value[None]
            if value.dim() == rank + 1 and len(sets) > 1:
                value = value[:, None]
            shape = value.shape[value.dim() - rank :]
            return value.expand(*sets, *shape).reshape(-1, *shape)

        w, var = _compute(
            problem._replace(
                lengthscale=cast(Tensor, flat(problem.lengthscale, dims.lengthscale, 1)),
                variance=cast(Tensor, flat(problem.variance, dims.variance, problem.profile.rank)),
                noise=flat(problem.noise, dims.noise, 2),
                smoothness=flat(problem.smoothness, dims.smoothness, problem.profile.rank),
            )
        )
        return (w.unflatten(0, sets), var.unflatten(0, sets), None, ()), (0, 0, None, ())

    @staticmethod
    def backward(ctx: Any, grad_w: Tensor, grad_var: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (*tensors, smoothness), kept = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        problem = Problem(*tensors, *ctx.rest)._replace(smoothness=smoothness)
        needs = (*ctx.needs_input_grad[2:7], ctx.needs_input_grad[10])
        if torch.is_grad_enabled():  # a second derivative may be wanted, or torch.func maps over gradients
            each = iter(_Gradient.apply(ctx.engine, needs, grad_w, grad_var, *problem))
            grads = tuple(next(each) if need else None for need in needs)
        else:
            grads = gradients_of(problem, needs, ctx.engine.backward(problem, kept, grad_w, grad_var, _wanted(needs)))
        return None, None, *grads[:5], None, None, None, grads[5]


_DIFFERENTIABLE = "x", "points", "lengthscale", "variance", "noise", "smoothness"
_NEIGHBORS = 7  # of (grad_w, grad_var, *problem)


class _Gradient(torch.autograd.Function):
    """(engine, which gradients, grad_w, grad_var, *problem) -> the gradients, to differentiate and to map."""

    @staticmethod
    def forward(
        engine: Engine, needs: tuple[bool, ...], grad_w: Tensor, grad_var: Tensor, *arguments: Any
    ) -> tuple[Tensor, ...]:
        problem, wanted = Problem(*arguments), _wanted(needs)
        kept = engine.forward(problem, wanted)[3]
        grads = gradients_of(problem, needs, engine.backward(problem, kept, grad_w, grad_var, wanted))
        return tuple(grad for grad in grads if grad is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.needs, ctx.rest = inputs[1], inputs[10:12]
        ctx.save_for_backward(*inputs[2:10], inputs[12])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, engine: Engine, needs: tuple[bool, ...], *arguments: Any) -> tuple:
        """Compute the gradients member by member: those by shared arguments must not be summed here."""

        def one(*member: Any) -> tuple[Tensor, ...]:
            return _Gradient.apply(engine, needs, *member)

        return each_member(one, info.batch_size, in_dims[2:], arguments), (0,) * sum(needs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        places = [i for i, tensor in enumerate(tensors) if tensor is not None and i != _NEIGHBORS]

        def gradients(*values: Tensor) -> tuple[Tensor, ...]:
            given = [*tensors]
            for place, value in zip(places, values, strict=True):
                given[place] = value
            problem = Problem(*given[2:8], *ctx.rest)._replace(smoothness=given[8])
            results = _differentiable_gradients(problem, ctx.needs, *given[:2])
            return tuple(grad for grad in results if grad is not None)

        pulled = dict(zip(places, vjp(gradients, *(tensors[i] for i in places))[1](grads), strict=True))
        return None, None, *(pulled.get(i) for i in range(7)), None, None, None, pulled.get(8)


def _wanted(needs: tuple[bool, ...]) -> Wanted:
    """Gradients that an engine computes, given which of the tensors `_DIFFERENTIABLE` need one."""
    x, points, lengthscale, variance, noise, smoothness = needs
    return Wanted(lengthscale or variance or smoothness, noise, x or points, smoothness)


def gradients_of(problem: Problem, needs: tuple[bool, ...], raw: Gradients) -> tuple[Tensor | None, ...]:
    """Gradients of x, points, lengthscale, variance, noise and smoothness where they are needed."""
    points = scale = variance = None
    x, z, noise = raw.x if needs[0] else None, raw.z, raw.noise
    if problem.sets:  # the sets share points and targets
        x, z = (None if grad is None else grad.sum(0) for grad in (x, z if needs[1] else None))
        noise = noise.sum(0) if noise is not None and cast(Tensor, problem.noise).dim() == 2 else noise
    if needs[1]:
        rows = problem.neighbors.clamp(min=0).flatten()
        points = torch.zeros_like(problem.points).index_add_(0, rows, cast(Tensor, z).flatten(0, 1))
    if needs[2]:
        scale = cast(Tensor, raw.log_lengthscale) / problem.lengthscale
    if needs[3]:
        variance = cast(Tensor, raw.log_variance) / problem.variance
    return x, points, scale, variance, noise, raw.smoothness if needs[5] else None


def _differentiable_gradients(
    problem: Problem, needs: tuple[bool, ...], grad_w: Tensor, grad_var: Tensor
) -> tuple[Tensor | None, ...]:
    """Differentiable gradients, from the code for general kernels."""
    wanted = [name for name, need in zip(_DIFFERENTIABLE, needs, strict=True) if need]

    def values(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = dict(zip(wanted, arguments, strict=True))
        return _general(problem._replace(**given))

    grads = iter(vjp(values, *(getattr(problem, name) for name in wanted))[1]((grad_w, grad_var)))
    return tuple(next(grads) if need else None for need in needs)


def _forward(problem: Problem, wanted: Wanted | None) -> tuple[Tensor, Tensor, None, tuple[Tensor, ...]]:
    """Weights and variances by torch operations, chunk by chunk, into memory allocated beforehand."""
    memory.keep_freed()
    shape, new = (*problem.sets, *problem.neighbors.shape), problem.x.new_empty
    lead, k = shape[:-1], shape[-1]
    w, var, extra, inside = new(shape), new(lead), problem.x.new_zeros(lead), new(lead, dtype=torch.bool)
    packed = memory.empty((*shape, k), problem.x.dtype, problem.x.device) if wanted else None
    below, padded = problem.x.new_ones(k, k).tril(-1), may_lack(problem.neighbors)
    function = cast(Profile, problem.profile).function
    for part in chunks(problem.x, k, problem.num_sets):
        scaled, mask, noise = _chunk(problem, part, padded)
        cov_nn, slope = function(squared_distance(scaled, scaled), broadcast_numbers(problem.variance, 3))
        cov_nx = function(scaled.square().sum(-1), broadcast_numbers(problem.variance, 2))[0]
        cov_xx = broadcast_numbers(problem.variance, 1).expand(cov_nx.shape[:-1])
        results = solve(cov_nn, cov_nx, cov_xx, noise, mask, problem.jitter)
        w[..., part, :], var[..., part], tril, more, inside[..., part] = results
        if more is not None:
            extra[..., part] = more
        if packed is not None:
            torch.addcmul(tril.mT, slope, below, out=packed[..., part, :, :])
    return w, var, None, () if packed is None else (w, var, inside, extra, packed)


def _backward(
    problem: Problem, kept: tuple[Tensor, ...], grad_w: Tensor, grad_var: Tensor, wanted: Wanted
) -> Gradients:
    w, var, inside, extra, packed = kept
    d, k, scale = problem.x.shape[1], w.shape[-1], broadcast_columns(problem.scale, 3)
    grad_var = grad_var * inside
    below, padded = w.new_ones(k, k).tril(-1), may_lack(problem.neighbors)
    function = cast(Profile, problem.profile).function
    log_lengthscale = torch.zeros_like(problem.lengthscale)
    log_variance = (grad_var * var).sum(-1) if problem.sets else torch.dot(grad_var, var)
    grad_noise = torch.empty_like(w)
    grad_x, grad_z = (w.new_empty(*w.shape[:-1], d), w.new_empty(*w.shape, d)) if wanted.inputs else (None, None)
    for part in chunks(problem.x, k, problem.num_sets):
        scaled, mask, added = _chunk(problem, part, padded)
        weights = w[..., part, :]
        left, vw = solve_gradient(grad_w[..., part, :], grad_var[..., part], weights, packed[..., part, :, :].mT, mask)
        grad_diag = torch.mul(left, weights, out=grad_noise[..., part, :])
        if not (wanted.kernel or wanted.inputs):
            continue
        more = extra[..., part, None]
        log_variance -= (grad_diag * (more if added is None else more + added)).sum((-2, -1))
        pairs = (left[..., None] * weights[..., None, :]).addcmul_(weights[..., None], left[..., None, :])
        near = _pull_pairs(pairs.mul_(packed[..., part, :, :]).mul_(below), scaled)
        slope = function(scaled.square().sum(-1), broadcast_numbers(problem.variance, 2))[1]
        far = -2 * ((left + vw) * slope)[..., None] * scaled
        log_lengthscale -= ((near + far) * scaled).sum((-3, -2))
        if grad_x is not None and grad_z is not None:
            torch.div(near + far, scale, out=grad_z[..., part, :, :])
            grad_x[..., part, :] = -far.sum(-2) / broadcast_columns(problem.scale, 2)
    return Gradients(log_lengthscale, log_variance, grad_noise if wanted.noise else None, grad_x, grad_z)


def _pull_pairs(weights: Tensor, s: Tensor) -> Tensor:
    """2 sum_j W_ij (s_i - s_j), W symmetric, of which `weights` is the part below the diagonal."""
    rows = torch.cat([s, torch.ones_like(s[..., :1])], -1).mT  # few long rows: several times faster than weights @ s
    total = (rows @ weights + rows @ weights.mT).mT
    return 2 * (total[..., -1:] * s - total[..., :-1])


def _chunk(problem: Problem, part: slice, padded: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scaled neighbors relative to the targets, mask and noise of a chunk."""
    rows = problem.neighbors[part]
    scaled = problem.points[rows.clamp(min=0)] - problem.x[part][:, None]
    scale = broadcast_columns(problem.scale, 3)
    scaled = scaled / scale if problem.sets else scaled.div_(scale)
    return scaled, rows >= 0 if padded else None, None if problem.noise is None else problem.noise[..., part, :]


TORCH, NATIVE = Engine(_forward, _backward), Engine(mixed_precision.forward, mixed_precision.backward)
GPU = Engine(on_gpu.forward, on_gpu.backward)
