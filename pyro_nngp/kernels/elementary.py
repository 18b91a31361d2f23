r"""Kernels without a lengthscale: random constants, linear functions, waves, wide networks, varying amplitudes.

Cost: one matrix product per block. Symbols: \sigma^2 variance.
"""

import math
from collections.abc import Callable, Sequence

import torch
from pyro.nn import pyro_method
from torch import Tensor

from pyro_nngp._kinds import check_callable
from pyro_nngp.hyperparameters import Hyperparameter
from pyro_nngp.kernels.base import Kernel, Wrapper, check_kernel, in_dtype
from pyro_nngp.kernels.covariance import Covariance
from pyro_nngp.kernels.radial import CONSTANT, WAVE, Radial, broadcast_columns, broadcast_numbers, map_centered

_PARALLEL = 1e-14  # squared sine of angles that count as zero, where the gradient of the angle would be infinite


class _Scaled(Kernel):
    """Base class of kernels with a variance."""

    def __init__(
        self, input_dim: int, variance: Hyperparameter | None = None, active_dims: Sequence[int] | None = None
    ) -> None:
        super().__init__(input_dim, active_dims)
        self.declare("variance", variance)


class Constant(_Scaled):
    r"""The covariance of a random constant, :math:`k(x, z) = \sigma^2`.

    Args:
        input_dim: number D of input columns; values do not matter.
        variance: :math:`\sigma^2`, a scalar.
        active_dims: indices of these columns, as in :class:`Kernel`.
    """

    @pyro_method
    def bind(self) -> Covariance:
        variance = self.read("variance")

        def block(x: Tensor, z: Tensor) -> Tensor:
            x, z = self._column_pair(x, z)
            shape = (*torch.broadcast_shapes(x.shape[:-2], z.shape[:-2]), x.shape[-2], z.shape[-2])
            return broadcast_numbers(variance.to(x), len(shape)).expand(*variance.shape, *shape)

        def no_column(x: Tensor) -> Tensor:
            return torch.zeros_like(self._columns(x)[..., :1])

        radial = Radial(CONSTANT, variance.new_ones(()), variance, no_column, 1)
        return Covariance(block, lambda x: self._variances(x, variance), radial, variance.shape)


class Linear(_Scaled):
    r"""The covariance of a random linear function through the origin, :math:`k(x, z) = \sigma^2 x^\top z`.

    Args:
        input_dim: number D of input columns that the kernel acts on.
        variance: :math:`\sigma^2`, a scalar.
        active_dims: which columns of the input to use; by default the input has exactly D columns.
    """

    @pyro_method
    def bind(self) -> Covariance:
        variance = self.read("variance")

        def block(x: Tensor, z: Tensor) -> Tensor:
            x, z = self._column_pair(x, z)
            return (broadcast_numbers(variance.to(x), max(x.dim(), z.dim())) * x) @ z.mT

        def diag(x: Tensor) -> Tensor:
            return broadcast_numbers(variance.to(x), x.dim() - 1) * self._columns(x).square().sum(-1)

        return Covariance(block, diag, None, variance.shape)


class Cosine(_Scaled):
    r"""A random wave, :math:`k(x, z) = \sigma^2 \cos\big(2 \pi \sum_d (x_d - z_d) / p_d\big)`.

    A sum of products ``RBF(D) * Cosine(D)`` is the spectral mixture kernel (Wilson and Adams 2013).

    Args:
        input_dim: number D of input columns that the kernel acts on.
        variance: :math:`\sigma^2`, a scalar.
        period: wavelength along each column, a scalar or of shape (D,).
        active_dims: which columns of the input to use; by default the input has exactly D columns.
    """

    def __init__(
        self,
        input_dim: int,
        variance: Hyperparameter | None = None,
        period: Hyperparameter | None = None,
        active_dims: Sequence[int] | None = None,
    ) -> None:
        super().__init__(input_dim, variance, active_dims)
        self.declare("period", period, input_dim)

    @pyro_method
    def bind(self) -> Covariance:
        values = self.read_all()
        batch = self.batch_shape_of(values)

        def wind(x: Tensor, period: Tensor) -> Tensor:
            angle = 2 * math.pi * (x / period).expand(*x.shape[:-1], self.input_dim).sum(-1, keepdim=True)
            return torch.cat([angle.cos(), angle.sin()], -1)

        def block(x: Tensor, z: Tensor) -> Tensor:
            rank = max(x.dim(), z.dim())
            period = broadcast_columns(values["period"].to(x), rank)
            x, z = map_centered(lambda y: wind(y, period), *self._column_pair(x, z))
            return broadcast_numbers(values["variance"].to(x), rank) * (x @ z.mT)

        def circle(x: Tensor) -> Tensor:
            return wind(self._columns(x).double(), period.to(x.device)).to(x)

        period, variance, radial = values["period"], values["variance"], None
        if period.dim() <= (self.input_dim > 1):  # no batch of them: all sets share the circle
            radial = Radial(WAVE, period.new_ones(()), variance, circle, 2)
        return Covariance(block, lambda x: self._variances(x, variance.expand(batch)), radial, batch)


