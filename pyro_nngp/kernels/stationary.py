r"""Stationary kernels: functions of the distance after division by the lengthscales.

Differs from the textbook (Rasmussen and Williams 2006, chapter 4): nothing.
Cost: O(n m D) per block. Symbols: \ell lengthscale, \sigma^2 variance, r the distance after scaling.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from pyro.nn import pyro_method
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._kinds import check_flags
from pyro_nngp.hyperparameters import Hyperparameter
from pyro_nngp.kernels import radial
from pyro_nngp.kernels.base import Kernel, Sum
from pyro_nngp.kernels.covariance import Covariance, KernelLike


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
    parts = kernel.modules() if isinstance(kernel, Kernel) else ()
    for part in (each for each in parts if isinstance(each, Kernel)):
        if isinstance(part, Sum) or part.moves_inputs:
            return None
        if isinstance(part, Stationary):
            columns = part.active_dims or range(part.input_dim)
            if isinstance(part, Periodic) or not scales.keys().isdisjoint(columns):
                return None
            scales.update(zip(columns, part.read("lengthscale").detach().expand(part.input_dim), strict=True))
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
        isotropic: whether a lengthscale that is left out is one number for all columns; by default each has one.

    Values of sites may have batch dimensions (*S,), a lengthscale has them in front of its columns: (*S, D). Scalars
    (*S,) whose last dimension happens to be D need their columns, ``value[..., None].expand(*value.shape, D)``.

    Raises:
        ValueError: if a hyperparameter is not positive or has a wrong shape, or inputs have a wrong number of columns.
    """

    profile: radial.Profile
    most_columns: float = math.inf  # for which the kernel is positive definite

    def __init__(
        self,
        input_dim: int,
        variance: Hyperparameter | None = None,
        lengthscale: Hyperparameter | None = None,
        active_dims: Sequence[int] | None = None,
        isotropic: bool = False,
    ) -> None:
        super().__init__(input_dim, active_dims)
        name = type(self).__name__
        if input_dim > self.most_columns:
            cure = "Choose columns with active_dims, or take a Matern32."
            expectation = f"of at most {self.most_columns}, where the kernel is positive definite"
            fail(name, "input_dim", expectation, input_dim, cure)
        check_flags(name, isotropic=isotropic)
        self.isotropic = isotropic
        self.declare("variance", variance)
        self.declare("lengthscale", lengthscale, 1 if isotropic else input_dim)

    def columns_of(self, lengthscale: Tensor) -> Tensor:
        """The lengthscale with its columns as last dimension, as :func:`radial.broadcast_columns` takes it."""
        return lengthscale[..., None] if self._sizes["lengthscale"] == 1 and lengthscale.dim() else lengthscale

    @pyro_method
    def bind(self) -> Covariance:
        values = self.read_all()
        scale, variance = self.columns_of(values["lengthscale"]), values["variance"]
        smoothness = values.get("smoothness")
        parts = radial.Radial(self.profile, scale, variance, self._columns, self.input_dim, smoothness)
        return Covariance(
            lambda x, z: radial.block(*self._column_pair(x, z), scale, variance, self.profile, smoothness),
            lambda x: self._variances(x, parts.variance),
            parts,
            self.batch_shape_of(values),
        )


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


def check_scale_mixture(where: str, kern: Any) -> None:
    """Raise ``TypeError`` unless a kernel is one of the scale mixtures of RBF kernels with a profile."""
    if not isinstance(kern, RBF | Matern12 | Matern32 | Matern52):
        actual = type(kern).__name__
        fail(where, "kern", "to be RBF, Matern12, Matern32 or Matern52", actual, "Pass one of them.", TypeError)


class Wendland(Stationary):
    r""":math:`k(x, z) = \sigma^2 (1 - r)_+^6 (35 r^2 + 18 r + 3) / 3`, zero from one lengthscale on.

    Functions have two derivatives. Positive definite in up to three dimensions (Wendland 1995). Multiplied with
    another kernel it is a taper.

    Raises:
        ValueError: if ``input_dim`` > 3.
    """

    profile = radial.WENDLAND
    most_columns = 3


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
        isotropic: bool = False,
    ) -> None:
        super().__init__(input_dim, variance, lengthscale, active_dims, isotropic)
        self.declare("scale_mixture", scale_mixture)

    @pyro_method
    def bind(self) -> Covariance:
        values = self.read_all()
        lengthscale = self.columns_of(values["lengthscale"])

        def block(x: Tensor, z: Tensor) -> Tensor:
            rank = max(x.dim(), z.dim())
            alpha = radial.broadcast_numbers(values["scale_mixture"].to(x), rank)
            scale = radial.broadcast_columns(lengthscale.to(x), rank) * (2 * alpha).sqrt()
            variance = radial.broadcast_numbers(values["variance"].to(x), rank)
            x, z = radial.map_centered(lambda y: y / scale, *self._column_pair(x, z))
            q = radial.scaled_block(x, z, x.new_ones(()), radial.SQUARED_DISTANCE)
            return variance * torch.exp(-alpha * torch.log1p(q))

        return Covariance(block, lambda x: self._variances(x, values["variance"]), None, self.batch_shape_of(values))


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
        isotropic: bool = False,
    ) -> None:
        super().__init__(input_dim, variance, lengthscale, active_dims, isotropic)
        self.declare("period", period, input_dim)

    @pyro_method
    def bind(self) -> Covariance:
        values = self.read_all()
        lengthscale = self.columns_of(values["lengthscale"])

        def block(x: Tensor, z: Tensor) -> Tensor:
            rank = max(x.dim(), z.dim())
            period = radial.broadcast_columns(values["period"].to(x), rank)
            scale = radial.broadcast_columns(lengthscale.to(x), rank) * self.profile.stretch

            x, z = radial.map_centered(lambda y: radial.on_circles(y, period, scale), *self._column_pair(x, z))
            return radial.scaled_block(x, z, radial.broadcast_numbers(values["variance"].to(x), rank), self.profile)

        def circles(x: Tensor) -> Tensor:
            return radial.on_circles(self._columns(x).double(), values["period"].to(x.device)).to(x)

        batch, parts = self.batch_shape_of(values), None
        if values["period"].dim() <= (self.input_dim > 1):  # no batch of them: all sets share the circles
            twice = torch.cat([lengthscale.expand(*lengthscale.shape[:-1], self.input_dim)] * 2, -1)
            parts = radial.Radial(self.profile, twice, values["variance"], circles, 2 * self.input_dim)
        return Covariance(block, lambda x: self._variances(x, values["variance"]), parts, batch)
