r"""Kernels without a lengthscale: a random constant, a random linear function, a varying amplitude.

Cost: one product per block. Symbols: \sigma^2 variance.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_nngp._checks import check_callable
from pyro_nngp.hyperparameters import Hyperparameter, pyro_entry
from pyro_nngp.kernels.base import Covariance, Kernel, check_kernel


class Constant(Kernel):
    r"""The covariance of a random constant, :math:`k(x, z) = \sigma^2`.

    Args:
        input_dim: number D of input columns; values do not matter.
        variance: :math:`\sigma^2`, a scalar.
        active_dims: indices of these columns, as in :class:`Kernel`.
    """

    def __init__(
        self, input_dim: int, variance: Hyperparameter | None = None, active_dims: Sequence[int] | None = None
    ) -> None:
        super().__init__(input_dim, active_dims)
        self.declare("variance", variance)

    @pyro_entry
    def bind(self) -> Covariance:
        variance = self._read("variance")

        def block(x: Tensor, z: Tensor) -> Tensor:
            x, z = self._column_pair(x, z)
            batch = torch.broadcast_shapes(x.shape[:-2], z.shape[:-2])
            return variance.to(x.dtype).expand(*batch, x.shape[-2], z.shape[-2])

        return Covariance(block, lambda x: variance.to(x.dtype).expand(self._columns(x).shape[:-1]))


class Linear(Kernel):
    r"""The covariance of a random linear function through the origin, :math:`k(x, z) = \sigma^2 x^\top z`.

    Args:
        input_dim: number D of input columns that the kernel acts on.
        variance: :math:`\sigma^2`, a scalar.
        active_dims: which columns of the input to use; by default the input has exactly D columns.
    """

    def __init__(
        self, input_dim: int, variance: Hyperparameter | None = None, active_dims: Sequence[int] | None = None
    ) -> None:
        super().__init__(input_dim, active_dims)
        self.declare("variance", variance)

    @pyro_entry
    def bind(self) -> Covariance:
        variance = self._read("variance")

        def block(x: Tensor, z: Tensor) -> Tensor:
            x, z = self._column_pair(x, z)
            return (variance.to(x.dtype) * x) @ z.mT

        return Covariance(block, lambda x: variance.to(x.dtype) * self._columns(x).square().sum(-1))


class VerticalScaling(Kernel):
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
        check_callable(type(self).__name__, "vscaling_fn", vscaling_fn, cure)
        super().__init__(kern.input_dim, kern.active_dims)
        self.kern = kern
        self.vscaling_fn = vscaling_fn

    @pyro_entry
    def bind(self) -> Covariance:
        cov, amplitude = self.kern.bind(), self.vscaling_fn
        return Covariance(
            lambda x, z: amplitude(x)[..., :, None] * cov(x, z) * amplitude(z)[..., None, :],
            lambda x: amplitude(x).square() * cov.diag(x),
        )