class ArcCosine(_Scaled):
    r"""The kernel of an infinitely wide layer of rectified units (Cho and Saul 2009, order 1).

    .. math:: k(x, z) = \frac{|x'| |z'|}{\pi} \big(\sin\theta + (\pi - \theta) \cos\theta\big), \qquad
       |x'|^2 = \sigma_0^2 + \sigma^2 |x|^2

    with :math:`\theta` the angle between :math:`x' = (\sigma_0, \sigma x)` and :math:`z'`: piecewise linear functions
    that go on linearly outside the data.

    Args:
        input_dim: number D of input columns that the kernel acts on.
        variance: :math:`\sigma^2` of the weights, a scalar.
        bias: :math:`\sigma_0^2`, the variance of the biases, a scalar.
        active_dims: which columns of the input to use; by default the input has exactly D columns.
    """

    def __init__(
        self,
        input_dim: int,
        variance: Hyperparameter | None = None,
        bias: Hyperparameter | None = None,
        active_dims: Sequence[int] | None = None,
    ) -> None:
        super().__init__(input_dim, variance, active_dims)
        self.declare("bias", bias)

    @pyro_method
    def bind(self) -> Covariance:
        values = self.read_all()

        def diag(x: Tensor) -> Tensor:
            weight, bias = (broadcast_numbers(values[arg].to(x), x.dim() - 1) for arg in ("variance", "bias"))
            return bias + weight * self._columns(x).square().sum(-1)

        def block(x: Tensor, z: Tensor) -> Tensor:
            rank = max(x.dim(), z.dim())
            weight, bias = (broadcast_numbers(values[arg].to(x), rank) for arg in ("variance", "bias"))
            norms = (diag(x)[..., :, None] * diag(z)[..., None, :]).sqrt()
            left, right = self._column_pair(x, z)
            cos = ((bias + weight * (left @ right.mT)) / norms).clamp(-1, 1)
            apart = 1 - cos.square()
            sin = torch.where(apart > _PARALLEL, apart.clamp(min=_PARALLEL).sqrt(), 0.0)
            angle = torch.atan2(sin, cos)
            return norms / math.pi * (sin + (math.pi - angle) * cos)

        return Covariance(block, diag, None, self.batch_shape_of(values))


class VerticalScaling(Wrapper):
    """a(x) k(x, z) a(z): a standard deviation that varies over the input space.

    Args:
        kern: the kernel k.
        vscaling_fn: the function a, from inputs (..., n, D) to amplitudes (..., n); may be a ``torch.nn.Module``.

    Raises:
        TypeError: if ``kern`` is not a :class:`~pyro_nngp.kernels.Kernel`, or ``vscaling_fn`` not callable.
    """

    def __init__(self, kern: Kernel, vscaling_fn: Callable[[Tensor], Tensor]) -> None:
        check_kernel(type(self).__name__, "kern", kern)
        cure = "Pass a function of the inputs that returns one amplitude per point."
        check_callable(type(self).__name__, "vscaling_fn", vscaling_fn, cure, 1)
        super().__init__(kern, kern.input_dim, kern.active_dims)
        self.vscaling_fn = vscaling_fn

    @pyro_method
    def bind(self) -> Covariance:
        cov, function = self.kern.bind(), self.vscaling_fn

        def amplitude(x: Tensor) -> Tensor:
            return in_dtype(function, x.dtype)(x)

        return Covariance(
            lambda x, z: amplitude(x)[..., :, None] * cov(x, z) * amplitude(z)[..., None, :],
            lambda x: amplitude(x).square() * cov.diag(x),
            batch_shape=cov.batch_shape,
        )
