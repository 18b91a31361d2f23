"""Isotropic covariance blocks k(q), q = |x - z|^2 on scaled inputs, with a hand-written gradient.

Plain autograd through distances, square root, exponential and polynomial keeps and revisits about ten arrays of the
size of the block. Here the forward pass keeps two, the block itself and its slope dk/dq, and with W = grad * dk/dq

    grad_x = 2 (rowsum(W) x - W z),    grad_z = 2 (colsum(W) z - W^T x),    grad_variance = <grad, k> / variance.

A second derivative (Laplace approximations, Hessians) recomputes q, k and the slope with differentiable operations.

Reference: Rasmussen and Williams (2006), section 4.2.1, for the covariance functions.
Cost: O(n m D) per block, of which only O(n m) is kept; no (n, m, D) array is ever made.
Symbols: q squared scaled distance, s = sqrt(q), v variance, k block, W weights of the gradient, S batch of
hyperparameters; F parts of a combination (:mod:`pyro_nngp.kernels.combination`), T of which have a smoothness.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._autograd import apply, mapped_first
from pyro_nngp.kernels import matern_table


class Profile(NamedTuple):
    """A covariance as a function of the squared distance q between inputs divided by ``stretch`` lengthscales.

    ``function`` maps (q, v) to (k, dk/dq). It may write into q when no graph is being recorded and has to be
    differentiable in both arguments otherwise. Where the smoothness is a parameter, there is ``correlation``
    instead, which maps (q, smoothness) to the correlation, by operations that can be differentiated.
    """

    stretch: float
    function: Any
    correlation: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions of a variance that are not batch dimensions."""
        return 0

    @property
    def parts(self) -> "tuple[Profile, ...]":
        """The profile itself."""
        return (self,)

    def combined(self, dim: int) -> "Combination":
        """The profile in `dim` columns as the only part of a combination."""
        return Combination((self,), (dim,), ((0,),))

    def total(self, variance: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """The variance of the kernel."""
        return variance

    def scaled(self, lengthscale: Tensor) -> Tensor:
        """What inputs are divided by."""
        return lengthscale * self.stretch


class Combination(NamedTuple):
    """A sum of products of F parts, each with columns of its own; what a :class:`Profile` says, it says of all."""

    parts: tuple[Profile, ...]
    dims: tuple[int, ...]
    """Number of columns of each part, which lie side by side."""
    terms: tuple[tuple[int, ...], ...]
    """The parts of each product."""

    def of_values(self, values: Sequence[Tensor]) -> Tensor:
        """The sum of products of values of the parts."""
        products = [functools.reduce(operator.mul, [values[part] for part in term]) for term in self.terms]
        return functools.reduce(operator.add, products)

    @property
    def rank(self) -> int:
        return 1

    def combined(self, dim: int) -> "Combination":
        return self

    def total(self, variance: Float[Tensor, "*S F"]) -> Float[Tensor, "*S"]:
        return self.of_values(variance.unbind(-1))

    def scaled(self, lengthscale: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        each = zip(self.parts, self.dims, strict=True)
        return lengthscale * lengthscale.new_tensor([part.stretch for part, dim in each for _ in range(dim)])


class Radial(NamedTuple):
    """A stationary kernel, or a combination of F such, whose hyperparameters have been read; batch dimensions lead."""

    profile: Profile | Combination
    lengthscale: Tensor
    """A scalar, or the columns last: (D,), (*S, D) or (*S, 1). Of a combination, all columns of all parts."""
    variance: Tensor
    """Shape (*S,), of a combination (*S, F)."""
    columns: Callable[[Tensor], Tensor]
    """The columns of an input that the kernel acts on."""
    dim: int
    """Number D of these columns."""
    smoothness: Tensor | None = None
    """Shape (*S,), of a combination (*S, T) for its T Matérn profiles of any smoothness; None without such."""

    def scaled_squares(self, x: Tensor, z: Tensor) -> Tensor:
        """Squared distances (*S, ..., n, m) in units of ``profile.stretch`` lengthscales."""
        scale, left = self.profile.scaled(self.lengthscale.to(x)), self.columns(x)
        return block(left, left if z is x else self.columns(z), scale, x.new_ones(()), SQUARED_DISTANCE)

    def covariance_at(self, q: Tensor, rank: int) -> Tensor:
        """The covariance at squared distances q of points of `rank` dimensions, by plain autograd."""
        variance = broadcast_numbers(self.variance.to(q), rank)
        q = q.expand(torch.broadcast_shapes(q.shape, variance.shape)).clamp_min(_FLOOR)  # profiles may write into it
        return cast(Profile, self.profile).function(q, variance)[0]


def block(
    x: Tensor, z: Tensor, lengthscale: Tensor, variance: Tensor, profile: Profile, smoothness: Tensor | None = None
) -> Tensor:
    """Covariance block of raw inputs; pass the same object twice if they are equal.

    Args:
        x: shape (..., n, D).
        z: shape (..., m, D); batch dimensions broadcast against ``x``.
        lengthscale: scalar, (D,), or (*S, D) or (*S, 1) for a batch of kernels.
        variance: scalar, or (*S,).
        profile: one of the profiles of this module.
        smoothness: scalar, or (*S,), of a profile with ``correlation``.

    Returns:
        Shape (*S, ..., n, m).
    """
    rank = max(x.dim(), z.dim())
    if profile.correlation is not None:
        q = block(x, z, lengthscale, x.new_ones(()), SQUARED_DISTANCE)
        return broadcast_numbers(variance.to(x), rank) * profile.correlation(
            q, broadcast_numbers(cast(Tensor, smoothness), rank)
        )
    scale = broadcast_columns(lengthscale.to(x), rank) * profile.stretch
    return scaled_block(*map_centered(lambda y: y / scale, x, z), broadcast_numbers(variance.to(x), rank), profile)


def broadcast_numbers(value: Tensor, rank: int) -> Tensor:
    """Reshape numbers (*S,), one per kernel of a batch, to stand in front of `rank` dimensions."""
    return value.reshape(*value.shape, *[1] * rank) if value.dim() else value


def broadcast_columns(value: Tensor, rank: int) -> Tensor:
    """Reshape vectors (*S, D), one per kernel of a batch, to broadcast against inputs with `rank` dimensions."""
    return value.reshape(*value.shape[:-1], *[1] * (rank - 1), value.shape[-1]) if value.dim() > 1 else value


def map_centered(features: Callable[[Tensor], Tensor], x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Map both inputs after moving the origin to the first point of x; returns one object if they are one object."""
    origin = (x if x.shape[-2] else z)[..., :1, :].detach()
    mapped = features(x - origin)
    return mapped, mapped if z is x else features(z - origin)


def on_circles(x: Tensor, period: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Columns x, each wound around a circle of radius 1 / scale: (..., D) -> (..., 2 D)."""
    angle = 2 * math.pi * x / period
    return torch.cat([angle.sin() / scale, angle.cos() / scale], -1)


def scaled_block(x: Tensor, z: Tensor, variance: Tensor, profile: Profile) -> Tensor:
    """Covariance block of inputs that are already centered and scaled.

    Args:
        x: inputs divided by ``profile.stretch`` lengthscales, shape (..., n, D).
        z: likewise, shape (..., m, D); batch dimensions broadcast against ``x``.
        variance: scalar tensor, or one that broadcasts against the block.
        profile: one of the profiles of this module.

    Returns:
        Block of shape (..., n, m). It is kept for the backward pass, so it must not be changed in place.
    """
    return apply(_Radial, x, z, variance, profile.function)[0]


def _rbf(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k = v exp(-q)."""
    k = torch.neg(q, out=_reuse(q)).exp_()
    k = torch.mul(k, v, out=_reuse(k))
    return k, -k


def _matern12(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k = v exp(-s); its slope is infinite at distance zero, where the subgradient 0 is taken."""
    s = q.sqrt()
    k = s.neg().exp_()
    k = torch.mul(k, v, out=_reuse(k))
    return k, torch.div(k, s).mul_(-1 / 2).masked_fill(q <= _FLOOR, 0.0)


def _matern32(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k = v (1 + s) exp(-s)."""
    q = torch.clamp(q, max=_FAR, out=_reuse(q))
    s = q.sqrt()
    e = s.neg().exp_()
    e = torch.mul(e, v, out=_reuse(e))
    return torch.addcmul(e, s, e, out=_reuse(s)), e.mul(-1 / 2)


def _matern52(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k = v (1 + s + s^2 / 3) exp(-s)."""
    q = torch.clamp(q, max=_FAR, out=_reuse(q))
    s = q.sqrt()
    e = s.neg().exp_()
    e = torch.mul(e, v, out=_reuse(e))
    t = torch.addcmul(e, s, e, out=_reuse(s))
    return torch.addcmul(t, q, e, value=1 / 3, out=_reuse(e)), t.mul(-1 / 6)


def _wendland(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k = v (1 - s)^6 (35 s^2 + 18 s + 3) / 3 for s < 1, else 0; its slope is -v (28 / 3) (1 - s)^5 (1 + 5 s)."""
    s = q.sqrt()
    rest = (1 - s).clamp(min=0)
    fifth = v * rest.pow(5)
    return fifth * rest * (35 * q + 18 * s + 3) / 3, fifth * (1 + 5 * s) * (-28 / 3)


def _constant(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k = v."""
    return v.expand_as(q).clone(), torch.zeros_like(q)


def _wave(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k = v (1 - q / 2), the cosine of the angle between points on a circle at distance sqrt(q)."""
    return v * (1 - q / 2), (v / -2).expand_as(q)


def _identity(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k = v q, the squared distance itself for v = 1."""
    return q * v, v.expand_as(q)


RBF = Profile(math.sqrt(2), _rbf)
WENDLAND = Profile(1.0, _wendland)
CONSTANT = Profile(1.0, _constant)
WAVE = Profile(1.0, _wave)
MATERN12 = Profile(1.0, _matern12)
MATERN32 = Profile(1 / math.sqrt(3), _matern32)
MATERN52 = Profile(1 / math.sqrt(5), _matern52)
MATERN = Profile(1.0, None, matern_table.correlation)
SQUARED_DISTANCE = Profile(1.0, _identity)

_FAR = 1e30  # largest squared distance, also in place of an overflow: the covariance is zero
_FLOOR = 1e-24  # squared distances up to this count as zero where the derivative of a square root would be infinite


class _Radial(torch.autograd.Function):
    """(x, z, v) -> (k, dk/dq); only k is differentiable."""

    @staticmethod
    def forward(x: Tensor, z: Tensor, variance: Tensor, function: Callable) -> tuple[Tensor, Tensor]:
        q = squared_distance(x, z)
        if variance.dim() and (shape := torch.broadcast_shapes(q.shape, variance.shape)) != q.shape:
            q = q.expand(shape).contiguous()  # profiles may write into it
        return function(q, variance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        x, z, variance, ctx.function = inputs
        ctx.save_for_backward(x, z, variance, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, z, variance, k, slope = ctx.saved_tensors
        if torch.is_grad_enabled():
            k, slope = ctx.function(squared_distance(x, z).clamp_min(_FLOOR), variance)
        grad_x = grad_z = grad_variance = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            weights = grad * slope
            if ctx.needs_input_grad[0]:
                grad_x = distance_gradient(weights, x, z)
            if ctx.needs_input_grad[1]:
                grad_z = distance_gradient(weights.mT, z, x)
        if ctx.needs_input_grad[2]:
            grad_variance = (grad * k).sum_to_size(variance.shape) / variance
        return grad_x, grad_z, grad_variance, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, z: Tensor, variance: Tensor, function: Callable) -> tuple:
        """Move the mapped dimension to the front of each argument that has it."""
        rank = max(y.dim() - (dim is not None) for y, dim in zip((x, z, variance), in_dims, strict=False))
        x, z, variance = mapped_first((x, z, variance), in_dims[:3], (0, 0, 0))
        if x.dim() <= rank and z.dim() <= rank:
            x = x.expand(info.batch_size, *[1] * (rank - x.dim()), *x.shape)
        return _Radial.apply(x, z, variance, function), (0, 0)


def distance_gradient(weights: Tensor, x: Tensor, z: Tensor) -> Tensor:
    """2 sum_j weights_ij (x_i - z_j), summed over the batch dimensions along which ``x`` was broadcast."""
    rows = torch.cat([z, torch.ones_like(z[..., :1])], -1).mT  # few long rows: several times faster than weights @ z
    total = (rows @ weights.mT).mT
    return (2 * (total[..., -1:] * x - total[..., :-1])).sum_to_size(x.shape)


def squared_distance(x: Tensor, z: Tensor) -> Tensor:
    """|x_i - z_j|^2 from differences, one input dimension at a time."""
    columns = z.mT.contiguous()
    diff = x[..., 0, None] - columns[..., 0, None, :]
    q = diff.square()
    for d in range(1, x.shape[-1]):
        diff = torch.sub(x[..., d, None], columns[..., d, None, :], out=_reuse(diff))
        q.addcmul_(diff, diff)
    return q


def _reuse(buffer: Tensor) -> Tensor | None:
    """``out=`` argument that overwrites ``buffer``, unless a graph is being recorded that may need its content."""
    return None if torch.is_grad_enabled() else buffer
