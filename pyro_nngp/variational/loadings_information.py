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

The gradient of :math:`-\tfrac12 \mathrm{tr}(M I)` at fixed M, sites and loadings, by means alone, is that of

.. math:: \tfrac12 E\big[v^\top P v - y^\top P y\big] - b^\top P\, m

in the P's that are written there, whose quadratic forms are sums over the conditionals of each factor, with v, y, b and
m held. For standard normal z and z', :math:`y = P^{-1} C B z` with a root B of M, :math:`v = P^{-1} H z'` with
:math:`H_i H_i^\top = \sum_p \tau_{pi} M_{pp}` at the factors, and :math:`b = P^{-1} g` with the gradient g in m.

Where the posterior precision has no factor, points are taken in blocks of neighbors with at most 3,000 latent values,
as if blocks were independent: what two blocks say of each other through the factors is left out. For Q they always are.

Cost: T (P + F) solutions with the factor, or O(N) blocks of 3,000 values; O(F^4 T N^2) for Q of a block; a few draws
for the gradient. Symbols: N points, T outputs, F factors, P basis functions, S and R draws.

Reference: Louis (1982), "Finding the observed information matrix when using the EM algorithm", JRSS B.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.coregionalized import NNGPs
from pyro_nngp.kernels import Covariance
from pyro_nngp.linalg import VecchiaFactor, cholesky
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.linalg.nested_dissection import families_of, in_units_of_distances, upper_half
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.latent_evidence import moments_of_draws

MOST_VALUES = 3000
"""Latent values of a block."""


class Block(NamedTuple):
    """Some points with the priors of the factors on these points alone.

    Attributes:
        rows: numbers of the points.
        factors: (I - A, V) of each factor.
        graph: of these points.
    """

    rows: Int[Tensor, " n"]
    factors: Sequence[VecchiaFactor]
    graph: NeighborGraph

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
    posterior: CoupledPosterior, basis: Float[Tensor, "N P"], loc: Float[Tensor, "F N"]
) -> Float[Tensor, "TPF TPF"]:
    """C' P^-1 C.

    Args:
        posterior: with a factor, and the same loadings at all points.
        basis: basis functions at its points.
        loc: means of the factors there.
    """
    design = torch.cat([basis, loc.mT], -1)
    cross = torch.einsum("pn,pl,nk->pkln", posterior.precision, posterior.loading[0], design).flatten(0, 1)
    return posterior.inner_products(cross)


def volume_gradient(
    posterior: CoupledPosterior,
    inverse: Float[Tensor, "TPF TPF"],
    basis: Float[Tensor, "N P"],
    loc: Float[Tensor, "F N"],
    white: tuple[Float[Tensor, "S TPF"], Float[Tensor, "R F N"]],
) -> list[tuple[Float[Tensor, "N K"], Float[Tensor, " N"]]]:
    """Gradient of -tr(M I) / 2 in weights and variances of the conditionals of each factor.

    Args:
        posterior: as of :func:`information_of_means`, as the next two.
        basis: basis functions.
        loc: means of the factors.
        inverse: M.
        white: standard normal z and z'.
    """
    loading, tau, p = posterior.loading[0], posterior.precision, basis.shape[1]
    design, count = torch.cat([basis, loc.mT], -1), len(loading)
    by_output = inverse.view(count, -1, count, design.shape[1]).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    at_points = torch.einsum("tn,tlk->nlk", tau, by_output[:, p:, p:])
    values, axes = torch.linalg.eigh(at_points)
    h = (white[0] @ cholesky(inverse, 0.0).mT).view(-1, count, design.shape[1])
    y = posterior.solve(posterior.transposed(tau * (h @ design.mT)))
    v = posterior.solve(torch.einsum("nlk,nk,skn->sln", axes, values.clamp(min=0).sqrt(), white[1]))
    in_loc = torch.einsum("stn,tn,stk->kn", posterior.at(y), tau, h[..., p:]) / len(h)
    in_loc -= torch.einsum("tn,tlk,nk->ln", tau, by_output[:, p:], design)
    back, result = posterior.solve(in_loc), []
    for number, factor in enumerate(posterior.factors):
        along = [moments_of_draws(factor, part[:, number]) for part in (y, v)]
        along += [moments_of_draws(factor, loc[number][None] + sign * back[number]) for sign in (1, -1)]
        cross, residual = (of_y - of_v + (plus - minus) / 2 for of_y, of_v, plus, minus in zip(*along, strict=True))
        result.append(
            (cross.masked_fill(factor.neighbors < 0, 0.0) / factor.var[:, None], residual / (2 * factor.var.square()))
        )
    return result


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
    """Points in groups, halved as for nested dissection."""
    x, families = graph.x[: graph.num_points], families_of(graph.neighbors.long())
    units, group, count = in_units_of_distances(x, families), np.zeros(len(x), np.int64), 1
    while len(x) > most * count:
        group, count = 2 * group + upper_half(units, group, count), 2 * count
    return [torch.from_numpy(np.flatnonzero(group == number)).to(x.device) for number in range(count)]


__all__ = [
    "Block",
    "blocks_of",
    "complete_information",
    "information_of_means",
    "information_of_variances",
]
