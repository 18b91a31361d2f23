"""The result of a training run, and the warning that it did not converge."""

import math
from dataclasses import dataclass

from torch import Tensor

from pyro_nngp._checks import warn


class ConvergenceWarning(UserWarning):
    """A training run ended before it converged, or its result looks wrong."""


def warn_of(found: str) -> None:
    """Warn of a run or of what it trained: what was expected, and what was found."""
    warn(f"fit: expected {found}", ConvergenceWarning)


@dataclass(repr=False)
class FitResult:
    """The result of :func:`~pyro_nngp.inference.fit`.

    Attributes:
        losses: loss per data point at each step, (steps,): the negative ELBO on the rows of that step.
        scores: (step, score) of each validation.
        seconds: wall time of this call.
        converged: whether the loss had stopped falling; None if the steps were too few to decide, or were interrupted.
        ended_by: "Ctrl-C", "the time limit" or "early stopping" if one of them ended it; else None.
        optimizer: "adam" or "lbfgs".
        batch_size: rows per step at the end; the number of data points if a step used all of them.
        refreshes: number of neighbor searches in this call.
        solves: number of times that parameters were solved for in this call.
        num_neighbors: K of the method's graph, given or chosen; None without a graph.
        replayed_from: first step of this call, counted from 1, in which recorded operations replaced model and guide
            (see `replay` of :func:`~pyro_nngp.inference.fit`); None if none did.
        second_start: log likelihood, in nats, that a second start ended above the first, or below it; the better one
            is kept. Minus infinity where the second alone errs far beyond what it predicts, infinity where the first
            does; None if there was one start.
        held_out: number of rows that did not count in training and scored it: the best state by them is kept.
        stages: (rows, steps) of each stage in which this call trained on fewer rows first.
    """

    losses: Tensor
    scores: list[tuple[int, float]]
    seconds: float
    converged: bool | None
    ended_by: str | None
    optimizer: str
    batch_size: int
    refreshes: int
    solves: int
    num_neighbors: int | None = None
    replayed_from: int | None = None
    second_start: float | None = None
    held_out: int = 0
    stages: tuple[tuple[int, int], ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C, early stopping or the time limit ended it."""
        return self.ended_by is not None

    @property
    def steps(self) -> int:
        """Total number of steps of the run, over all calls."""
        return len(self.losses)

    @property
    def loss(self) -> float:
        """Loss per data point at the end, the mean of the last 20 steps of Adam."""
        last = self.losses[-1:] if self.optimizer == "lbfgs" else self.losses[-20:]
        return float(last.mean())

    def __repr__(self) -> str:
        state = {True: "converged", False: "not converged", None: "convergence unknown"}[self.converged]
        name = {"adam": "Adam", "lbfgs": "L-BFGS"}[self.optimizer]
        before = " and ".join(f"{steps} on {rows}" for rows, steps in self.stages)
        counts = f"{self.steps} steps of {name} on {self.batch_size} rows{' after ' * bool(before)}{before}"
        counts += f", {self.refreshes} refreshes"
        solves = f", {self.solves} solves" if self.solves else ""
        ended = f", ended by {self.ended_by}" if self.interrupted else ""
        counts += f", K = {self.num_neighbors}" if self.num_neighbors is not None else ""
        replay = f", replayed from step {self.replayed_from}" if self.replayed_from is not None else ""
        gain = self.second_start
        kept = "" if gain is None else f", {'second' if gain > 0 else 'first'} of two starts, {_ahead(gain)}"
        best = f", best of {len(self.scores)} scores of {self.held_out} rows held out" if self.held_out else ""
        counts += f"{solves}{replay}{kept}{best}"
        return f"FitResult({state}{ended}: loss {self.loss:.4f}, {counts}, {self.seconds:.1f} s)"


def _ahead(gain: float) -> str:
    """The distance of two starts in words."""
    return f"{abs(gain):.2g} nats better" if math.isfinite(gain) else "the other overconfident"
