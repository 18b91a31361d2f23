r"""The Vecchia factor (I - A, V) of a prior whose rows are on several processes, and the posterior mean under it.

A product with the precision :math:`\Lambda = (I - A)^\top V^{-1} (I - A)` fetches the values of the halo, and gives
back what the local rows add to rows of others. Conjugate gradients on :math:`\Lambda + \mathrm{diag}\,\tau` sum their
dot products over the processes. The preconditioner is the Vecchia approximation with diagonal update of Kündig and
Sigrist (2025), :math:`(I - A)^\top (V^{-1} + \mathrm{diag}\,\tau) (I - A)`: with many rows on each process that of
all rows, whose triangle is solved in rounds (:mod:`pyro_nngp.distributed.triangle`), so that iterations are as many as
on one process. With few rows the exchanges of the rounds would take longer than everything else. The prior is then that
of the local rows alone, which has no neighbors in halos, and iterations grow with the number of processes. All of this
is on the CPU.

Cost per iteration: O(n K), two exchanges of the halo, with many rows two more per round, and two sums of one number per
latent function. Symbols: N rows of all processes, n local rows, h rows of the halo, K neighbors, L latent functions.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import warn
from pyro_nngp.distributed.table import ShardedGraph
from pyro_nngp.distributed.triangle import ShardedTriangle, sparse_rows
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients
from pyro_nngp.linalg.level_scheduling import dependency_levels
from pyro_nngp.linalg.sparse_triangular import SparseTriangle

_RELATIVE = 1e-3  # as in pyro_nngp.variational.posterior_mean
_LOOK, _MOST = 10, 1000  # iterations between checks of the residual, and in total
ROWS_PER_ROUND = 1000
"""Local rows in whose time a round of exchanges passes, about."""


class ShardedFactor:
    """(I - A, V) of the local rows; all processes must call each method at the same time.

    Args:
        graph: the neighbors.
        conditional: maps rows (B,) and their neighbors (B, K), places in the graph, -1 padded, to the weights (B, K)
            and variances (B,) of the conditionals of the prior.

    Attributes:
        graph: the neighbors.
        w: weights of the local rows (n, K), 0 where there is no neighbor.
        var: variances of the local rows (n,).
        neighbors: places of their neighbors among local rows and halo (n, K), -1 padded.
    """

    def __init__(self, graph: ShardedGraph, conditional: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.graph, self._world, self._conditional = graph, graph.data.world, conditional
        every, near = torch.arange(graph.num_points, device=graph.x.device), graph.neighbors[: graph.num_points].long()
        w, self.var = (part.detach().double() for part in conditional(every, near))
        self.w, self.neighbors = w.masked_fill(near < 0, 0.0), near
        columns = torch.cat([every[:, None], near.clamp(min=0)], -1)
        entries = torch.cat([torch.ones_like(w[:, :1]), -self.w], -1) / self.var.sqrt()[:, None]
        self._root = sparse_rows(entries.cpu(), columns.cpu(), len(every) + len(graph.halo))
        self._transposed = self._root.T.tocsr()

    @cached_property
    def _triangle(self) -> ShardedTriangle:
        return ShardedTriangle(self.graph.rounds(), self.w.cpu(), self.neighbors.cpu(), len(self.graph.halo))

    @cached_property
    def _alone(self) -> tuple[Tensor, SparseTriangle]:
        """Variances and triangle of the prior of the local rows."""
        away = self.neighbors >= self.num_own
        near, border = torch.where(away, -1, self.neighbors), away.any(-1).nonzero()[:, 0]
        w, var = self.w.clone(), self.var.clone()
        if len(border):
            w[border], var[border] = (part.detach().double() for part in self._conditional(border, near[border]))
        near = near.cpu()
        return var.cpu(), SparseTriangle(w.cpu().masked_fill(near < 0, 0.0), near, dependency_levels(near))

    def __len__(self) -> int:
        return self.graph.data.num_rows

    @property
    def num_own(self) -> int:
        """n."""
        return len(self.var)

    @property
    def rows(self) -> Int[Tensor, " n"]:
        """Places of the local rows in the data."""
        return self.graph.data.rows.to(self.var.device)

    def total(self, part: Tensor) -> Tensor:
        """The sum over all processes."""
        return self._world.sum(part)

    def gathered(self) -> VecchiaFactor:
        """The factor of all rows, by number, on each process: for small N."""
        near = self.graph.halo.numbers_at(self.neighbors)
        w, var, near = (self._world.gather(part.cpu()).to(self.var.device) for part in (self.w, self.var, near))
        return VecchiaFactor(w, var, near).prepared()

    def gather(self, own: Float[Tensor, "*L n"]) -> Float[Tensor, "*L N"]:
        """Values at all rows, by number, on each process."""
        return self._world.gather(own.movedim(-1, 0).contiguous()).movedim(0, -1)

    def own(self, every: Float[Tensor, "*L N"]) -> Float[Tensor, "*L n"]:
        """Values at local rows from values at all."""
        first = self.graph.data.first
        return every[..., first : first + self.num_own]

    def near(self, u: Float[Tensor, "*L n"]) -> Float[Tensor, "*L n K"]:
        """Values at the neighbors of the local rows, anything where there is none."""
        return self.graph.complete(u)[..., self.neighbors.clamp(min=0)]

    def whiten_transposed(self, z: Float[Tensor, "*L n"]) -> Float[Tensor, "*L n"]:
        """(I - A)' V^-1/2 z at the local rows."""
        values = z.double().cpu().reshape(-1, self.num_own).mT.numpy()
        return self._gathered(self._transposed @ values).mT.reshape(z.shape).to(z.device)

    def color(self, z: Float[Tensor, "*L n"]) -> Float[Tensor, "*L n"]:
        """(I - A)^-1 V^1/2 z at the local rows."""
        right = (self.var.sqrt() * z.double()).cpu().reshape(-1, self.num_own)
        return self._triangle.solve(right).reshape(z.shape).to(z.device)

    def product(self, m: Float[Tensor, "*L n"]) -> Float[Tensor, "*L n"]:
        r""":math:`\Lambda m` at the local rows."""
        values = m.cpu().reshape(-1, self._root.shape[0]).mT  # (n, L)
        every = torch.cat([values, self.graph.halo.fetch(values)]).numpy()
        return self._gathered(self._transposed @ (self._root @ every)).mT.reshape(m.shape).to(m.device)

    def diagonal(self) -> Float[Tensor, " n"]:
        r"""Diagonal of :math:`\Lambda` at the local rows."""
        return self._gathered(self._root.power(2).sum(0)).to(self.graph.x.device)

    def _gathered(self, local: np.ndarray) -> Tensor:
        """Values at local rows, plus those that all processes have for them in their halos."""
        every, n = torch.from_numpy(local), self._root.shape[0]
        return every[:n] + self.graph.halo.give_back(every[n:])

    def posterior_mean(
        self,
        y: Float[Tensor, "*L n"],
        precision: Float[Tensor, "*L n"],
        start: Float[Tensor, "*L n"],
        tolerance: float = 1e-3,
        reduction: float = 0.0,
    ) -> Float[Tensor, "*L n"]:
        """Mean of u at local rows given Gaussian observations; arguments as of ``variational.posterior_mean``."""
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
        solution, left = conjugate_gradients(
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
        if not left <= tolerance and self._world.rank == 0:
            warn(
                f"ShardedFactor: conjugate gradients stopped after {_MOST} iterations at a residual of {left:.1e}, the "
                f"tolerance is {tolerance:.1e}. The usual cause is noise far below the prior's conditional variances."
            )
        return solution.to(like)

    def _preconditioner(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        var: Tensor = self.var.cpu()
        triangle: ShardedTriangle | SparseTriangle
        if len(self) < ROWS_PER_ROUND * self._world.size * len(self.graph.rounds()):
            var, triangle = self._alone
        else:
            triangle = self._triangle

        def precondition(residual: Tensor) -> Tensor:
            scaled = triangle.solve(residual.reshape(-1, len(var)), transposed=True).view_as(residual)
            return triangle.solve((scaled / (1 / var + precision)).reshape(-1, len(var))).reshape(residual.shape)

        return precondition
