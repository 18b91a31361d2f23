r"""The Matérn kernel of any smoothness, learned or given.

.. math:: k = \sigma^2 \frac{2^{1-\nu}}{\Gamma(\nu)} z^\nu K_\nu(z), \qquad z = \sqrt{2 \nu}\, r

(Rasmussen and Williams 2006, eq. 4.14), by the polynomials of :mod:`pyro_nngp.kernels.matern_table`, on CPUs in
compiled code. Cost: O(n m D) per block, plus the table of the smoothness.
"""

from collections.abc import Sequence

from pyro_nngp.hyperparameters import Hyperparameter
from pyro_nngp.kernels import radial
from pyro_nngp.kernels.stationary import Stationary


class Matern(Stationary):
    r"""The Matérn kernel of smoothness :math:`\nu`: f has :math:`\lceil \nu \rceil - 1` derivatives.

    :class:`Matern12`, :class:`Matern32` and :class:`Matern52` are its cases 1/2, 3/2 and 5/2.

    Args:
        smoothness: :math:`\nu > 0`, a scalar; the others as in :class:`Stationary`. None is learned between .1 and 5:
            data hardly distinguish values above, where covariance matrices become ill-conditioned.
    """

    profile = radial.MATERN

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
        self.declare("smoothness", smoothness, unset=(0.1, 5.0, 2.5))
