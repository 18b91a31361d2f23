r"""A non-separable kernel of space and time: not a product of a spatial and a temporal kernel.

.. math:: k(h, u) = \psi(u)^{-(\delta + \beta D / 2)}\; k_0\big(|h|\, \psi(u)^{-\beta / 2}\big), \qquad
   \psi(u) = 1 + |u / \tau|^{2 \alpha}

(Gneiting 2002, eq. 14), for a spatial lag h and a time lag u. With :math:`\beta = 0` it is separable; with a larger one
the spatial range grows with the time lag, as in moving weather. Cost: one block of :math:`k_0`.
"""

from typing import cast

import torch
from pyro.nn import pyro_method
from torch import Tensor

from pyro_nngp._checks import check_int, fail
from pyro_nngp.hyperparameters import Hyperparameter, between, positive
from pyro_nngp.kernels import radial
from pyro_nngp.kernels.base import Kernel, Wrapper
from pyro_nngp.kernels.covariance import Covariance
from pyro_nngp.kernels.stationary import check_scale_mixture

_FLOOR = 1e-24  # squared time lags up to this count as zero


class Gneiting(Wrapper):
    r"""Non-separable covariance of space and time.

    Args:
        kern: the kernel :math:`k_0` of space, an :class:`RBF`, :class:`Matern12`, :class:`Matern32` or
            :class:`Matern52` whose ``active_dims`` name the columns of space.
        time_dim: the column of time.
        timescale: :math:`\tau`, in the unit of that column.
        interaction: :math:`\beta` in (0, 1): how far the process is from a separable one.
        exponent: :math:`\alpha` in (0, 1): paths in time are rough at 1/2 and almost smooth at 1.
        decay: :math:`\delta > 0`: the correlation at lag h = 0 falls as :math:`|u|^{-2 \alpha \delta}`, in addition to
            the effect of the interaction.

    Raises:
        TypeError: if ``kern`` is another kernel.
        ValueError: if ``kern`` has no ``active_dims``, or they contain ``time_dim``; if a hyperparameter is out of
            range.
    """

    moves_inputs = True

    def __init__(
        self,
        kern: Kernel,
        time_dim: int,
        timescale: Hyperparameter | None = None,
        interaction: Hyperparameter | None = None,
        exponent: Hyperparameter | None = None,
        decay: Hyperparameter | None = None,
    ) -> None:
        name = "Gneiting"
        check_scale_mixture(name, kern)
        check_int(name, "time_dim", time_dim, 0, "Give the number of the column of time.")
        if kern.active_dims is None or time_dim in kern.active_dims:
            cure = "Write Matern32(2, active_dims=[0, 1]) for space in the first two columns."
            fail(name, "kern", f"with active_dims without the column {time_dim} of time", kern.active_dims, cure)
        super().__init__(kern, kern.input_dim + 1, [*kern.active_dims, time_dim])
        self.time_dim = time_dim
        self.declare("timescale", timescale)
        self.interaction = between(name, "interaction", interaction, 0.0, 1.0, 0.5)
        self.exponent = between(name, "exponent", exponent, 0.0, 1.0, 0.5)
        self.decay = positive(name, "decay", decay, 0.5)
        self._sizes.update(interaction=1, exponent=1, decay=1)

    @pyro_method
    def bind(self) -> Covariance:
        cov = self.kern.bind()
        parts, values = cast(radial.Radial, cov.radial), self.read_all()
        batch = torch.broadcast_shapes(self.batch_shape_of(values), cov.batch_shape or ())

        def block(x: Tensor, z: Tensor) -> Tensor:
            self.check_columns(x)
            rank = max(x.dim(), z.dim())
            tau, beta, alpha, delta = (
                radial.broadcast_numbers(values[arg].to(x), rank)
                for arg in ("timescale", "interaction", "exponent", "decay")
            )
            u = (x[..., self.time_dim, None] - z[..., None, :, self.time_dim]) / tau
            power = torch.where(u.square() > _FLOOR, u.square().clamp(min=_FLOOR).pow(alpha), 0.0)
            log_psi = torch.log1p(power)
            q = parts.scaled_squares(x, z) * (-beta * log_psi).exp()
            fall = (-(delta + beta * self.kern.input_dim / 2) * log_psi).exp()
            return fall * parts.covariance_at(q, rank)

        def diag(x: Tensor) -> Tensor:
            variances = cov.diag(x)
            shape = x.shape[:-1]
            return variances.expand(*batch, *shape) if variances.dim() == len(shape) else variances

        return Covariance(block, diag, None, batch)
