r"""Check of a constant mean: Gaussian data have no linear trend beyond what kernel and noise explain.

With the covariance matrix C of y at n of the points, ones and standardized inputs as columns of H, and the sum of
squares :math:`S(H) = \min_b (y - H b)^\top C^{-1} (y - H b)`, linear terms gain

.. math:: \tfrac12 (S(1) - S(H)) - \tfrac{r}{2}

nats of log likelihood beyond what the r of them gain in data without trend, on average. The kernel was trained on the
trend too, and explains part of it. The gain is below 4.2 on 40 draws of processes in one to three dimensions. On 14 of
30 sets of real data (1,500 rows each) it is more, and held-out rows among the data gain by ``LinearMean`` in 11 of 19
fits of these, .12 on wine; they lose .05 on protein, and 1.2 on bike, whose targets have no noise
(``benchmarks/results/plain_warnings.md``). Away from the data more is at stake: three of six simulated monthly series
with a trend and a season have gains of 6 to 10, and their forecasts go to the constant, with four to fourteen times the
errors.

Cost: O(n^3) for n = 512 points.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.inference.protocols import single_output
from pyro_nngp.inference.svi.neighbor_check import some_rows
from pyro_nngp.inference.svi.result import warn_of
from pyro_nngp.linalg import NotPositiveDefiniteError, cholesky, half_solve
from pyro_nngp.means import ConstantMean

_POINTS, _LEAST, _GAIN, _RANK = 512, 100, 5.0, 1e-8


def gain_of_trend(y: Float[Tensor, " n"], x: Float[Tensor, "n D"], tril: Float[Tensor, "n n"]) -> float:
    """Nats of log likelihood that linear terms gain on a constant, less what they gain in data without trend.

    Args:
        y: data.
        x: inputs.
        tril: Cholesky factor of the covariance matrix of y.
    """
    spread = x.std(0)
    z = ((x - x.mean(0)) / spread)[:, spread > 0]
    terms = torch.cat([torch.ones_like(y)[:, None], z, y[:, None]], 1)
    white = half_solve(tril, terms)
    ones, columns, target = white[:, :1], white[:, 1:-1], white[:, -1]
    unit = ones / ones.norm()
    columns, target = columns - unit @ (unit.T @ columns), target - unit[:, 0] * (unit[:, 0] @ target)
    left, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    left = left[:, sizes > _RANK * sizes[:1]]  # the largest, if any column varies
    return float((left.T @ target).square().sum() - left.shape[1]) / 2


@torch.no_grad()
def check_trend(method: Any) -> None:
    """Warn if data of a trained method with Gaussian noise and a constant mean have a linear trend."""
    if single_output(method, _LEAST) is None or method.weights is not None or not method.likelihood.is_gaussian:
        return
    bound, rows = method.bound(), some_rows(method.y, _POINTS)
    if not isinstance(bound.mean_function, ConstantMean):
        return
    x = method.x[rows]
    residual = (method.rows.targets(rows).to(x) - method.rows.mean(bound, rows)).double()
    cov = bound.covariance(x, x).double()
    noise = bound.likelihood.variance.double().expand(len(rows))
    try:
        tril = cholesky(cov + torch.diag(noise), bound.jitter)
    except NotPositiveDefiniteError:
        return
    gain = gain_of_trend(residual, x.double(), tril)
    if gain > _GAIN:
        dim = x.shape[1]
        warn_of(
            "data without a trend beyond what the kernel explains, got a linear one that gains "
            f"{gain:.2g} nats: predictions away from the data go to the constant mean. Take mean=LinearMean({dim}), "
            "with active_dims= for some columns."
        )
