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
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._indexing import values_at
from pyro_nngp.conditionals.general_kernel import block_conditional
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.kernels.base import Whole, bind_double
from pyro_nngp.linalg import cholesky, half_solve
from pyro_nngp.linalg.neighbor_products import gram_of_neighbors


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
    kernel, dim = whole
    explained = gram_of_neighbors(x[:, dim:], points[:, dim:], near)
    x, points = x[:, :dim], points[:, :dim]
    nugget = values_at(jitter * kernel.diag(points), near)
    noise = nugget if noise is None else noise + nugget
    w, var = block_conditional(kernel, x, points, near, noise, 0.0, explained)
    return w, var + jitter * kernel.diag(x)


__all__ = ["LowRank", "residual_conditional", "residual_covariance"]
