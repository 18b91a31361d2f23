r"""The Matérn kernel of any smoothness, learned or given.

.. math:: k = \sigma^2 \frac{2^{1-\nu}}{\Gamma(\nu)} z^\nu K_\nu(z), \qquad z = \sqrt{2 \nu}\, r, \qquad
   K_\nu(z) = \int_0^\infty e^{-z \cosh t} \cosh(\nu t)\, dt

(Rasmussen and Williams 2006, eq. 4.14). The integral, whose trapezoidal rule converges geometrically, is evaluated once
per set of hyperparameters on a grid of log z, and interpolated by cubic polynomials between the grid's values and
slopes, to 1e-8 (2e-6 for a smoothness of 12). Gradients in the smoothness go through the grid.

Cost: O(n m D) per block, and 2 ms for the grid.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_nngp.hyperparameters import Hyperparameter, pyro_entry
from pyro_nngp.kernels import radial
from pyro_nngp.kernels.base import Covariance
from pyro_nngp.kernels.stationary import Stationary

_LEAST, _MOST, _GRID = 1e-12, 700.0, 2048  # of z
_STEP, _FURTHEST = 0.3, 36.0  # of the integral
_FLOOR = 1e-24  # squared distances up to this count as zero


class Matern(Stationary):
    r"""The Matérn kernel of smoothness :math:`\nu`: f has :math:`\lceil \nu \rceil - 1` derivatives.

    :class:`Matern12`, :class:`Matern32` and :class:`Matern52` are its cases 1/2, 3/2 and 5/2, and are computed several
    times as fast, in compiled code.

    Args:
        smoothness: :math:`\nu > 0`, a scalar; the others as in :class:`Stationary`. Beyond some 5 the data hardly tell
            one value from another.
    """

    def __init__(
        self,
        input_dim: int,
        variance: Hyperparameter | None = None,
        lengthscale: Hyperparameter | None = None,
        smoothness: Hyperparameter | None = None,
        active_dims: Sequence[int] | None = None,
        isotropic: bool = False,
    ) -> None:
        super().__init__(input_dim, variance, lengthscale, active_dims, isotropic)
        self.declare("smoothness", smoothness)

    @pyro_entry
    def bind(self) -> Covariance:
        values = self.read_all()
        batch = self.batch_shape_of(values)
        lengthscale = self.columns_of(values["lengthscale"])
        correlation = _interpolated(values["smoothness"].double())

        def block(x: Tensor, z: Tensor) -> Tensor:
            rank = max(x.dim(), z.dim())
            q = radial.block(*self._column_pair(x, z), lengthscale, x.new_ones(()), radial.SQUARED_DISTANCE)
            q = q.expand(torch.broadcast_shapes(q.shape, (*batch, *[1] * rank)))
            return radial.of_numbers(values["variance"].to(x.dtype), rank) * correlation(q)

        return Covariance(block, lambda x: self._variances(x, values["variance"]), None, batch)


def _interpolated(nu: Tensor) -> Callable[[Tensor], Tensor]:
    """The correlation as a function of squared scaled distances (*S, ...), for smoothness (*S,)."""
    log_z = torch.linspace(math.log(_LEAST), math.log(_MOST), _GRID, dtype=nu.dtype, device=nu.device)
    width = (math.log(_MOST) - math.log(_LEAST)) / (_GRID - 1)
    flat = nu.reshape(-1, 1)
    log_scale = math.log(2.0) * (1 - flat) - torch.lgamma(flat) + flat * log_z
    values = (log_scale + _log_bessel(flat, log_z)).exp()
    slopes = -(log_scale + log_z + _log_bessel(flat - 1, log_z)).exp() * width  # d(z^nu K_nu)/dz = -z^nu K_(nu-1)

    def correlation(q: Tensor) -> Tensor:
        dtype, shape = q.dtype, q.shape
        own = q.reshape(len(flat), -1) if nu.dim() else q.reshape(1, -1)
        near = own.double().clamp(min=_FLOOR)
        place = ((near * (2 * flat)).log() / 2 - math.log(_LEAST)) / width
        cell = place.detach().floor().clamp(0, _GRID - 2).long()
        t = (place - cell).clamp(0, 1)
        low, high, slope_low, slope_high = (
            table.gather(1, cell + shift) for table in (values, slopes) for shift in (0, 1)
        )
        rise = high - low
        curve = low + t * (
            slope_low + t * (3 * rise - 2 * slope_low - slope_high + t * (slope_low + slope_high - 2 * rise))
        )
        return torch.where(own > _FLOOR, curve.to(dtype), 1.0).reshape(shape)

    return correlation


def _log_bessel(nu: Tensor, log_z: Tensor) -> Tensor:
    r"""The logarithm of :math:`K_\nu(z)` for nu (S, 1) and z (G,)."""
    t = torch.arange(0, _FURTHEST, _STEP, dtype=log_z.dtype, device=log_z.device)
    log_cosh = nu[..., None].abs() * t + torch.log1p((-2 * nu[..., None].abs() * t).exp()) - math.log(2.0)
    exponent = log_cosh - log_z.exp()[:, None] * t.cosh()
    weights = torch.full_like(t, _STEP)
    weights[0] = _STEP / 2
    return (exponent + weights.log()).logsumexp(-1)
