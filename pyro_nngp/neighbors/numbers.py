"""The number of neighbors that suffices, found by doubling it while that helps."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

MOST_NEIGHBORS, WORTHWHILE = 512, 0.01  # for predictions; smallest gain in log variance that justifies another doubling
WORTHWHILE_TRAINING = 0.1  # the same in training, where each step pays for it
_TRIED = 64  # points at which numbers of neighbors are compared


class NeighborTrial:
    """Some points and their nearest others, at which numbers of neighbors are compared.

    The last answer is kept while the scores of the first number are unchanged, bit for bit, and what else the other
    scores depend on.

    Args:
        rows: rows of the points (B,).
        near: rows of their nearest others (B, k), nearest first.
    """

    def __init__(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B k"]) -> None:
        self.rows, self.near = rows, near
        self._answer: tuple[tuple[int, float, int], tuple[Tensor, ...], int] | None = None

    def enough(
        self, scores: Callable[[Int[Tensor, "B K"]], Tensor], first: int, worthwhile: float, *values: Tensor
    ) -> int:
        """K, doubled from `first` up to k while the mean score falls by `worthwhile` or more.

        Args:
            scores: maps rows of K neighbors to scores of the points, such as log predictive variances; smaller is
                better.
            first: the first number tried.
            worthwhile: smallest fall that justifies a doubling.
            values: what scores of more neighbors depend on, and those of the first number do not.

        Cost: that of the scores, at most log2(k / first) + 1 of them; one of them if nothing has changed.
        """
        enough, most = first, self.near.shape[1]
        if enough >= most:
            return enough
        key = first, worthwhile, len(values)
        now = scores(self.near[:, :enough]), *(value.clone() for value in values)
        if self._answer is not None:
            same_key, then, answer = self._answer
            if same_key == key and all(map(torch.equal, then, now)):
                return answer
        before = float(now[0].mean())
        while enough < most:
            more = min(2 * enough, most)
            after = float(scores(self.near[:, :more]).mean())
            if before - after < worthwhile:
                break
            enough, before = more, after
        self._answer = key, now, enough
        return enough


def rows_to_try(num_points: int, device: torch.device) -> Int[Tensor, " B"]:
    """Some evenly spaced rows, at which numbers of neighbors are compared."""
    return torch.linspace(0, num_points - 1, min(num_points, _TRIED), device=device).long().unique()
