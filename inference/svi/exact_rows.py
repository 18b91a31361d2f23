r"""Some rows of a trained method as an exact Gaussian process, for checks: covariance matrix C of y, and residuals.

With its factor L, :math:`L^{-1} (y - m) \sim N(0, I)` are the errors of predictions of each row from those before it,
in units of predictive standard deviations.

Cost: O(n^3) for n = 512 rows.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.inference.protocols import single_output
from pyro_nngp.inference.svi.neighbor_check import some_rows
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.linalg import NotPositiveDefiniteError, add_diagonal, cholesky

_ROWS, _LEAST = 512, 100


class ExactRows(NamedTuple):
    """Rows of the data in double precision.

    Attributes:
        x: inputs.
        residual: y less its mean.
        tril: Cholesky factor of the covariance matrix of y.
        mean_function: the mean function.
    """

    x: Float[Tensor, "n D"]
    residual: Float[Tensor, " n"]
    tril: Float[Tensor, "n n"]
    mean_function: Any


@torch.no_grad()
def exact_rows(method: Any) -> ExactRows | None:
    """Rows of a method with one output and Gaussian noise.

    Returns:
        The rows, 512 at most; None with weights, for other methods, with few rows, and where C is singular in double
        precision.
    """
    if single_output(method, _LEAST) is None or method.weights is not None or not method.likelihood.is_gaussian:
        return None
    bound, rows = method.bound(), some_rows(method.y, _ROWS)
    if bound.kernel is None or len(bound.covariances) != 1:
        return None
    x, dtype = method.x[rows].double(), method.x.dtype
    residual = (method.rows.targets(rows).to(dtype) - method.rows.mean(bound, rows)).double()
    cov = bind_double(bound.kernel, dtype)(x, x)
    added = bound.jitter * cov.diagonal() + bound.likelihood.variance.double()
    try:
        tril = cholesky(add_diagonal(cov, added), 0.0)
    except NotPositiveDefiniteError:
        return None
    return ExactRows(x, residual, tril, bound.mean_function)
