"""Groups of arguments of :func:`~pyro_nngp.inference.fit`, and the checks of their values; the choices of a run."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pyro.infer import ELBO

from pyro_nngp._checks import check_int, check_path, check_positive, fail
from pyro_nngp._kinds import check_flags, check_kind

COUNT = "It counts gradient steps, or rows per step."


@dataclass(frozen=True)
class Schedule:
    """Changes of Adam's learning rates, and bounds on its steps; L-BFGS has none.

    Args:
        milestones: fractions of the number of steps, which has to be given, at which rates are multiplied by `decay`.
        decay: factor of the rates at each milestone, in (0, 1].
        local_lr: learning rate of parameters with one row per data point, if they are not solved for; None is the rate
            of all others.
        clip_norm: bound on the norm of the gradient of the loss per data point; None is no bound.

    Raises:
        ValueError, TypeError: for a milestone outside (0, 1), or another value that is no number or out of range.
    """

    milestones: tuple[float, ...] = (0.75, 0.9)
    decay: float = 0.1
    local_lr: float | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        cure = "They are fractions of the number of steps."
        check_kind("Schedule", "milestones", self.milestones, (tuple, list), "a list or tuple", cure)
        if not all(isinstance(m, int | float) and 0 < m < 1 for m in self.milestones):
            fail("Schedule", "milestones", "to be in (0, 1)", self.milestones, cure)
        check_positive("Schedule", "decay", self.decay, "The rates are multiplied by it.", most=1.0)
        for arg, cure in (("local_lr", "It is a learning rate."), ("clip_norm", "It bounds a norm; None is no bound.")):
            if getattr(self, arg) is not None:
                check_positive("Schedule", arg, getattr(self, arg), cure)

    @property
    def changes_milestones(self) -> bool:
        """Whether its milestones or its decay, if it has milestones, differ from the defaults."""
        default = Schedule.milestones, Schedule.decay
        return len(self.milestones) > 0 and (tuple(self.milestones), self.decay) != default


@dataclass(frozen=True)
class Validation:
    """A score on held-out data; the best state is kept and restored at the end.

    Args:
        score: called without arguments; smaller is better. A score that is not finite is never the best.
        every: steps between scores; None is 500, or one score per round if the number of steps is not given.
        patience: stop after this many scores without a better one; None never stops early.
        at_start: whether to score the state before the first step, too, which then may be the best; patience starts
            with the first score after it, since first steps may lead away from a good start to a better end.

    Raises:
        ValueError, TypeError: if `score` is not callable, or a count is not an int >= 1.
    """

    score: Callable[[], float]
    every: int | None = None
    patience: int | None = None
    at_start: bool = False

    def __post_init__(self) -> None:
        check_flags("Validation", at_start=self.at_start)
        if not callable(self.score):
            cure = "Pass a function that returns a score; smaller is better."
            fail("Validation", "score", "to be callable", type(self.score).__name__, cure, TypeError)
        for arg in ("every", "patience"):
            if getattr(self, arg) is not None:
                check_int("Validation", arg, getattr(self, arg), 1, COUNT)


@dataclass(frozen=True)
class Checkpoint:
    """A file that a run is saved to, and resumed from if it exists.

    Args:
        path: the file; its folder must exist.
        every: steps between two writes.
        step_back: if the loss diverges, go back to the last write and halve the learning rates, at most five times,
            instead of stopping.

    Raises:
        ValueError, TypeError: if `path` is not a path, or `every` is not an int >= 1.
    """

    path: str | os.PathLike[str]
    every: int = 1000
    step_back: bool = False

    def __post_init__(self) -> None:
        check_flags("Checkpoint", step_back=self.step_back)
        check_path("Checkpoint", "path", self.path)
        check_int("Checkpoint", "every", self.every, 1, COUNT)

    def exists(self) -> bool:
        """Whether there is a run to resume."""
        return Path(self.path).exists()


@dataclass(frozen=True)
class Recipe:
    """The choices of a run, those of the caller or all (:func:`~pyro_nngp.inference.svi.defaults.completed`).

    Attributes:
        num_steps: most steps, once chosen.
        solving: whether the run solves for parameters.
        automatic: whether the run ends by convergence, not after a given number of steps.
        profiling: whether each evaluation of the loss solves for them.

    Others are as in :func:`~pyro_nngp.inference.fit`, checked.
    """

    num_steps: int | None
    batch_size: int | None
    optimizer: str | None
    lr: float | None
    schedule: Schedule
    refresh_every: int | None
    solve_every: int | None
    solving: bool
    elbo: ELBO
    tolerance: float
    device: torch.device | str | None
    seed: int
    replay: bool
    automatic: bool
    profiling: bool = False
