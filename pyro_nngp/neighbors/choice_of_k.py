"""Choice of the number K of neighbors: it is doubled while that helps.

The variance of f decides. Under much noise the variance of y hardly changes with K, while the variance of f may fall by
a factor of six: a smooth function needs all the observations within a lengthscale or so, the more, the noisier they
are.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from pyro_nngp._versions import Versions

MOST_NEIGHBORS = 512  # for predictions
_TRIED = 64  # points at which numbers of neighbors are compared


class Rule(NamedTuple):
    """A reason to double the number of neighbors.

    Attributes:
        score: maps what is evaluated at the points of a trial to scores, such as log predictive variances; smaller is
            better.
        worthwhile: smallest fall of the mean score that justifies a doubling.
        most: largest number that it justifies.
    """

    score: Callable[..., Tensor]
    worthwhile: float
    most: int


def log_of_f(variance: Tensor, noise: Tensor) -> Tensor:
    """Logarithms of predictive variances of f."""
    return variance.log()


def log_of_y(variance: Tensor, noise: Tensor) -> Tensor:
    """Logarithms of predictive variances of y."""
    return (variance + noise).log()


def itself(values: Tensor) -> Tensor:
    """Scores that are evaluated as such."""
    return values


ONE_SCORE = (Rule(itself, 0.01, MOST_NEIGHBORS),)
FOR_Y = Rule(log_of_y, 0.01, MOST_NEIGHBORS)  # of predictions
FOR_F = Rule(log_of_f, 0.03, MOST_NEIGHBORS // 2)


def training(most_for_y: int, most_for_f: int) -> tuple[Rule, Rule]:
    """The rules of training, where each step pays for more neighbors."""
    return Rule(log_of_y, 0.1, most_for_y), Rule(log_of_f, 0.1, most_for_f)


class NeighborTrial:
    """Trial points and their nearest others, at which numbers of neighbors are compared.

    The last choice is kept while what it depends on is unchanged.

    Args:
        rows: rows of the points (B,).
        near: rows of their nearest others (B, k), nearest first.
    """

    def __init__(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B k"]) -> None:
        self.rows, self.near = rows, near
        self._answer: tuple[tuple[int, tuple[Rule, ...], Versions], int] | None = None

    def choose_k(
        self,
        evaluate: Callable[[Int[Tensor, "B K"]], Sequence[Tensor]],
        first: int,
        rules: Sequence[Rule],
        versions: Versions | None = None,
    ) -> int:
        """The chosen K: doubled from `first` up to k while the mean score of any rule falls enough.

        Args:
            evaluate: maps rows of K neighbors to the arguments of the rules' scores.
            first: the first number tried.
            rules: reasons for a doubling.
            versions: of all that evaluations depend on; None evaluates at each call.

        Cost: at most log2(k / first) + 1 evaluations; none if nothing has changed.
        """
        chosen, limit = first, self.near.shape[1]
        if chosen >= limit:
            return chosen
        if self._answer is not None and self._answer[0] == (first, tuple(rules), versions):
            return self._answer[1]
        now = evaluate(self.near[:, :chosen])
        while chosen < limit:
            more = min(2 * chosen, limit)
            votes = [rule for rule in rules if more <= rule.most]
            after = evaluate(self.near[:, :more]) if votes else now
            if not any(_mean(rule, now) - _mean(rule, after) >= rule.worthwhile for rule in votes):
                break
            chosen, now = more, after
        self._answer = None if versions is None else ((first, tuple(rules), versions), chosen)
        return chosen


def _mean(rule: Rule, evaluated: Sequence[Tensor]) -> float:
    return float(rule.score(*evaluated).mean())


def rows_to_try(num_points: int, device: torch.device) -> Int[Tensor, " B"]:
    """At most 64 evenly spaced rows, at which numbers of neighbors are compared."""
    return torch.linspace(0, num_points - 1, min(num_points, _TRIED), device=device).long().unique()
