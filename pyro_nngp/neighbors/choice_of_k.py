"""Choice of the number K of neighbors: it is doubled while that helps.

The variance of f decides. Under much noise the variance of y hardly changes with K, while the variance of f may fall by
a factor of six: a smooth function needs all the observations within a lengthscale or so, the more, the noisier they
are.

The last doubling, to 512, takes most of the time of predictions, and has to lower log variances of y by three percent:
where it lowered them by 1 to 1.6, on elevators, sarcos and keggdirected, held-out rows lost .017 nats to a gain of
.007; where by 3 to 4, on kin8nm, they gained .03.

Variances say what is gained if the kernel is right. Hyperparameters that maximize leave-one-out densities given K
neighbors need not be right for more: of 2,000 noise-free values of Friedman's function, ``LOO`` with K = 64 has an NLL
of -4.9 nats, and -3.5 and -1.5 with 128 and 256 neighbors, while variances fall. So a doubling that lowers the density
of y at the points of the trial is refused (:func:`loses_density`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from pyro_nngp._versions import Versions

MOST_NEIGHBORS = 512  # for predictions
_TRIED = 64  # points at which numbers of neighbors are compared
_MOST_LOSS, _ERRORS = 0.1, 2.0  # nats, and standard errors of their mean


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


def log_of_f(variance: Tensor, noise: Tensor, *_: Tensor) -> Tensor:
    """Logarithms of predictive variances of f."""
    return variance.log()


def log_of_y(variance: Tensor, noise: Tensor, *_: Tensor) -> Tensor:
    """Logarithms of predictive variances of y."""
    return (variance + noise).log()


def itself(values: Tensor) -> Tensor:
    """Scores that are evaluated as such."""
    return values


ONE_SCORE = (Rule(itself, 0.01, MOST_NEIGHBORS),)
FOR_Y = Rule(log_of_y, 0.01, MOST_NEIGHBORS // 2), Rule(log_of_y, 0.03, MOST_NEIGHBORS)  # of predictions
FOR_F = (Rule(log_of_f, 0.03, MOST_NEIGHBORS // 2),)
Veto = Callable[[Sequence[Tensor], Sequence[Tensor]], bool]


def loses_density(now: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether the log density of y, the third of what is evaluated, falls by a tenth of a nat per point or more.

    By two standard errors at least: with outliers a single point can decide the mean.
    """
    fall = (now[2] - after[2]).double().flatten()
    return float(fall.mean()) > max(_MOST_LOSS, _ERRORS * float(fall.std()) / len(fall) ** 0.5)


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
        self._answer: tuple[tuple[Any, ...], int] | None = None

    def choose_k(
        self,
        evaluate: Callable[[Int[Tensor, "B K"]], Sequence[Tensor]],
        first: int,
        rules: Sequence[Rule],
        versions: Versions | None = None,
        veto: Veto | None = None,
    ) -> int:
        """The chosen K: doubled from `first` up to k while the mean score of any rule falls enough.

        Args:
            evaluate: maps rows of K neighbors to the arguments of the rules' scores.
            first: the first number tried.
            rules: reasons for a doubling.
            versions: of all that evaluations depend on; None evaluates at each call.
            veto: maps what is evaluated before and after a doubling to whether it is refused.

        Cost: at most log2(k / first) + 1 evaluations; none if nothing has changed.
        """
        chosen, limit = first, self.near.shape[1]
        if chosen >= limit:
            return chosen
        asked = first, tuple(rules), versions, veto
        if self._answer is not None and self._answer[0] == asked:
            return self._answer[1]
        now = evaluate(self.near[:, :chosen])
        while chosen < limit:
            more = min(2 * chosen, limit)
            votes = [rule for rule in rules if more <= rule.most]
            after = evaluate(self.near[:, :more]) if votes else now
            if not any(_mean(rule, now) - _mean(rule, after) >= rule.worthwhile for rule in votes):
                break
            if veto is not None and veto(now, after):
                break
            chosen, now = more, after
        self._answer = None if versions is None else (asked, chosen)
        return chosen


def _mean(rule: Rule, evaluated: Sequence[Tensor]) -> float:
    return float(rule.score(*evaluated).mean())


def rows_to_try(num_points: int, device: torch.device) -> Int[Tensor, " B"]:
    """At most 64 evenly spaced rows, at which numbers of neighbors are compared."""
    return torch.linspace(0, num_points - 1, min(num_points, _TRIED), device=device).long().unique()
