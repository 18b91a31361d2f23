r"""Solves with the sparse unit triangle :math:`I - A` of nearest-neighbor conditionals, and with its transpose.

Row i of A holds the weights of the neighbors of point i. In an order in which every point follows its neighbors, I - A
is lower triangular, so that a solve is one substitution: point by point in compiled code, or in torch operations on one
dependency level at a time (:mod:`pyro_nngp.linalg.level_scheduling`). Of tensors on a GPU, systems of up to a million
points are solved on the CPU: two copies take less time than a launch or more for each level. The gradient of a solve is
a solve with the transpose,

.. math:: (I - A) u = r: \qquad \bar r = (I - A)^{-\top} \bar u, \qquad \bar w_{ik} = \bar r_i\, u_{n(i)_k} .

Blocks of T outputs per point are a system of N T points with K T neighbors.

Cost: O(N K) time per right-hand side; O(N K) memory, for each right-hand side where the weights need a gradient.
Symbols: N points, K neighbors.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from scipy.sparse.linalg import splu
from torch import Tensor

from pyro_nngp._autograd import apply, mapped_first
from pyro_nngp.linalg.level_scheduling import dependency_levels
from pyro_nngp.linalg.sparse_rows import SparseRows
from pyro_nngp.native import triangular as compiled

ON_CPU_UP_TO = 1_000_000
"""Points up to which the CPU solves systems of a GPU."""


def solve_triangular(
    w: Float[Tensor, "*#L N K"],
    neighbors: Int[Tensor, "N K"],
    right: Float[Tensor, "*#L N"],
    levels: list[Int[Tensor, " _"]] | None = None,
    *,
    transposed: bool = False,
) -> Float[Tensor, "*L N"]:
    """Solve (I - A) u = right, or (I - A)' u = right; differentiable in the weights and the right-hand side.

    Args:
        w: weights; row i belongs to the neighbors of point i, and values at -1 are ignored.
        neighbors: rows of the neighbors, -1 padded.
        right: right-hand sides; leading dimensions broadcast against the leading dimensions of the weights.
        levels: dependency levels of the neighbors; None computes them.
        transposed: whether to solve with the transpose.

    Raises:
        ValueError: if the neighbors depend on each other in a cycle, or are not rows.
    """
    levels = dependency_levels(neighbors) if levels is None else levels
    return apply(_Solve, w, right, neighbors, levels, transposed)


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(w: Tensor, right: Tensor, neighbors: Tensor, levels: list[Tensor], transposed: bool) -> Tensor:
        if w.device.type != "cpu" and len(neighbors) <= ON_CPU_UP_TO:
            w, right, neighbors, home = w.cpu(), right.cpu(), neighbors.cpu(), w.device
            levels = [level.cpu() for level in levels]
            return _Solve.forward(w, right, neighbors, levels, transposed).to(home)
        if compiled.supported(w, right):
            return _compiled(w, neighbors, right, levels, transposed)
        return _by_levels(w.masked_fill(neighbors < 0, 0.0), neighbors.clamp(min=0), right, levels, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        w, right, neighbors, ctx.levels, ctx.transposed = inputs
        ctx.right_shape = right.shape
        ctx.save_for_backward(w, neighbors, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, neighbors, u = ctx.saved_tensors
        solved = _Solve.apply(w, grad, neighbors, ctx.levels, not ctx.transposed)
        grad_w = None
        if ctx.needs_input_grad[0]:
            rows, columns = (u, solved) if ctx.transposed else (solved, u)
            product = rows[..., None] * columns[..., neighbors.clamp(min=0)]
            grad_w = product.masked_fill(neighbors < 0, 0.0).sum_to_size(w.shape)
        return grad_w, solved.sum_to_size(ctx.right_shape), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, w: Tensor, right: Tensor, *rest: Any) -> tuple[Tensor, int]:
        """Move the mapped dimension to the front of weights and right-hand sides."""
        return _Solve.apply(*mapped_first((w, right), in_dims[:2], (2, 1)), *rest), 0


def _compiled(w: Tensor, neighbors: Tensor, right: Tensor, levels: list[Tensor], transposed: bool) -> Tensor:
    """Solve by compiled code, which takes all right-hand sides of a triangle together."""
    shape, order = torch.broadcast_shapes(right.shape, w.shape[:-1]), torch.cat(levels)
    triangles = shape[len(shape) + 1 - w.dim() : -1]
    weights = w.expand(*triangles, *w.shape[-2:]).flatten(0, -3) if triangles else w[None]
    columns = right.expand(shape).reshape(-1, weights.shape[0], shape[-1]).permute(1, 2, 0)
    solved = compiled.solve(weights, neighbors, columns, order, transposed)
    return solved.permute(2, 0, 1).reshape(shape)


def _by_levels(w: Tensor, columns: Tensor, right: Tensor, levels: list[Tensor], transposed: bool) -> Tensor:
    u = right.expand(torch.broadcast_shapes(right.shape, w.shape[:-1])).clone()
    for rows in reversed(levels[1:]) if transposed else levels[1:]:
        near = columns[rows]
        if transposed:
            u.index_add_(-1, near.flatten(), (w[..., rows, :] * u[..., rows, None]).flatten(-2))
        else:
            u[..., rows] += (w[..., rows, :] * u[..., near]).sum(-1)
    return u


class SparseTriangle:
    """Many solves with one I - A, on the CPU: rows in level order, so that weights are read one after the other.

    Without compiled code SciPy's SuperLU solves: in level order, I - A is a factor already.

    Args:
        w: weights in double precision, 0 where there is no neighbor.
        neighbors: rows of the neighbors, -1 padded.
        levels: dependency levels of the neighbors.

    Attributes:
        order: the rows in level order.
    """

    def __init__(self, w: Float[Tensor, "N K"], neighbors: Int[Tensor, "N K"], levels: list[Int[Tensor, " _"]]) -> None:
        w, neighbors, self.order = w.cpu(), neighbors.cpu(), torch.cat(levels).cpu()
        self._place = self.order.argsort()
        near, rows = neighbors[self.order], torch.arange(len(w), device="cpu")
        self._w, self._near = w[self.order], torch.where(near < 0, -1, self._place[near])
        self._rows = rows
        if not compiled.supported(w, w):
            columns = torch.cat([rows[:, None], torch.where(near < 0, rows[:, None], self._near)], -1)
            root = torch.cat([torch.ones_like(w[:, :1]), -self._w], -1)
            matrix = SparseRows(columns, root).matrix(len(root)).tocsc()
            matrix.sum_duplicates()
            options = {"SymmetricMode": True, "Equil": False}
            self._factor = splu(matrix, permc_spec="NATURAL", diag_pivot_thresh=0.0, options=options)

    def solve(self, right: Float[Tensor, "*L N"], transposed: bool = False) -> Float[Tensor, "*L N"]:
        """Solve (I - A) u = right, or (I - A)' u = right; without gradients."""
        return self.solve_ordered(right.cpu()[..., self.order], transposed)[..., self._place].to(right.device)

    def solve_ordered(self, right: Float[Tensor, "*L N"], transposed: bool = False) -> Float[Tensor, "*L N"]:
        """Solve on the CPU, with everything in level order (:attr:`order`), which saves two reorderings."""
        rows = right.reshape(-1, right.shape[-1])
        if hasattr(self, "_factor"):
            solution = torch.from_numpy(self._factor.solve(rows.numpy().T, "T" if transposed else "N")).mT
        else:
            solution = compiled.solve(self._w[None], self._near, rows.mT[None], self._rows, transposed)[0].mT
        return solution.reshape(right.shape)
