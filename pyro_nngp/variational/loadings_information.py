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
from torch.nn.functional import pad

from pyro_nngp.bound import Bound
from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.coregionalized import NNGPs
from pyro_nngp.kernels import Covariance
from pyro_nngp.linalg import cholesky, half_solve
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
        graph: of these points.
    """

    def __init__(self, rows: Int[Tensor, " n"], factors: Sequence[VecchiaFactor], graph: NeighborGraph) -> None:
        self.rows, self.factors, self._graph = rows, factors, graph

    def posterior(self, loading: Float[Tensor, "T F"], precision: Float[Tensor, "T N"]) -> CoupledPosterior:
        """q(u) at these points, by a dense factor."""
        return CoupledPosterior(self.factors, loading[None], precision[:, self.rows], dense_up_to=2**31)

    def information(
        self,
        bound: Bound,
        loading: Float[Tensor, "T F"],
        basis: Float[Tensor, "N P"],
        linear: Float[Tensor, "F N"],
        precision: Float[Tensor, "T N"],
    ) -> Float[Tensor, "TPF TPF"]:
        """What these points say of coefficients and loadings, by means alone; with gradients in the kernels.

        Args:
            bound: hyperparameters with gradients.
            loading: A.
            basis: basis functions.
            linear: A' diag(tau) t of the sites.
            precision: their precisions.
        """
        size, n, tau, near = loading.shape[1], len(self.rows), precision[:, self.rows], self._graph.neighbors
        dense = []
        for kernel in bound.covariances:
            prior = NNGP(kernel, self._graph, self._graph.batch(), jitter=bound.jitter, validate_args=False)
            w, var = (part.double() for part in prior.conditionals)
            weights = w.new_zeros(n, n).scatter_add(1, near.clamp(min=0), w.masked_fill(near < 0, 0.0))
            root = (torch.eye(n).to(w) - weights) / var.sqrt()[:, None]
            dense.append(root.mT @ root)
        total = torch.block_diag(*(dense * size if len(dense) == 1 else dense)).view(size, n, size, n)
        gram = torch.einsum("tl,tn,tk->lkn", loading, tau, loading)
        total = total + torch.diag_embed(gram).transpose(1, 2)
        tril = cholesky(total.reshape(size * n, size * n), 0.0)
        half = half_solve(tril, torch.eye(size * n).to(total))
        cov = half.mT @ half
        loc = (cov @ linear[:, self.rows].reshape(-1, 1)).view(size, n)
        at_points = cov.view(size, n, size, n).diagonal(dim1=1, dim2=3).permute(2, 0, 1)
        complete = complete_information(basis[self.rows], loc, at_points, tau)
        design = torch.cat([basis[self.rows], loc.mT], -1)
        cross = torch.einsum("pn,pl,nk->lnpk", tau, loading, design).reshape(size * n, -1)
        return torch.block_diag(*complete) - cross.mT @ cov @ cross


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
        result.append(Block(rows, NNGPs(priors, num_factors, validate_args=False).factors(), part))
    return result


def complete_information(
    basis: Float[Tensor, "N P"], loc: Float[Tensor, "F N"], cov: Float[Tensor, "N F F"], precision: Float[Tensor, "T N"]
) -> Float[Tensor, "T PF PF"]:
    """Information on each output's coefficients and loadings if the factors were known, on average over q."""
    design = torch.cat([basis, loc.mT], -1)
    p = basis.shape[1]
    squares = design[:, :, None] * design[:, None] + pad(cov, (p, 0, p, 0))
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
    half = half_solve(posterior.tril, cross.reshape(len(loc) * len(design), -1))
    return half.mT @ half


def information_of_variances(posterior: CoupledPosterior) -> Float[Tensor, "T F T F"]:
    """Q of a block."""
    a, tau, size = posterior.loading[0], posterior.precision, len(posterior.factors)
    cov = posterior.dense_covariance
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
