"""The number of neighbors that suffices, found by doubling it while that helps."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

MOST_NEIGHBORS, WORTHWHILE = 512, 0.01  # for predictions; smallest gain in log variance that justifies another doubling
_TRIED = 64  # points at which numbers of neighbors are compared


def enough_neighbors(score: Callable[[int], float], first: int, most: int, worthwhile: float) -> int:
    """K, doubled from `first` up to `most` while the score falls by `worthwhile` or more.

    Args:
        score: maps K to a score, such as the mean log predictive variance; smaller is better.
        first: the first number tried.
        most: the largest number; `first` where that is larger.
        worthwhile: smallest fall that justifies a doubling.

    Cost: that of the scores, at most log2(most / first) + 1 of them.
    """
    enough = first
    if enough >= most:
        return enough
    before = score(enough)
    while enough < most:
        more = min(2 * enough, most)
        now = score(more)
        if before - now < worthwhile:
            break
        enough, before = more, now
    return enough


def rows_to_try(num_points: int, device: torch.device) -> Int[Tensor, " B"]:
    """Some evenly spaced rows, at which numbers of neighbors are compared."""
    return torch.linspace(0, num_points - 1, min(num_points, _TRIED), device=device).long().unique()
