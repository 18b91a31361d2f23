"""Convergence: by the loss on fixed rows at the end of each round, or by the losses of a given number of steps.

Losses are per data point, in nats.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ENOUGH_STEPS = 40  # to judge a trace of losses
_STEEP = 0.02  # nats per data point in an eighth of the steps
_STANDARD_ERRORS = 3.0
_RECOVERED = 0.7  # of the turns of rounds between solutions, after one without a turn


class Plateau:
    """Counts rounds without improvement: each lowers the learning rates, and the one after the last cut is convergence.

    Args:
        tolerance: smallest improvement that counts, in nats per data point.
        cuts: number of times that rates are lowered before convergence.
    """

    def __init__(self, tolerance: float, cuts: int) -> None:
        self.tolerance, self.cuts = tolerance, cuts
        self.best, self.gain, self.misses = math.inf, math.inf, 0

    @property
    def converged(self) -> bool:
        """Whether a round after the last cut did not improve the objective."""
        return self.misses > self.cuts

    def observe(self, objective: float) -> bool:
        """Record the objective at the end of a round; returns whether it did not improve."""
        self.gain = self.best - objective
        stalled = not self.gain > self.tolerance
        self.misses += stalled
        self.best = min(self.best, objective)
        return stalled

    def state(self) -> dict[str, Any]:
        """Everything that later decisions depend on."""
        return {"best": self.best, "gain": self.gain, "misses": self.misses}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.best, self.gain, self.misses = state["best"], state["gain"], state["misses"]


class Rounds:
    """Rounds of steps between solutions; one that goes back where the last one came from is shortened.

    The loss between solutions is near the one that is minimized where it starts, and no farther: parameters may go back
    and forth between two places for ever. Each turn makes the parts of the way smaller, each round without one larger.
    """

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}

    def end(self, place: Tensor) -> Tensor:
        """The place (P,) from which to go on after a round that ended at another one."""
        start, before, turns = (part.to(place) for part in (self._last or self.first(place)).values())
        step = place - start
        turns = turns + 1 if step @ (start - before) < 0 else _RECOVERED * turns
        place = start + step / (1 + turns) if self._last else place
        self._last = {"start": place, "before": start, "turns": turns}
        return place

    @staticmethod
    def first(place: Tensor) -> dict[str, Tensor]:
        """The state before the first round."""
        return {"start": place, "before": place, "turns": place.new_zeros(())}

    def state(self) -> dict[str, Tensor]:
        """Everything that later rounds depend on; nothing before the first one."""
        return self._last

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from a state."""
        self._last = state


def still_falling(losses: Sequence[float], milestone: float = 1.0) -> float | None:
    """Fall of the mean loss from one eighth of the steps to the next; 0 if it may be noise.

    It is measured where the rates are first lowered, since afterwards a loss is flat whether it has converged or not,
    and at the end.

    Args:
        losses: loss at each step.
        milestone: fraction of the steps at which the rates are first lowered.

    Returns:
        The larger of the two falls, in nats per data point; None for fewer than 40 losses.
    """
    if len(losses) < _ENOUGH_STEPS:
        return None
    trace, size = torch.tensor(losses, dtype=torch.float64), len(losses) // 8
    noise = (trace.diff().square().mean() / 2).sqrt()  # of a step, whatever the trend
    error = float(noise) * math.sqrt(2 / size)
    falls = []
    for end in {len(losses), max(2 * size, round(milestone * len(losses)))}:
        fall = float(trace[end - 2 * size : end - size].mean() - trace[end - size : end].mean())
        falls.append(fall if fall > _STEEP + _STANDARD_ERRORS * error else 0.0)
    return max(falls)


def describe_fall(fall: float | None, when: str) -> str:
    """The fall of a loss that has not converged, in words; it is unknown if the loss rose, or for few steps."""
    known = fall is not None and 0 < fall < math.inf
    return f"fell by {fall:.2g} nats per data point in {when}" if known else "may still fall"
