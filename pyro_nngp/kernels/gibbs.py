r"""Stationary kernels whose lengthscales vary over the input space.

.. math:: k(x, z) = \Big(\frac{2\, a(x)\, a(z)}{a(x)^2 + a(z)^2}\Big)^{D/2}
   k_0\Big(\frac{|x - z|}{\sqrt{(a(x)^2 + a(z)^2) / 2}}\Big)

with a positive factor a and a stationary kernel :math:`k_0` that is a mixture of RBF kernels, so that the result is
positive definite (Gibbs 1997 for the RBF kernel; Paciorek and Schervish 2004 for all).

Cost: one block of :math:`k_0`, and a once per input.
"""

from collections.abc import Callable
from typing import cast

from pyro.nn import pyro_method
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._kinds import check_callable
from pyro_nngp.kernels import radial
from pyro_nngp.kernels.base import Kernel, Wrapper, in_dtype
from pyro_nngp.kernels.covariance import Covariance
from pyro_nngp.kernels.stationary import check_scale_mixture


class Gibbs(Wrapper):
    """A stationary kernel whose lengthscales are multiplied by a factor that varies over the input space.

    Args:
        kern: an :class:`RBF`, :class:`Matern12`, :class:`Matern32` or :class:`Matern52`.
        factor: from inputs (..., n, D) to positive factors (..., n) of all lengthscales; a ``torch.nn.Module`` is
            trained and saved with the kernel. It sees all columns, the kernel its ``active_dims``.

    Raises:
        TypeError: if ``kern`` is another kernel, or ``factor`` not callable.
        ValueError: if the factor is not one number per point.
    """

    moves_inputs = True

    def __init__(self, kern: Kernel, factor: Callable[[Tensor], Tensor]) -> None:
        check_scale_mixture("Gibbs", kern)
        check_callable("Gibbs", "factor", factor, "Pass a function of the inputs that returns one factor per point.", 1)
        super().__init__(kern, kern.input_dim, kern.active_dims)
        self.factor = factor

    @pyro_method
    def bind(self) -> Covariance:
        cov, factor = self.kern.bind(), self.factor
        parts, dim = cast(radial.Radial, cov.radial), self.kern.input_dim

        def at(x: Tensor) -> Tensor:
            a = in_dtype(factor, x.dtype)(x)
            if not isinstance(a, Tensor) or a.shape != x.shape[:-1]:
                actual = tuple(a.shape) if isinstance(a, Tensor) else type(a).__name__
                fail("Gibbs", "factor", f"of shape {tuple(x.shape[:-1])}", actual, "Return one factor per point.")
            return a

        def block(x: Tensor, z: Tensor) -> Tensor:
            rank = max(x.dim(), z.dim())
            a = at(x)
            b = (a if z is x else at(z))[..., None, :]
            a = a[..., :, None]
            mean = (a.square() + b.square()) / 2
            return (a * b / mean).pow(dim / 2) * parts.covariance_at(parts.scaled_squares(x, z) / mean, rank)

        return Covariance(block, cov.diag, None, cov.batch_shape)
