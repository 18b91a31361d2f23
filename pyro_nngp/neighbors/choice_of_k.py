"""Choice of the number K of neighbors: it is doubled while that helps."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

MOST_NEIGHBORS = 512  # for predictions
WORTHWHILE = 0.01  # smallest gain in log variance that justifies another doubling for predictions
WORTHWHILE_TRAINING = 0.1  # smallest such gain in training, where each step pays for it
_TRIED = 64  # points at which numbers of neighbors are compared


class NeighborTrial:
    """Trial points and their nearest others, at which numbers of neighbors are compared.

    The last choice is kept while the scores of the first number, and the `values` that the other scores depend on, are
    unchanged, bit for bit.

    Args:
        rows: rows of the points (B,).
        near: rows of their nearest others (B, k), nearest first.
    """

    def __init__(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B k"]) -> None:
        self.rows, self.near = rows, near
        self._answer: tuple[tuple[int, float, int], tuple[Tensor, ...], int] | None = None

    def choose_k(
        self, scores: Callable[[Int[Tensor, "B K"]], Tensor], first: int, worthwhile: float, *values: Tensor
    ) -> int:
        """The chosen K: doubled from `first` up to k while the mean score falls by `worthwhile` or more.

        Args:
            scores: maps rows of K neighbors to scores of the points, such as log predictive variances; smaller is
                better.
            first: the first number tried.
            worthwhile: smallest fall that justifies a doubling.
            values: tensors on which the scores of more neighbors depend, but not the scores of the first number.

        Cost: at most log2(k / first) + 1 evaluations of the scores; one if nothing has changed.
        """
        chosen, most = first, self.near.shape[1]
        if chosen >= most:
            return chosen
        key = first, worthwhile, len(values)
        now = scores(self.near[:, :chosen]), *(value.clone() for value in values)
        if self._answer is not None:
            same_key, then, answer = self._answer
            if same_key == key and all(map(torch.equal, then, now)):
                return answer
        before = float(now[0].mean())
        while chosen < most:
            more = min(2 * chosen, most)
            after = float(scores(self.near[:, :more]).mean())
            if before - after < worthwhile:
                break
            chosen, before = more, after
        self._answer = key, now, chosen
        return chosen


def rows_to_try(num_points: int, device: torch.device) -> Int[Tensor, " B"]:
    """At most 64 evenly spaced rows, at which numbers of neighbors are compared."""
    return torch.linspace(0, num_points - 1, min(num_points, _TRIED), device=device).long().unique()
