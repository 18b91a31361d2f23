"""Cells of a k-d tree, one for each process: boxes with equal numbers of sample points.

Cost: O(S log S log R) to build from S sample points, O(N log R) to assign N points to R cells.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class _Cut(NamedTuple):
    """A cut of a box: points below the threshold go to the first part."""

    column: int
    threshold: float
    parts: tuple["_Cut | int", "_Cut | int"]


class Cells:
    """A k-d tree with one leaf for each process.

    Each box is cut across the column with the largest spread, relative to the spread of all points, so that both parts
    have as many points per process.

    Args:
        sample: some of the points, (S, D).
        size: number of cells R.
    """

    def __init__(self, sample: Float[Tensor, "S D"], size: int) -> None:
        points = sample.double()
        spread = points.std(0, correction=0)
        self._scale = torch.where(spread > 0, spread, 1.0)
        self._root = self._cut(points, 0, size)

    def _cut(self, points: Tensor, first: int, size: int) -> _Cut | int:
        if size == 1:
            return first
        column = int((points.std(0, correction=0) / self._scale).argmax()) if len(points) else 0
        values, half = points[:, column].sort().values, size // 2
        place = min(max(1, len(values) * half // size), len(values) - 1)
        threshold = float(values[place - 1 : place + 1].mean()) if len(values) > 1 else 0.0
        below = points[:, column] < threshold
        parts = self._cut(points[below], first, half), self._cut(points[~below], first + half, size - half)
        return _Cut(column, threshold, parts)

    def __call__(self, x: Float[Tensor, "N D"]) -> Int[Tensor, " N"]:
        """The cell of each point."""
        numbers = torch.empty(len(x), dtype=torch.int64)
        stack: list[tuple[_Cut | int, Tensor]] = [(self._root, torch.arange(len(x)))]
        while stack:
            node, rows = stack.pop()
            if isinstance(node, int):
                numbers[rows] = node
                continue
            below = x[rows, node.column].double() < node.threshold
            stack += [(node.parts[0], rows[below]), (node.parts[1], rows[~below])]
        return numbers
