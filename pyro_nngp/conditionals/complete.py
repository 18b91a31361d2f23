r"""Conditionals given all other points, of many targets at once, from one dense Cholesky factor.

Let C be the covariance of observations at N points, noise included, in some order, and :math:`C = L L^\top`. Three
tables of neighbors leave nothing out:

- each point given all earlier ones, as in an exact process written as a product of conditionals:
  :math:`I - A = \mathrm{diag}(L)\, L^{-1}` has the weights A, and :math:`v_j = L_{jj}^2 - \delta_j`;
- each of some points given all others: :math:`w_{ij} = -(C^{-1})_{ij} / (C^{-1})_{ii}` and
  :math:`v_i = 1 / (C^{-1})_{ii} - \delta_i`;
- new points given all: :math:`w = C^{-1} k_n`.

Weights and variances are those of :mod:`pyro_nngp.conditionals.nearest_neighbor`, at O(N^3) in place of O(N^4) or
O(B N^3). All work is in double precision; autograd differentiates it.

Symbols: N points, B targets, K neighbors of each.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from pyro_nngp.kernels import Covariance
from pyro_nngp.linalg import add_diagonal, cholesky, half_solve

_MOST_POINTS = 10_000  # whose dense matrices fit in memory


def complete_conditional(
    cov: Covariance,
    x: Float[Tensor, "B D"],
    points: Float[Tensor, "N D"],
    neighbors: Int[Tensor, "B K"],
    noise: Float[Tensor, "*L N"] | None,
    jitter: float,
) -> tuple[Float[Tensor, "*S B K"], Float[Tensor, "*S B"]] | None:
    """Weights and variances where neighbors leave nothing out; None for other tables of neighbors.

    Arguments are as in :func:`~pyro_nngp.conditionals.graph_conditional`.
    """
    (count, width), size = neighbors.shape, len(points)
    if not 1 < size <= _MOST_POINTS or width < size - 1 or count < 2 or cov.whole is not None:
        return None
    if any(is_batchedtensor(value) for value in (x, points, neighbors)):
        return None
    neighbors = neighbors.long()
    among = torch.zeros(count, size + 1, dtype=torch.bool, device=x.device)
    among = among.scatter_(1, neighbors.where(neighbors >= 0, size), True)[:, :size]
    counts = among.sum(1)
    if bool((counts == size).all()):
        return _at_new(cov, x, points, neighbors, noise, jitter)
    if bool((counts == size - 1).all()):
        left_out = (~among).int().argmax(1)
        return _of_others(cov, points, left_out, neighbors, noise, jitter) if torch.equal(x, points[left_out]) else None
    if count == size and torch.equal(x, points):
        order = counts.argsort()
        earlier = torch.ones(size, size, dtype=torch.bool, device=x.device).tril(-1)
        if torch.equal(among[order][:, order], earlier):
            return _of_earlier(cov, points, order, neighbors, noise, jitter)
    return None


def _factor(cov: Covariance, points: Tensor, noise: Tensor | None, jitter: float) -> Tensor:
    """L for the observations at some points."""
    points = points.double()
    added = jitter * cov.diag(points)
    added = added if noise is None else added + noise
    matrix = add_diagonal(cov(points, points), added)
    return cholesky(matrix, 0.0, escalate=not is_batchedtensor(matrix))


def _of_earlier(
    cov: Covariance, points: Tensor, order: Tensor, neighbors: Tensor, noise: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor]:
    own = None if noise is None else noise[..., order].double()
    tril = _factor(cov, points[order], own, jitter)
    diagonal = tril.diagonal(dim1=-2, dim2=-1)
    weights = -diagonal[..., None] * half_solve(tril, torch.eye(len(points), dtype=tril.dtype, device=tril.device))
    place = order.argsort()
    weights, var = weights[..., place, :][..., place], diagonal[..., place].square()
    return _taken(cov, points, weights, var, neighbors, noise, jitter)


def _of_others(
    cov: Covariance, points: Tensor, own: Tensor, neighbors: Tensor, noise: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor]:
    tril = _factor(cov, points, None if noise is None else noise.double(), jitter)
    half = half_solve(tril, torch.eye(len(points), dtype=tril.dtype, device=tril.device))
    inverse = half.mT @ half[..., own]
    precision = inverse.mT.gather(-1, own[:, None].expand(*inverse.shape[:-2], -1, 1))[..., 0]
    weights = -inverse.mT / precision[..., None]
    noise = None if noise is None else noise[..., own]
    return _taken(cov, points[own], weights, 1 / precision, neighbors, noise, jitter)


def _at_new(
    cov: Covariance, x: Tensor, points: Tensor, neighbors: Tensor, noise: Tensor | None, jitter: float
) -> tuple[Tensor, Tensor]:
    tril = _factor(cov, points, None if noise is None else noise.double(), jitter)
    half = half_solve(tril, cov(points.double(), x.double()))
    weights = half_solve(tril, half, transposed=True).mT
    var = (1 + jitter) * cov.diag(x.double()) - half.square().sum(-2)
    return _taken(cov, x, weights, var, neighbors, None, jitter)


def _taken(
    cov: Covariance,
    x: Tensor,
    weights: Tensor,
    variance: Tensor,
    neighbors: Tensor,
    noise: Tensor | None,
    jitter: float,
) -> tuple[Tensor, Tensor]:
    """Weights at the neighbors, 0 where there is none, and variances of f, which are at least the nugget."""
    near = neighbors.clamp(min=0).expand(*weights.shape[:-2], *neighbors.shape)
    w = weights.gather(-1, near).masked_fill(neighbors < 0, 0.0)
    variance = variance if noise is None else variance - noise.double()
    return w.to(x.dtype), torch.maximum(variance, jitter * cov.diag(x.double())).to(x.dtype)
