r"""The Vecchia factor (I - A, V) of a prior whose rows are on several processes, and the posterior mean under it.

A product with the precision :math:`\Lambda = (I - A)^\top V^{-1} (I - A)` fetches the values of the halo, and gives
back what the own rows add to rows of others. Conjugate gradients on :math:`\Lambda + \mathrm{diag}\,\tau` sum their
dot products over the processes. The preconditioner is the Vecchia approximation with diagonal update of Kündig and
Sigrist (2025), :math:`(I - A)^\top (V^{-1} + \mathrm{diag}\,\tau) (I - A)`, without the neighbors that are in halos,
so that each process solves with a triangle of its own. The triangles of one process
(:class:`~pyro_nngp.linalg.VecchiaFactor`) cannot be solved side by side.

Cost per iteration: O(n K), two exchanges of the halo and two sums of one number per latent function. Symbols: N rows of
all processes, n own rows, h rows of the halo, K neighbors, L latent functions.
"""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.distributed.table import ShardedGraph
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients

_RELATIVE = 1e-3  # as in pyro_nngp.variational.posterior_mean
_LOOK, _MOST = 10, 1000  # iterations between checks of the residual, and in total


class ShardedFactor:
    """(I - A, V) of the own rows; all processes must call each method at the same time.

    Args:
        w: weights of the conditionals of own rows (n, K).
        var: their variances (n,).
        graph: the neighbors.
    """

    def __init__(self, w: Float[Tensor, "n K"], var: Float[Tensor, " n"], graph: ShardedGraph) -> None:
        self._graph, self._world = graph, graph.data.world
        self._neighbors = graph.neighbors[: graph.num_points].long()
        self._w = w.detach().double().masked_fill(self._neighbors < 0, 0.0)
        self._var = var.detach().double()

    def __len__(self) -> int:
        return self._graph.data.num_rows

    def product(self, m: Float[Tensor, "*L n"]) -> Float[Tensor, "*L n"]:
        r""":math:`\Lambda m` at the own rows."""
        halo, near = self._graph.halo, self._neighbors.clamp(min=0)
        every = torch.cat([m, halo.fetch(m.movedim(-1, 0)).movedim(0, -1)], -1)
        scaled = (m - (self._w * every[..., near]).sum(-1)) / self._var
        return self._gathered(scaled, self._w * scaled[..., None], -1.0)

    def diagonal(self) -> Float[Tensor, " n"]:
        r"""Diagonal of :math:`\Lambda` at the own rows."""
        precision = 1 / self._var
        return self._gathered(precision, self._w.square() * precision[:, None], 1.0)

    def _gathered(self, own: Tensor, near: Tensor, sign: float) -> Tensor:
        """Values at own rows, plus those that all processes have for them at neighbors."""
        halo, n = self._graph.halo, len(self._var)
        parts = own.new_zeros(*own.shape[:-1], n + len(halo))
        parts.index_add_(-1, self._neighbors.clamp(min=0).flatten(), near.flatten(-2))
        return own + sign * (parts[..., :n] + halo.give_back(parts[..., n:].movedim(-1, 0)).movedim(0, -1))

    def posterior_mean(
        self,
        y: Float[Tensor, "*L n"],
        precision: Float[Tensor, "*L n"],
        start: Float[Tensor, "*L n"],
        tolerance: float = 1e-3,
        reduction: float = 0.0,
    ) -> Float[Tensor, "*L n"]:
        """Mean of u at own rows given Gaussian observations; arguments as of ``variational.posterior_mean``."""
        dtype = y.dtype
        y, precision, start = y.double(), precision.double(), start.double()
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
        return found.to(dtype)

    def _preconditioner(self, precision: Tensor) -> "_Triangles":
        away = self._neighbors >= len(self._var)
        near = torch.where(away, -1, self._neighbors)
        w = self._w.masked_fill(away, 0.0)
        sets = precision.reshape(-1, len(self._var))
        return _Triangles([VecchiaFactor(w, 1 / (1 / self._var + each), near).prepared() for each in sets])


class _Triangles:
    """Solves with one triangle for each latent function."""

    def __init__(self, factors: list[VecchiaFactor]) -> None:
        self._factors = factors

    def __call__(self, residual: Tensor) -> Tensor:
        rows = residual.reshape(len(self._factors), -1)
        found = [factor.color(factor.color_transposed(row)) for factor, row in zip(self._factors, rows, strict=True)]
        return torch.stack(found).view_as(residual)
