r"""Check of a constant mean: Gaussian data have no linear trend beyond what kernel and noise explain.

With the covariance matrix C of y at n of the points, ones and standardized inputs as columns of H, and the sum of
squares :math:`S(H) = \min_b (y - H b)^\top C^{-1} (y - H b)`, linear terms gain

.. math:: \tfrac n2 \log \frac{S(1)}{S(H)} - \tfrac{r}{2}

nats of log likelihood beyond what the r of them gain in data without trend, on average, where C is right up to a
factor: leave-one-out densities can leave C too small by ten. The kernel was trained on the trend too, and explains part
of it, or all: on six simulated monthly series with a season and a trend that rises by three times its amplitude the
gain is 2.3 to 3.6 nats, and it is for predictions beyond the data to warn. On 40 draws of processes in one to three
dimensions it is 3.5 at most with hyperparameters of ``Vecchia``, and more than 5 in two with those of ``LOO``. It is
more on 14 of 30 sets of real data (1,500 rows each); held-out rows among the data gain by ``LinearMean`` in 10 of 17
fits of these, .16 on wine; they lose .05 on protein, and 1.2 on bike, whose targets have no noise
(``benchmarks/results/plain_warnings.md``).

Cost: that of :mod:`~pyro_nngp.inference.svi.exact_rows`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.inference.svi.exact_rows import ExactRows
from pyro_nngp.inference.svi.result import warn_of
from pyro_nngp.linalg import half_solve
from pyro_nngp.means import ConstantMean

_GAIN, _RANK = 5.0, 1e-8


def gain_of_trend(y: Float[Tensor, " n"], x: Float[Tensor, "n D"], tril: Float[Tensor, "n n"]) -> float:
    """Nats of log likelihood that linear terms gain on a constant, less what they gain in data without trend.

    The scale of the covariance matrix is a free parameter of both.

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
    explained = (left.T @ target).square().sum() / target.square().sum()
    return -float(len(y) * torch.log1p(-explained) + left.shape[1]) / 2


@torch.no_grad()
def check_trend(exact: ExactRows | None) -> None:
    """Warn if data of a trained method with Gaussian noise and a constant mean have a linear trend."""
    if exact is None or not isinstance(exact.mean_function, ConstantMean):
        return
    gain, dim = gain_of_trend(exact.residual, exact.x, exact.tril), exact.x.shape[1]
    if gain > _GAIN:
        warn_of(
            "data without a trend beyond what the kernel explains, got a linear one that gains "
            f"{gain:.2g} nats: predictions away from the data go to the constant mean. Take mean=LinearMean({dim}), "
            "with active_dims= for some columns."
        )
