r"""The conditional of float32 data, in float64 for the targets that float32 does not resolve.

Rounding changes the entries of :math:`K_{nn}` and :math:`k_n` by about :math:`10^{-7} k_{xx}`, and with them the mean
of f(x) by some of its standard deviations where v is as small, or the noise of the neighbors. Conditionals without
noise, the factor of a prior among them, are computed in float64 from the same inputs. With noise a target is solved
again in float64 if some neighbor has less than :data:`LITTLE_NOISE`, if float32 finds v below :data:`RESOLVED`, or no
factor.

:func:`forward` and :func:`backward` are the compiled engine; each is one operation of a tape, with results of the same
structure whatever the number of such targets. Other code computes all in float64 (:func:`needs_float64`).

Cost: as :mod:`pyro_nngp.native.conditional`; twice that without noise, and three times for a target that is solved
again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_nngp._checks import warn
from pyro_nngp._tape import operation
from pyro_nngp.kernels import Covariance
from pyro_nngp.native import conditional as compiled
from pyro_nngp.native.conditional import Gradients, Problem, Wanted

RESOLVED = 2e-4
"""Smallest variance of f(x), relative to the kernel's, that float32 resolves to a hundredth of a deviation."""
LITTLE_NOISE = 1e-3
"""Smallest variance of a neighbor's noise, relative to the kernel's, with which it does so."""

_FEW = 4  # targets, without gradients, that share one pass over lanes: float64 at once takes no longer than float32
_NUM_AGAIN = 4  # tensors kept for the targets in float64


@operation
def forward(problem: Problem, wanted: Wanted | None = None) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Weights (B, K), variances (B,), flags (B,) of indefinite covariances, and tensors for `backward`.

    Each of them has S in front for S sets of hyperparameters.
    """
    if problem.x.dtype == torch.float64:
        return compiled.forward(problem, wanted)
    if problem.noise is None or (wanted is None and not problem.sets and len(problem.x) <= _FEW):
        w, var, failed, kept = compiled.forward(in_float64(problem), wanted)
        return w.to(problem.x.dtype), var.to(problem.x.dtype), failed, kept
    w, var, failed, kept = compiled.forward(problem, wanted)
    weak = failed | _unresolved(problem.prior_variance.detach()[..., None], problem.noise.detach(), var)
    rows = (weak.any(0) if problem.sets else weak).nonzero()[:, 0]
    if not len(rows):
        return w, var, failed, (*kept, *_none_again())
    failed.copy_(weak)  # the backward pass of all targets leaves these out
    w_again, var_again, failed_again, _ = compiled.forward(in_float64(problem, rows))
    mine = weak[..., rows]
    w[..., rows, :] = torch.where(mine[..., None], w_again.to(w.dtype), w[..., rows, :])
    var[..., rows] = torch.where(mine, var_again.to(w.dtype), var[..., rows])
    still = torch.zeros_like(failed)
    still[..., rows] = failed_again & mine
    return w, var, still, (*kept, rows, failed_again | ~mine, w_again, var_again)


@operation
def backward(problem: Problem, kept: tuple[Tensor, ...], grad_w: Tensor, grad_var: Tensor, wanted: Wanted) -> Gradients:
    """The wanted gradients; targets that failed contribute 0."""
    if problem.x.dtype == torch.float64:
        return compiled.backward(problem, kept, grad_w, grad_var, wanted)
    if problem.noise is None:
        grads = compiled.backward(in_float64(problem), kept, grad_w.double(), grad_var.double(), wanted)
        return Gradients(*(None if grad is None else grad.to(grad_w.dtype) for grad in grads))
    all_rows = compiled.backward(problem, kept[:-_NUM_AGAIN], grad_w, grad_var, wanted)
    rows, *kept_again = kept[-_NUM_AGAIN:]
    if not len(rows):
        return all_rows
    grads = grad_w[..., rows, :].double(), grad_var[..., rows].double()
    again = compiled.backward(in_float64(problem, rows), tuple(kept_again), *grads, wanted)
    return Gradients(*(_merged(*pair, rows) for pair in zip(Gradients._fields, all_rows, again, strict=True)))


def _none_again() -> tuple[Tensor, ...]:
    """What is kept where no target is solved again: separate tensors, since a tape tells values apart by object.

    Views of w would be a cycle in its graph.
    """
    return tuple(torch.empty(0, dtype=torch.int64) for _ in range(_NUM_AGAIN))


def needs_float64(x: Tensor, noise: Tensor | None, kernels: Sequence[Covariance] = ()) -> bool:
    """Whether code that does not look at each target computes conditionals of these data in float64.

    On a GPU it does so without noise alone: few of them are as fast in float64. Plain functions among the kernels are
    evaluated in the dtype of the data.
    """
    known = all(kernel.batch_shape is not None for kernel in kernels)
    return known and x.dtype == torch.float32 and (noise is None or x.device.type == "cpu")


def warn_of_unresolved(variance: Tensor, noise: Tensor | None, var: Tensor) -> None:
    """Warn of targets that float32 does not resolve, of a kernel that is evaluated in the dtype of the data alone.

    Args:
        variance: of the kernel at the targets, (*S, B).
        noise: variance added at each neighbor, (*L, B, K), or None.
        var: variances of the targets in float32, (*S, B).
    """
    weak = _unresolved(variance, noise, var)
    count = int(weak.reshape(-1, weak.shape[-1]).any(0).sum())
    if count:
        warn(
            f"nn_conditional: variances of f at {count} of {weak.shape[-1]} points are below {RESOLVED:g} of the "
            f"kernel's or noise below {LITTLE_NOISE:g}, which float32 does not resolve. Pass x and y in float64."
        )


def _unresolved(variance: Tensor, noise: Tensor | None, var: Tensor) -> Tensor:
    """Whether float32 does not resolve each target: variances of the kernel, of noise (*L, B, K), and of f found."""
    weak = ~(var >= RESOLVED * variance)
    return weak if noise is None else weak | (noise.amin(-1) < LITTLE_NOISE * variance)


def _merged(name: str, low: Tensor | None, high: Tensor | None, rows: Tensor) -> Tensor | None:
    """The sum of a gradient by all targets in float32, and by the targets in `rows` in float64."""
    if low is None or high is None:
        return None
    if name in _PER_TARGET:
        return low.index_add(low.dim() - _PER_TARGET[name], rows, high.to(low.dtype))
    return low + high.to(low.dtype)


_PER_TARGET = {"noise": 2, "x": 2, "z": 3}  # dimensions from the targets on


def in_float64(problem: Problem, rows: Tensor | slice = slice(None)) -> Problem:
    """The problem of some of the targets, or of all, with the same numbers in float64."""
    noise, smoothness, points, neighbors = problem.noise, problem.smoothness, problem.points, problem.neighbors[rows]
    points, neighbors = needed(points, neighbors)
    return problem._replace(
        x=problem.x[rows].double(),
        points=points.double(),
        lengthscale=problem.lengthscale.double(),
        variance=problem.variance.double(),
        noise=None if noise is None else noise[..., rows, :].double(),
        neighbors=neighbors,
        smoothness=None if smoothness is None else smoothness.double(),
    )


def needed(points: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    """The points that are neighbors, one for each, and the neighbors among them; all points if these are fewer."""
    if neighbors.numel() >= len(points):
        return points, neighbors
    own = torch.arange(neighbors.numel(), dtype=neighbors.dtype, device=neighbors.device).view_as(neighbors)
    return points[neighbors.clamp(min=0).flatten()], torch.where(neighbors < 0, neighbors, own)
