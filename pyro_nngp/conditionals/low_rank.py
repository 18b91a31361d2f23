r"""Gaussian processes as a low-rank part from M inducing points, and a residual.

With :math:`K_{zz} = L L^\top` at inducing points z and :math:`\varphi(x) = L^{-1} k_z(x)`,

.. math:: f(x) = \varphi(x)^\top \nu + r(x), \quad \nu \sim N(0, I), \qquad
   \mathrm{cov}\, r(x, x') = k(x, x') - \varphi(x)^\top \varphi(x') .

Points carry their features :math:`\varphi` as further columns, so that the covariance of the residual is a function of
pairs of points like any other. The nugget is one of the process, not relative to the residual, which vanishes at
inducing points.

Cost: O(M^3 + B M^2) for features; O(B (K^3 + K^2 M)) for conditionals of the residual. Symbols: B points, K neighbors,
M inducing points.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.autograd.function import once_differentiable

from pyro_nngp._indexing import values_at
from pyro_nngp.conditionals.general_kernel import block_conditional
from pyro_nngp.conditionals.stationary_kernel import gradients_of
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.kernels.covariance import Whole
from pyro_nngp.linalg import cholesky, half_solve
from pyro_nngp.linalg.neighbor_products import feature_gradients, gram_of_neighbors, gram_with_neighbors
from pyro_nngp.native import conditional as compiled
from pyro_nngp.native.conditional import Problem, Wanted

GRAM_BYTES = 2**28
"""Of Gram matrices of features that are in memory at once."""


@dataclass(frozen=True)
class LowRank:
    r"""The low-rank part of a process.

    Attributes:
        kernel: of the process, bound to its hyperparameters.
        inducing: inducing points; there may be none.
        jitter: relative nugget.
        loc: mean of :math:`\nu` given data; None is 0.
    """

    kernel: Any
    inducing: Float[Tensor, "M D"]
    jitter: float
    loc: Float[Tensor, " M"] | None = None

    def __len__(self) -> int:
        return len(self.inducing)

    def features(self, x: Float[Tensor, "... B D"]) -> Float[Tensor, "... B M"]:
        r""":math:`\varphi`, computed in float64: the covariance of hundreds of inducing points is nearly singular."""
        return half_solve(self._tril, self._cov(self.inducing.double(), x.double())).mT.to(x)

    def inputs(self, x: Float[Tensor, "... B D"]) -> Float[Tensor, "... B C"]:
        """Points with their features, as :attr:`residual` takes them."""
        return torch.cat([x, self.features(x)], -1)

    def features_of(self, inputs: Float[Tensor, "... B C"]) -> Float[Tensor, "... B M"]:
        """The features among the columns of :meth:`inputs`."""
        return inputs[..., inputs.shape[-1] - len(self) :]

    def mean(self, x: Float[Tensor, "B D"]) -> Float[Tensor, " B"]:
        """The mean of the low-rank part given data; O(B M)."""
        if self.loc is None:
            return x.new_zeros(len(x))
        weights = half_solve(self._tril, self.loc[:, None], transposed=True)
        return (self._cov(x.double(), self.inducing.double()) @ weights)[:, 0].to(x)

    @cached_property
    def residual(self) -> Covariance:
        """The covariance function of the residual at points with their features."""
        return residual_covariance(bind(self.kernel), self.inducing.shape[1])

    @cached_property
    def _cov(self) -> Covariance:
        return bind_double(self.kernel, self.inducing.dtype)

    @cached_property
    def _tril(self) -> Float[Tensor, "M M"]:
        z = self.inducing.double()
        return cholesky(self._cov(z, z), self.jitter)


def residual_covariance(kernel: Covariance, dim: int) -> Covariance:
    """The covariance of the residual of a process at points (..., n, dim + M), of which the last columns are features.

    Args:
        kernel: of the process.
        dim: number of the first columns, the inputs of the process.
    """

    def block(x: Tensor, z: Tensor) -> Tensor:
        return kernel(x[..., :dim], z[..., :dim]) - x[..., dim:] @ z[..., dim:].mT

    def diag(x: Tensor) -> Tensor:
        return (kernel.diag(x[..., :dim]) - x[..., dim:].square().sum(-1)).clamp(min=0)

    return Covariance(block, diag, None, kernel.batch_shape, Whole(kernel, dim))


def residual_conditional(
    whole: Whole, x: Tensor, points: Tensor, near: Int[Tensor, "B K"], noise: Tensor | None, jitter: float
) -> tuple[Float[Tensor, "B K"], Float[Tensor, " B"]]:
    """Weights and variances of a residual at points with their features, given that at neighbors.

    Args:
        whole: the process.
        x: points, the first columns inputs of the process and the others features.
        points: those that may be neighbors, likewise.
        near: rows of them, -1 padded.
        noise: variance added at each neighbor, (B, K), or None.
        jitter: nugget, relative to the variance of the process.
    """
    size = max(1, GRAM_BYTES // ((near.shape[1] + 1) ** 2 * x.element_size()))
    if len(x) > size:
        starts = range(0, len(x), size)
        parts = [slice(start, start + size) for start in starts]
        each = [
            residual_conditional(whole, x[p], points, near[p], None if noise is None else noise[p], jitter)
            for p in parts
        ]
        weights, variances = zip(*each, strict=True)
        return torch.cat(weights), torch.cat(variances)
    kernel, dim = whole
    features, x, points = (x[:, dim:], points[:, dim:]), x[:, :dim], points[:, :dim]
    if kernel.radial is None or kernel.batch_shape:
        return _general(kernel, x, points, near, noise, jitter, features)
    radial = kernel.radial
    columns, candidates = radial.columns(x), radial.columns(points)
    scale = radial.lengthscale.to(x).expand(columns.shape[1])
    rest = near, radial.profile, jitter, radial.smoothness
    problem = Problem(columns, candidates, scale, radial.variance.to(x), noise, *rest)
    if not compiled.supported(problem) or is_batchedtensor(x):
        return _general(kernel, x, points, near, noise, jitter, features)
    w, var, failed = _Compiled.apply(*problem, *features)
    if not failed.any():
        return w, var
    rows = failed.nonzero()[:, 0]
    noise = None if noise is None else noise[rows]
    again = _general(kernel, x[rows], points, near[rows], noise, jitter, (features[0][rows], features[1]))
    return w.index_copy(0, rows, again[0]), var.index_copy(0, rows, again[1])


def _general(
    kernel: Covariance,
    x: Tensor,
    points: Tensor,
    near: Tensor,
    noise: Tensor | None,
    jitter: float,
    features: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """The conditionals by the code for general kernels."""
    nugget = values_at(jitter * kernel.diag(points), near)
    noise = nugget if noise is None else noise + nugget
    w, var = block_conditional(kernel, x, points, near, noise, 0.0, gram_of_neighbors(*features, near))
    return w, var + jitter * kernel.diag(x)


class _Compiled(torch.autograd.Function):
    r"""(\*problem, features of the points, features of the neighbors) -> (w, v, failed), by compiled code.

    The gradient of the covariance C of the neighbors is :math:`(c w^\top + w c^\top) / 2`, :math:`c = \bar v w - (C +
    \mathrm{diag}\, \delta)^{-1} \bar w`, so that those of the features cost O(K M) for each point.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *given, own, table = arguments
        problem = Problem(*given)
        explained = gram_with_neighbors(own, table, problem.neighbors)
        x, points, scale, variance, noise, _, _, _, smoothness, of_own, of_table = ctx.needs_input_grad
        ctx.needs, of_features = (x, points, scale, variance, noise, smoothness), of_own or of_table
        ctx.wanted = Wanted(scale or variance or smoothness, noise, x or points, smoothness)
        recording = any(ctx.needs) or of_features
        w, var, failed, kept = compiled.forward(problem, ctx.wanted if recording else None, explained=explained)
        ctx.rest = problem.profile, problem.jitter
        ctx.save_for_backward(*problem[:6], problem.smoothness, own, table, *kept)
        ctx.mark_non_differentiable(failed)
        return w, var, failed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_w: Tensor, grad_var: Tensor, _: Any) -> tuple[Any, ...]:
        *tensors, smoothness, own, table = ctx.saved_tensors[:9]
        kept = ctx.saved_tensors[9:]
        problem = Problem(*tensors, *ctx.rest)._replace(smoothness=smoothness)
        failed, w, var = kept[:3]
        explained = gram_with_neighbors(own, table, problem.neighbors)  # again, rather than kept: B K^2 numbers
        raw = compiled.backward(
            problem, kept, grad_w.contiguous(), grad_var.contiguous(), ctx.wanted, explained=explained
        )
        *grads, of_smoothness = gradients_of(problem, ctx.needs, raw)
        bar = grad_var.masked_fill(failed | (var <= problem.jitter * problem.prior_variance), 0.0)
        change = cast(Tensor, raw.left) - bar[:, None] * w
        return (
            *grads,
            None,
            None,
            None,
            of_smoothness,
            *feature_gradients(problem.neighbors, own, table, w, change, bar),
        )


__all__ = ["LowRank", "residual_conditional", "residual_covariance"]
