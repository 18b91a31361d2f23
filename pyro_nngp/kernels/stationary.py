r"""Stationary kernels: functions of the distance after division by the lengthscales.

Differs from the textbook (Rasmussen and Williams 2006, chapter 4): nothing.
Cost: O(n m D) per block. Symbols: \ell lengthscale, \sigma^2 variance, r the distance after scaling.
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.hyperparameters import Hyperparameter, pyro_entry
from pyro_nngp.kernels import radial
from pyro_nngp.kernels.base import Covariance, Kernel, KernelLike, Sum


def neighbor_lengthscale(kernel: KernelLike, input_dim: int) -> Float[Tensor, " D"] | None:
    """The lengthscale of each input column, for a neighbor search in the metric of the kernel.

    Args:
        kernel: a kernel, possibly combined, or any covariance function. Reading it has Pyro effects, as in ``bind``.
        input_dim: number D of input columns.

    Returns:
        Shape (D,), without gradient. None unless each column has the lengthscale of exactly one stationary kernel, and
        for sums, whose correlation is not a function of one distance; use :class:`~pyro_nngp.kernels.KernelMetric`.
    """
    scales: dict[int, Tensor] = {}
    for part in kernel.modules() if isinstance(kernel, Kernel) else ():
        if isinstance(part, Sum):
            return None
        if isinstance(part, Stationary):
            columns = part.active_dims or range(part.input_dim)
            if isinstance(part, Periodic) or not scales.keys().isdisjoint(columns):
                return None
            scales.update(zip(columns, part._read("lengthscale").detach().expand(part.input_dim), strict=True))
    if scales.keys() != set(range(input_dim)):
        return None
    return torch.stack([scales[d] for d in range(input_dim)])


class Stationary(Kernel):
    r"""Base class of :math:`k(x, z) = \sigma^2 \rho(r)` with :math:`r^2 = \sum_d (x_d - z_d)^2 / \ell_d^2`.

    Args:
        input_dim: number D of input columns that the kernel acts on.
        variance: marginal variance :math:`\sigma^2`, a scalar.
        lengthscale: :math:`\ell`, a scalar or one value per input dimension, shape (D,).
        active_dims: which columns of the input to use; by default the input has exactly D columns.

    Raises:
        ValueError: if a hyperparameter is not positive or has a wrong shape, or inputs have a wrong number of columns.
    """

    profile: radial.Profile

    def __init__(
        self,
        input_dim: int,
        variance: Hyperparameter | None = None,
        lengthscale: Hyperparameter | None = None,
        active_dims: Sequence[int] | None = None,
    ) -> None:
        super().__init__(input_dim, active_dims)
        self.declare("variance", variance)
        self.declare("lengthscale", lengthscale, input_dim)

    @pyro_entry
    def bind(self) -> Covariance:
        parts = radial.Radial(self.profile, self._read("lengthscale"), self._read("variance"), self._columns)
        return Covariance(
            lambda x, z: radial.block(*self._column_pair(x, z), parts.lengthscale, parts.variance, self.profile),
            lambda x: self._variances(x, parts.variance),
            parts,
        )

    def _covariance(
        self, features: Callable[[Tensor], Tensor], function: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Covariance:
        """``function(x, z, variance)`` of the features of inputs whose origin is the first point of the block."""
        variance = self._read("variance")

        def block(x: Tensor, z: Tensor) -> Tensor:
            return function(*radial.map_pair(features, *self._column_pair(x, z)), variance.to(x.dtype))

        return Covariance(block, lambda x: self._variances(x, variance))

    def _variances(self, x: Tensor, variance: Tensor) -> Tensor:
        return variance.to(x.dtype).expand(self._columns(x).shape[:-1])


class RBF(Stationary):
    r""":math:`k(x, z) = \sigma^2 \exp(-r^2 / 2)`."""

    profile = radial.RBF


class Matern12(Stationary):
    r""":math:`k(x, z) = \sigma^2 \exp(-r)`; at distance zero the gradient in the inputs is taken as 0."""

    profile = radial.MATERN12


class Matern32(Stationary):
    r""":math:`k(x, z) = \sigma^2 (1 + s) \exp(-s)` with :math:`s = \sqrt{3} r`."""

    profile = radial.MATERN32


class Matern52(Stationary):
    r""":math:`k(x, z) = \sigma^2 (1 + s + s^2 / 3) \exp(-s)` with :math:`s = \sqrt{5} r`."""

    profile = radial.MATERN52


class RationalQuadratic(Stationary):
    r""":math:`k(x, z) = \sigma^2 (1 + r^2 / (2 \alpha))^{-\alpha}`, a scale mixture of RBF kernels.

    Args:
        scale_mixture: :math:`\alpha > 0`, a scalar; the others as in :class:`Stationary`.
    """

    def __init__(
        self,
        input_dim: int,
        variance: Hyperparameter | None = None,
        lengthscale: Hyperparameter | None = None,
        scale_mixture: Hyperparameter | None = None,
        active_dims: Sequence[int] | None = None,
    ) -> None:
        super().__init__(input_dim, variance, lengthscale, active_dims)
        self.declare("scale_mixture", scale_mixture)

    @pyro_entry
    def bind(self) -> Covariance:
        lengthscale = self._read("lengthscale")
        alpha = self._read("scale_mixture")

        def function(x: Tensor, z: Tensor, variance: Tensor) -> Tensor:
            q = radial.radial(x, z, x.new_ones(()), radial.SQUARED_DISTANCE)
            return variance * torch.exp(-alpha.to(x.dtype) * torch.log1p(q))

        return self._covariance(lambda x: x / (lengthscale.to(x.dtype) * (2 * alpha.to(x.dtype)).sqrt()), function)


class Periodic(Stationary):
    r""":math:`k(x, z) = \sigma^2 \exp(-2 \sum_d \sin^2(\pi (x_d - z_d) / p_d) / \ell_d^2)`.

    This is the RBF kernel after winding each input dimension around a circle.

    Args:
        period: :math:`p`, a scalar or one value per input dimension, shape (D,); the others as in :class:`Stationary`.
    """

    profile = radial.RBF

    def __init__(
        self,
        input_dim: int,
        variance: Hyperparameter | None = None,
        lengthscale: Hyperparameter | None = None,
        period: Hyperparameter | None = None,
        active_dims: Sequence[int] | None = None,
    ) -> None:
        super().__init__(input_dim, variance, lengthscale, active_dims)
        self.declare("period", period, input_dim)

    @pyro_entry
    def bind(self) -> Covariance:
        lengthscale = self._read("lengthscale")
        period = self._read("period")

        def wind(x: Tensor) -> Tensor:
            angle = 2 * math.pi * x / period.to(x.dtype)
            scale = lengthscale.to(x.dtype) * self.profile.stretch
            return torch.cat([angle.sin() / scale, angle.cos() / scale], -1)

        return self._covariance(wind, lambda x, z, variance: radial.radial(x, z, variance, self.profile))
