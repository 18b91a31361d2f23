r"""The Vecchia factor (I - A, V) of a prior whose rows are on several processes, and the posterior mean under it.

A product with the precision :math:`\Lambda = (I - A)^\top V^{-1} (I - A)` fetches the values of the halo, and gives
back what the own rows add to rows of others. Conjugate gradients on :math:`\Lambda + \mathrm{diag}\,\tau` sum their
dot products over the processes. The preconditioner is the Vecchia approximation with diagonal update of Kündig and
Sigrist (2025), :math:`(I - A)^\top (V^{-1} + \mathrm{diag}\,\tau) (I - A)`, of the prior of the own rows alone: it
has no neighbors in halos, so that each process solves with a triangle of its own. All of this is on the CPU.

Cost per iteration: O(n K), two exchanges of the halo and two sums of one number per latent function. Symbols: N rows of
all processes, n own rows, h rows of the halo, K neighbors, L latent functions.
"""

import warnings
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import csr_array
from torch import Tensor

from pyro_nngp.distributed.table import ShardedGraph
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients

_RELATIVE = 1e-3  # as in pyro_nngp.variational.posterior_mean
_LOOK, _MOST = 10, 1000  # iterations between checks of the residual, and in total


class ShardedFactor:
    """(I - A, V) of the own rows; all processes must call each method at the same time.

    Args:
        graph: the neighbors.
        conditional: maps rows (B,) and their neighbors (B, K), places in the graph, -1 padded, to the weights (B, K)
            and variances (B,) of the conditionals of the prior.
    """

    def __init__(self, graph: ShardedGraph, conditional: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._graph, self._world = graph, graph.data.world
        every, near = torch.arange(graph.num_points, device=graph.x.device), graph.neighbors[: graph.num_points].long()
        w, var = (part.detach().double() for part in conditional(every, near))
        w = w.masked_fill(near < 0, 0.0)
        columns = torch.cat([every[:, None], near.clamp(min=0)], -1).cpu()
        entries = (torch.cat([torch.ones_like(w[:, :1]), -w], -1) / var.sqrt()[:, None]).cpu()
        rows = np.arange(0, columns.numel() + 1, columns.shape[1])
        shape = len(every), len(every) + len(graph.halo)
        self._root = csr_array((entries.flatten().numpy(), columns.flatten().numpy(), rows), shape=shape)
        self._transposed = self._root.T.tocsr()
        away = near >= len(every)
        near, border = torch.where(away, -1, near), away.any(-1).nonzero()[:, 0]
        if len(border):
            w[border], var[border] = (part.detach().double() for part in conditional(border, near[border]))
        self._alone = w.cpu(), var.cpu(), near.cpu()  # the prior of the own rows

    def __len__(self) -> int:
        return self._graph.data.num_rows

    def product(self, m: Float[Tensor, "*L n"]) -> Float[Tensor, "*L n"]:
        r""":math:`\Lambda m` at the own rows."""
        values = m.cpu().reshape(-1, self._root.shape[0]).mT  # (n, L)
        every = torch.cat([values, self._graph.halo.fetch(values)]).numpy()
        return self._gathered(self._transposed @ (self._root @ every)).mT.reshape(m.shape).to(m.device)

    def diagonal(self) -> Float[Tensor, " n"]:
        r"""Diagonal of :math:`\Lambda` at the own rows."""
        return self._gathered(self._root.power(2).sum(0)).to(self._graph.x.device)

    def _gathered(self, found: np.ndarray) -> Tensor:
        """Values at own rows, plus those that all processes have for them in their halos."""
        every, n = torch.from_numpy(found), self._root.shape[0]
        return every[:n] + self._graph.halo.give_back(every[n:])

    def posterior_mean(
        self,
        y: Float[Tensor, "*L n"],
        precision: Float[Tensor, "*L n"],
        start: Float[Tensor, "*L n"],
        tolerance: float = 1e-3,
        reduction: float = 0.0,
    ) -> Float[Tensor, "*L n"]:
        """Mean of u at own rows given Gaussian observations; arguments as of ``variational.posterior_mean``."""
        like = y
        y, precision, start = (part.double().cpu() for part in (y, precision, start))
        precondition = self._preconditioner(precision)

        def product(m: Tensor) -> Tensor:
            return self.product(m) + precision * m

        def norm(residual: Tensor) -> Tensor:
            return self._world.sum((residual * precondition(residual)).sum(-1)).clamp(min=0).sqrt()

        right = precision * y
        size = torch.clamp(_RELATIVE * norm(right), min=len(self) ** 0.5)
        if reduction:
            tolerance = max(tolerance, reduction * float((norm(right - product(start)) / size).max()))
        found, left = conjugate_gradients(
            product,
            right,
            start,
            None,
            tolerance,
            _MOST,
            norm,
            size,
            _LOOK,
            precondition=precondition,
            total=self._world.sum,
        )
        if left > tolerance and self._world.rank == 0:
            warnings.warn(
                f"ShardedFactor: conjugate gradients stopped after {_MOST} iterations at a residual of {left:.1e}, the "
                f"tolerance is {tolerance:.1e}. The usual cause is noise far below the prior's conditional variances.",
                stacklevel=2,
            )
        return found.to(like)

    def _preconditioner(self, precision: Tensor) -> "_Triangles":
        w, var, near = self._alone
        sets = precision.reshape(-1, len(var))
        return _Triangles([VecchiaFactor(w, 1 / (1 / var + each), near).prepared() for each in sets])


class _Triangles:
    """Solves with one triangle for each latent function."""

    def __init__(self, factors: list[VecchiaFactor]) -> None:
        self._factors = factors

    def __call__(self, residual: Tensor) -> Tensor:
        rows = residual.reshape(len(self._factors), -1)
        found = [factor.color(factor.color_transposed(row)) for factor, row in zip(self._factors, rows, strict=True)]
        return torch.stack(found).view_as(residual)
