"""The order in which the sparse leaves of a program are eliminated from the precision of their posterior.

Nested dissection halves points by their coordinates. The largest process has them; another leaf, such as a group
effect or a point of a process on other inputs, takes the mean of the leaves that stand with it in a row. Effects of
groups that lie anywhere end up in the first separators, effects of groups of near points in the leaves of the tree.
"""

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.linalg.nested_dissection import Elimination, nested_dissection

_ROUNDS = 4  # of means; what has no coordinates then is put in the middle


class EliminationOrder:
    """The order of elimination for tables of columns, found at the first call and again when the tables change."""

    def __init__(self) -> None:
        self._tables: list[Tensor] = []
        self._plan: Elimination | None = None

    def plan(self, tables: Sequence[Int[Tensor, "r k"]], x: Float[Tensor, "n D"], first: int, m: int) -> Elimination:
        """The order for the columns of these tables.

        Args:
            tables: columns of the entries of each row.
            x: coordinates of some columns that follow each other.
            first: the first of these columns.
            m: number of columns.
        """
        plan, known = self._plan, len(tables) == len(self._tables)
        if plan is None or not (known and all(torch.equal(a, b) for a, b in zip(tables, self._tables, strict=True))):
            plan = cast(Elimination, nested_dissection(coordinates(tables, x, first, m), tables))  # however large
            self._tables, self._plan = list(tables), plan
        return plan


def coordinates(
    tables: Sequence[Int[Tensor, "r k"]], x: Float[Tensor, "n D"], first: int, m: int
) -> Float[Tensor, "m D"]:
    """Coordinates of all columns; those without own ones are means over the columns in the same rows."""
    x = x.double().cpu()
    place = x.mean(0).repeat(m, 1)
    place[first : first + len(x)] = x
    known = torch.zeros(m, dtype=torch.float64)
    known[first : first + len(x)] = 1
    for _ in range(_ROUNDS):
        total, count = torch.zeros_like(place), torch.zeros_like(known)
        for table in tables:
            weight = known[table]
            center = (weight[..., None] * place[table]).sum(1) / weight.sum(1).clamp(min=1)[:, None]
            for column in table.T:
                count.index_add_(0, column, weight.amax(1))
                total.index_add_(0, column, center * weight.amax(1)[:, None])
        new = (known == 0) & (count > 0)
        if not new.any():
            break
        place[new], known[new] = total[new] / count[new, None], 1
    return place
