r"""Information of data on loadings and coefficients with all latent values integrated out.

Outputs :math:`f_{pi} = \theta_p^\top d_i` with :math:`d_i = (z_i, u(x_i))`, basis functions and factors, have Gaussian
sites of precisions :math:`\tau_{pi}`. With :math:`q(u) = N(m, P^{-1})`, the information on :math:`\theta` is that of
data with known factors, less the variance of its score under q (Louis 1982):

.. math:: I = \mathrm{blockdiag}_p \sum_i \tau_{pi} E[d_i d_i^\top] - C^\top P^{-1} C - Q, \qquad
   C_{(l i), (p k)} = \tau_{pi} A_{pl} E[d_{ik}],

.. math:: Q_{(p l), (q k)} = \sum_{ij} \tau_{pi} \tau_{qj} \big( a_p^\top S_{ij} a_q\, S_{ij, lk}
   + a_p^\top S_{ij} e_k\, e_l^\top S_{ij} a_q \big), \qquad S_{ij} = \mathrm{Cov}(u_i, u_j) .

The second term comes from means, the third from variances: without it, intervals of correlations are too narrow.
Residuals of sites are left out, so that the first two terms are positive definite together.

Points are taken in blocks of neighbors with at most 3,000 latent values, as if blocks were independent: what two blocks
say of each other through the factors is left out.

Cost: O((F N)^3) up to 3,000 values, then O(N) blocks of this size; O(F^4 T N^2) for Q of a block. Symbols: N points, T
outputs, F factors, P basis functions.

Reference: Louis (1982), "Finding the observed information matrix when using the EM algorithm", JRSS B.
"""

from collections.abc import Sequence
from itertools import product
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.coregionalized import NNGPs
from pyro_nngp.kernels import Covariance
from pyro_nngp.linalg import factor_inverse, half_solve
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.linalg.vecchia_factor import VecchiaFactor
from pyro_nngp.neighbors import NeighborGraph

MOST_VALUES = 3000
"""Latent values of a block."""


class Block:
    """Some points with the priors of the factors on these points alone.

    Args:
        rows: numbers of the points.
        factors: (I - A, V) of each factor.
    """

    def __init__(self, rows: Int[Tensor, " n"], factors: Sequence[VecchiaFactor]) -> None:
        self.rows, self.factors = rows, factors

    def posterior(self, loading: Float[Tensor, "T F"], precision: Float[Tensor, "T N"]) -> CoupledPosterior:
        """q(u) at these points, by a dense factor."""
        return CoupledPosterior(self.factors, loading[None], precision[:, self.rows], dense_up_to=2**31)


def blocks_of(kernels: Sequence[Covariance], graph: NeighborGraph, num_factors: int, jitter: float) -> list[Block]:
    """All points in blocks.

    Args:
        kernels: bound, one for each factor or one for all.
        graph: the points and their neighbors.
        num_factors: F.
        jitter: relative nugget.
    """
    result = []
    for rows in _halved(graph, MOST_VALUES // num_factors):
        part = graph if len(rows) == graph.num_points else cast(NeighborGraph, graph.subset(rows))
        batch = part.batch()
        priors = [NNGP(kernel, part, batch, jitter=jitter, validate_args=False) for kernel in kernels]
        result.append(Block(rows, NNGPs(priors, num_factors, validate_args=False).factors()))
    return result


def complete_information(
    basis: Float[Tensor, "N P"], loc: Float[Tensor, "F N"], cov: Float[Tensor, "N F F"], precision: Float[Tensor, "T N"]
) -> Float[Tensor, "T PF PF"]:
    """Information on each output's coefficients and loadings if the factors were known, on average over q."""
    design = torch.cat([basis, loc.mT], -1)
    squares = design[:, :, None] * design[:, None]
    squares[:, basis.shape[1] :, basis.shape[1] :] += cov
    return (precision @ squares.flatten(1)).view(len(precision), design.shape[1], -1)


def information_of_means(
    block: Block,
    posterior: CoupledPosterior,
    basis: Float[Tensor, "N P"],
    loc: Float[Tensor, "F N"],
) -> Float[Tensor, "TPF TPF"]:
    """C' P^-1 C of a block."""
    design = torch.cat([basis, loc.mT], -1)[block.rows]
    cross = torch.einsum("pn,pl,nk->lnpk", posterior.precision, posterior.loading[0], design)
    half = half_solve(posterior.factor(), cross.reshape(len(loc) * len(design), -1))
    return half.mT @ half


def information_of_variances(posterior: CoupledPosterior) -> Float[Tensor, "T F T F"]:
    """Q of a block."""
    a, tau, size = posterior.loading[0], posterior.precision, len(posterior.factors)
    cov = factor_inverse(posterior.factor()).view(size, tau.shape[1], size, tau.shape[1])
    total = tau.new_zeros(len(a), size, len(a), size)
    for m, n, i, k in product(range(size), repeat=4):
        weight = tau @ (cov[m, :, n] * cov[i, :, k]) @ tau.mT
        total[:, i, :, k] += a[:, m, None] * a[:, n] * weight
        total[:, i, :, n] += a[:, m, None] * a[:, k] * weight
    return total


def _halved(graph: NeighborGraph, most: int) -> list[Int[Tensor, " n"]]:
    """Points in groups, halved along the widest column in units of the distances between neighbors."""
    x, near = graph.x[: graph.num_points].double(), graph.neighbors
    distance = (x[:, None] - x[near.clamp(min=0)]).abs().masked_fill((near < 0)[..., None], 0.0)
    units = x / distance.mean((0, 1)).clamp(min=torch.finfo(x.dtype).tiny)
    groups = [torch.arange(len(x), device=x.device)]
    while len(groups[0]) > most:
        groups = [half for rows in groups for half in _halves(units, rows)]
    return groups


def _halves(x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    own = x[rows]
    order = own[:, (own.amax(0) - own.amin(0)).argmax()].argsort()
    return rows[order].tensor_split(2)


__all__ = [
    "Block",
    "blocks_of",
    "complete_information",
    "information_of_means",
    "information_of_variances",
]
