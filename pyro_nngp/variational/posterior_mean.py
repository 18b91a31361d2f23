r"""The posterior mean of latent values under a nearest-neighbor prior, given Gaussian observations of them.

It solves :math:`P m = \Sigma^{-1} y`, :math:`P = \Lambda + \Sigma^{-1}`, with the sparse precision :math:`\Lambda` of
the prior and the noise variances :math:`\Sigma`.

Where the data determine a value better than its neighbors do, conjugate gradients on P are quick, with its diagonal as
preconditioner. Elsewhere, and as soon as 20 iterations no longer halve the residual, they are in whitened coordinates
(:mod:`pyro_nngp.linalg.vecchia_factor`), which are quick where the prior dominates. With G the root of the
prior's covariance, an approximate mean with the residual r costs the ELBO

.. math:: \tfrac12 r^\top P^{-1} r \le \tfrac12 \| G^\top r \|^2

nats, whatever the units of data and kernel. So the tolerance is on :math:`\| G^\top r \| / \sqrt N`.

On several processes the iterations are as in :mod:`pyro_nngp.distributed.factor`.

Cost: O(N K) time per iteration, O(N K) memory; up to 1,000 points one dense factorization instead. Symbols: N points,
K neighbors, L latent functions.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.distributed.factor import ShardedFactor
from pyro_nngp.linalg import VecchiaFactor, factor_solve
from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients
from pyro_nngp.linalg.vecchia_factor import determines

DENSE_UP_TO = 1000**2  # entries of the system up to which one dense Cholesky factorization is used
PLAIN_ITERATIONS = 200  # largest number of iterations on P before the change to whitened coordinates
_LOOK = 20  # iterations between checks of the residual
_NEAR = 25  # most iterations with solutions for a similar P: more say that it is not
_RELATIVE = 1e-3  # the unit of the residual is at least this part of the right-hand side, because of rounding


def posterior_mean(
    prior: VecchiaFactor | ShardedFactor,
    y: Float[Tensor, "*L N"],
    precision: Float[Tensor, "*L N"],
    start: Float[Tensor, "*L N"],
    tolerance: float = 1e-3,
    reduction: float = 0.0,
    precondition: Callable[[Tensor], Tensor] | None = None,
    direct: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "*L N"]:
    """Mean of u given Gaussian observations.

    Args:
        prior: (I - A, V), from :meth:`~pyro_nngp.linalg.VecchiaFactor.prepared`, or of local rows on several processes.
        y: observations of u (the mean function subtracted), one set per leading index.
        precision: inverse noise variances.
        start: initial m.
        tolerance: on the residual: m costs the ELBO at most tolerance^2 / 2 nats per point. With data so exact that
            rounding limits the residual, it is on 1,000 times the residual relative to that at m = 0.
        reduction: stop also when the residual has fallen to this part of its start.
        precondition: solutions for a similar P, for the first iterations.
        direct: solutions for P itself, where these do not suffice; None goes on with other iterations.

    Returns:
        m, in the shape and dtype of `y`.
    """
    dtype = y.dtype
    is_small = y.shape[:-1].numel() * len(prior) ** 2 <= DENSE_UP_TO and precondition is None
    if isinstance(prior, ShardedFactor):
        if not is_small:
            return prior.posterior_mean(y, precision, start, tolerance, reduction)
        y, precision, start = (prior.gather(part) for part in torch.broadcast_tensors(y, precision, start))
        return prior.own(posterior_mean(prior.gathered(), y, precision, start))
    y, precision, start = y.double(), precision.double(), start.double()
    right = precision * y
    if is_small:
        return factor_solve(prior.posterior_tril(precision), right[..., None])[..., 0].to(dtype)

    def product(m: Tensor) -> Tensor:
        return prior.product(m) + precision * m

    def norm(residual: Tensor) -> Tensor:
        return prior.color_transposed(residual).norm(dim=-1)

    size = torch.clamp(_RELATIVE * norm(right), min=len(prior) ** 0.5)
    if reduction:
        tolerance = max(tolerance, reduction * float((norm(right - product(start)) / size).max()))
    left = math.inf
    if precondition is not None:
        start, left = conjugate_gradients(
            product, right, start, None, tolerance, _NEAR, norm=norm, size=size, precondition=precondition
        )
        if math.isnan(left):  # hyperparameters without a solution, which the factor at the end reports
            return start.to(dtype)
        if left > tolerance and direct is not None:
            return direct(right).to(dtype)
    elif determines(prior.var, precision) and PLAIN_ITERATIONS:
        diagonal = prior.diagonal() + precision
        start, left = conjugate_gradients(
            product,
            right,
            start,
            diagonal,
            tolerance,
            PLAIN_ITERATIONS,
            norm=norm,
            size=size,
            every=_LOOK,
            halving=True,
        )
    if left <= tolerance:
        return start.to(dtype)
    z = prior.solve(prior.color_transposed(right), precision, prior.whiten(start), tolerance, size=size)
    return prior.color(z).to(dtype)
