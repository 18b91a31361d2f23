"""The number of neighbors that suffices, found by doubling it while that helps."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

MOST_NEIGHBORS, WORTHWHILE = 512, 0.01  # for predictions; smallest gain in log variance that justifies another doubling
_TRIED = 64  # points at which numbers of neighbors are compared


class NeighborTrial:
    """Some points and their nearest others, at which numbers of neighbors are compared.

    The last answer is kept for as long as the scores of the first number stay, to the bit: all that a score depends on
    enters into those.

    Args:
        rows: of the points (B,).
        near: rows of their nearest others (B, k), nearest first.
    """

    def __init__(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B k"]) -> None:
        self.rows, self.near = rows, near
        self._answer: tuple[tuple[int, float, Tensor], int] | None = None

    def enough(self, scores: Callable[[Int[Tensor, "B K"]], Tensor], first: int, worthwhile: float) -> int:
        """K, doubled from `first` up to k for as long as the mean score falls by `worthwhile` or more.

        Args:
            scores: of the points, given the rows of K neighbors, such as log predictive variances; small is good.
            first: the number to begin with.
            worthwhile: the least fall that a doubling has to bring.

        Cost: that of the scores, at most log2(k / first) + 1 of them; of one where nothing has changed.
        """
        enough, most = first, self.near.shape[1]
        if enough >= most:
            return enough
        now = scores(self.near[:, :enough])
        key = first, worthwhile, now
        if self._answer is not None:
            (same_first, same_worthwhile, then), answer = self._answer
            if (same_first, same_worthwhile) == key[:2] and torch.equal(then, now):
                return answer
        before = float(now.mean())
        while enough < most:
            more = min(2 * enough, most)
            after = float(scores(self.near[:, :more]).mean())
            if before - after < worthwhile:
                break
            enough, before = more, after
        self._answer = key, enough
        return enough


def rows_to_try(num_points: int, device: torch.device) -> Int[Tensor, " B"]:
    """Some evenly spaced rows, at which numbers of neighbors are compared."""
    return torch.linspace(0, num_points - 1, min(num_points, _TRIED), device=device).long().unique()
