r"""The whitened conditional on all M inducing values at once, as in SVGP, SWSGP with H = M and BSGP.

With :math:`K_{zz} = L L^\top` and :math:`u = L \nu`, :math:`\nu \sim N(0, I)` under the prior,

.. math:: f(x) \mid \nu \sim N(a^\top \nu, v), \qquad a = L^{-1} k_z(x), \quad v = k_{xx} - a^\top a.

Jitter is a relative nugget of the process, as in :mod:`pyro_nngp.conditionals.nearest_neighbor`. The covariance of
hundreds of inducing points is nearly singular: its factor and the weights are computed in float64, whatever the dtype.

Cost: O(M^3 + B M^2) time, O(M^2 + B M) memory.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_floating, check_number
from pyro_nngp.conditionals.general_kernel import variance_left
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.linalg import DEFAULT_JITTER, cholesky, half_solve


def whitened_conditional(
    kernel: Any, x: Float[Tensor, "... B D"], z: Float[Tensor, "M D"], jitter: float = DEFAULT_JITTER
) -> tuple[Float[Tensor, "... B M"], Float[Tensor, "... B"], Float[Tensor, "... M M"]]:
    r"""Whitened weights and variance of f at x given f at all inducing points, and the factor of their covariance.

    Args:
        kernel: a :class:`~pyro_nngp.kernels.Kernel`, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``.
        x: targets.
        z: inducing points.
        jitter: relative nugget.

    Returns:
        a, v > 0 and L, lower triangular with :math:`L L^\top = K_{zz}`; batch dimensions of the kernel lead.

    Raises:
        NotPositiveDefiniteError: if the covariance of the inducing points cannot be factorized.
    """
    check_floating("whitened_conditional", "x", x)
    check_floating("whitened_conditional", "z", z)
    check_number("whitened_conditional", "jitter", jitter)
    cov, points, targets = bind_double(kernel, x.dtype), z.double(), x.double()
    tril = cholesky(cov(points, points), jitter)
    a = half_solve(tril, cov(points, targets)).mT
    return a.to(x), variance_left(cov.diag(targets), a, jitter)[0].to(x), tril.to(x)
