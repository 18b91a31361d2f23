r"""Products of rows of a table with many columns, gathered at neighbors chunk by chunk, with their gradients.

For the rows :math:`f_j` of a table at the neighbors of a point: their Gram matrix, and their combinations
:math:`\sum_k w_k f_k`. Neither pass keeps what it gathers, K M values for each point.

Cost: O(B K^2 M) time for Gram matrices and O(B K M) for combinations; memory of the results, and a fixed chunk.
Symbols: B points, K neighbors, M columns of a table of N rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2**20  # numbers that are gathered at once


def gram_of_neighbors(
    own: Float[Tensor, "B M"], table: Float[Tensor, "N M"], near: Int[Tensor, "B K"]
) -> tuple[Float[Tensor, "B K K"], Float[Tensor, "B K"], Float[Tensor, " B"]]:
    """Inner products among the rows at the neighbors, of these with the point's own, and of the latter with itself.

    Args:
        own: rows of the points.
        table: rows of those that may be neighbors.
        near: rows of the table, -1 padded, where products are 0.
    """
    return _Gram.apply(own, table, near)


def gram_with_neighbors(
    own: Float[Tensor, "B M"], table: Float[Tensor, "N M"], near: Int[Tensor, "B K"]
) -> Float[Tensor, "B K+1 K+1"]:
    """Inner products among the rows at the neighbors and, last, the point's own; without gradients."""
    b, k = near.shape
    gram = own.new_empty(b, k + 1, k + 1)
    for part in _parts(near, table):
        rows = torch.cat([_gathered(table, near[part]), own[part, None]], 1)
        torch.bmm(rows, rows.mT, out=gram[part])
    return gram


def feature_gradients(
    near: Int[Tensor, "B K"],
    own: Float[Tensor, "B M"],
    table: Float[Tensor, "N M"],
    w: Float[Tensor, "B K"],
    change: Float[Tensor, "B K"],
    bar: Float[Tensor, " B"],
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "N M"]]:
    r"""Gradients of the rows from those of conditionals whose covariances have the Gram matrices subtracted.

    With rows F at the neighbors, :math:`\varphi` of the point, :math:`s = F^\top w` and :math:`t = F^\top c`, they are
    :math:`c (\varphi - s)^\top + w (\bar v \varphi - t)^\top` and :math:`t + \bar v s - 2 \bar v \varphi`.

    Args:
        near: neighbors, -1 padded.
        own: rows of the points.
        table: rows of those that may be neighbors.
        w: weights of the conditionals.
        change: c, such that :math:`(c w^\top + w c^\top) / 2` is the gradient of the covariance of the neighbors.
        bar: gradients of the variances.
    """
    in_own, in_table = torch.empty_like(own), torch.zeros_like(table)
    for part in _parts(near, table):
        rows, point, each = _gathered(table, near[part]), own[part], bar[part, None]
        both = torch.stack([change[part], w[part]], 1)  # (b, 2, K)
        sums = both @ rows  # t and s
        in_own[part] = sums[:, 0] + each * (sums[:, 1] - 2 * point)
        in_rows = torch.stack([point - sums[:, 1], each * point - sums[:, 0]], 1)
        _scatter(in_table, near[part], both.mT @ in_rows)
    return in_own, in_table


def combined(w: Float[Tensor, "B K"], table: Float[Tensor, "N M"], near: Int[Tensor, "B K"]) -> Float[Tensor, "B M"]:
    """Sums of the rows at the neighbors with weights; -1 pads neighbors, whatever their weights."""
    return _Combined.apply(w, table, near)


class _Gram(torch.autograd.Function):
    """(own, table, near) -> (among, cross, square)."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, table: Tensor, near: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(own, table, near)
        b, k = near.shape
        among, cross = own.new_empty(b, k, k), own.new_empty(b, k)
        for part in _parts(near, table):
            rows = _gathered(table, near[part])
            torch.bmm(rows, rows.mT, out=among[part])
            cross[part] = (rows @ own[part, :, None])[..., 0]
        return among, cross, own.square().sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_among: Tensor, of_cross: Tensor, of_square: Tensor) -> tuple[Tensor, Tensor, None]:
        own, table, near = ctx.saved_tensors
        in_own, in_table = 2 * of_square[:, None] * own, torch.zeros_like(table)
        for part in _parts(near, table):
            rows = _gathered(table, near[part])
            both = of_among[part] + of_among[part].mT
            in_rows = torch.baddbmm(of_cross[part, :, None] * own[part, None], both, rows)
            in_own[part] += (of_cross[part, None] @ rows)[:, 0]
            _scatter(in_table, near[part], in_rows)
        return in_own, in_table, None


class _Combined(torch.autograd.Function):
    """(w, table, near) -> sums of rows."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, table: Tensor, near: Tensor) -> Tensor:
        ctx.save_for_backward(w, table, near)
        total = table.new_empty(len(near), table.shape[1])
        for part in _parts(near, table):
            total[part] = (w[part, None] @ _gathered(table, near[part]))[:, 0]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor) -> tuple[Tensor, Tensor, None]:
        w, table, near = ctx.saved_tensors
        in_w, in_table = torch.empty_like(w), torch.zeros_like(table)
        for part in _parts(near, table):
            in_w[part] = (_gathered(table, near[part]) @ of_total[part, :, None])[..., 0]
            _scatter(in_table, near[part], w[part, :, None] * of_total[part, None])
        return in_w, in_table, None


def _parts(near: Tensor, table: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK // max(1, near.shape[1] * table.shape[1]))
    return (slice(start, start + size) for start in range(0, len(near), size))


def _gathered(table: Tensor, near: Tensor) -> Tensor:
    rows = table[near.clamp(min=0)]
    return rows * (near >= 0)[..., None] if bool((near < 0).any()) else rows


def _scatter(total: Tensor, near: Tensor, values: Tensor) -> None:
    """Add values to the rows at the neighbors; those of no neighbor count nothing."""
    values = values * (near >= 0)[..., None] if bool((near < 0).any()) else values
    total.index_add_(0, near.clamp(min=0).flatten(), values.flatten(0, 1))


__all__ = ["combined", "feature_gradients", "gram_of_neighbors", "gram_with_neighbors"]
