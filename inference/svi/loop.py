r"""Stochastic variational inference with the training recipe taken care of.

:func:`fit` is the loop that one would write by hand around an ELBO of Pyro and optimizers of torch: minibatches without
replacement, Adam with a step schedule, clipped gradients, neighbors found again as the kernel learns, a progress bar,
checkpoints. The loss is the negative ELBO divided by the number of data points, in nats per point.

Cost: that of one evaluation of model and guide with its gradient per step; one permutation of the data per epoch.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor
from tqdm.auto import tqdm

from pyro_nngp._checks import fail
from pyro_nngp.inference._interrupt import deferred_interrupt
from pyro_nngp.inference.checkpoint import check_schema, exclusive_checkpoint, load_checkpoint, save_checkpoint
from pyro_nngp.inference.elbo import IntegratedELBO, PredictiveLogLikelihood
from pyro_nngp.inference.svi.run import DivergenceError, Run

_MAX_STEPS_BACK = 5


@dataclass
class FitResult:
    """What :func:`fit` did.

    Attributes:
        losses: negative ELBO per data point at each step, (steps,).
        scores: (step, score) of each validation.
        seconds: wall time, of this call.
        interrupted: whether Ctrl-C or early stopping ended it before its number of steps.
    """

    losses: Tensor
    scores: list[tuple[int, float]]
    seconds: float
    interrupted: bool


def fit(
    method: Any,
    num_steps: int,
    *,
    batch_size: int | None = 1024,
    lr: float = 0.01,
    local_lr: float | None = None,
    milestones: tuple[float, ...] = (0.75, 0.9),
    decay: float = 0.1,
    clip_norm: float | None = None,
    refresh_every: int | None = None,
    solve_every: int | None = None,
    elbo: ELBO | None = None,
    num_data: int | None = None,
    validate: Callable[[], float] | None = None,
    validate_every: int = 500,
    patience: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1000,
    step_back: bool = False,
    callback: Callable[[int, float], None] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> FitResult:
    """Train a method, or a pair (model, guide), by minibatch SVI.

    Args:
        method: an object with ``model`` and ``guide`` taking a batch of row numbers, and ``num_data``; optionally
            ``refresh_neighbors()`` and ``solve()``, and ``batch_args(idx, generator)`` for models that want more than
            row numbers. Or a tuple (model, guide), with `num_data`.
        num_steps: number of gradient steps in all, resumed ones included.
        batch_size: rows per step; None, or at least as many as there are, calls the model without row numbers.
        lr: learning rate of Adam.
        local_lr: learning rate of parameters with one row per data point (those whose gradients are sparse), where they
            are not solved for; None is `lr`.
        milestones: fractions of `num_steps` at which both rates are multiplied by `decay`.
        decay: that factor.
        clip_norm: bound on the norm of the gradient of the loss per data point; None is no bound.
        refresh_every: steps between calls of ``method.refresh_neighbors()``; None never calls it.
        solve_every: steps between calls of ``method.solve()``, which puts ``method.solved_parameters()`` at their
            optimum given all others without gradient steps; the first call comes before the first step, the last after
            the last. None is once per epoch, and at most every 20 steps, where ``method.can_solve`` and `elbo` is a
            bound of the evidence (a PredictiveLogLikelihood has another optimum); 0 leaves these parameters to
            gradients.
        elbo: any ELBO of Pyro; None is :class:`~pyro_nngp.inference.IntegratedELBO`.
        num_data: number of data points where `method` does not say.
        validate: score to be small, called every `validate_every` steps; the best state is kept and restored.
        validate_every: steps between validations.
        patience: stop after this many validations without a better score; None never does.
        checkpoint: file that the run is saved to, and resumed from where it exists. A resumed run gives the same bits
            as one that was never stopped; data, rates and seed must be those of the file. With a larger `num_steps`
            than the file's the run goes on, finished or not, from there on at the rates of the longer schedule.
        checkpoint_every: steps between checkpoints.
        step_back: where the loss diverges, go back to the last checkpoint with half the learning rates, at most five
            times, instead of stopping.
        callback: called as ``callback(step, loss)`` after each step.
        device: where to train; None leaves the method where it is.
        seed: of minibatches and draws; the global random state is left alone.
        progress: whether to show a progress bar.

    Raises:
        DivergenceError: where the loss or a gradient is not finite: names the step, the parameters and the checkpoint.
        CheckpointError: where the checkpoint is damaged or belongs to another run.
        ValueError: where an argument is out of range.

    Returns:
        The trace of losses and what else happened.
    """
    counts = {"num_steps": num_steps, "batch_size": batch_size, "refresh_every": refresh_every}
    counts |= {"validate_every": validate_every, "checkpoint_every": checkpoint_every}
    for arg, value in counts.items():
        if value is None and arg in ("batch_size", "refresh_every"):
            continue
        if not isinstance(value, int) or value < 1:
            fail("fit", arg, "to be an int >= 1", repr(value), "It counts gradient steps, or rows per step.")
    if not (isinstance(method, tuple) or (hasattr(method, "model") and hasattr(method, "guide"))):
        cure = "Pass a method, or a tuple of model and guide such as (gp.model, AutoNormal(gp.model)) with num_data=."
        fail("fit", "method", "with model and guide", type(method).__name__, cure, TypeError)
    if getattr(method, "likelihood", True) is None:
        cure = "Build the method with y and a likelihood; a prior inside a larger program is trained with that program."
        fail("fit", "method", "to have a likelihood", f"a {type(method).__name__} without one", cure)
    if patience is not None and validate is None:
        fail(
            "fit", "validate", "to be given with patience", None, "Pass a function that returns a score, small if good."
        )
    if step_back and checkpoint is None:
        fail("fit", "checkpoint", "to be given with step_back", None, "Name a file to go back to.")
    if refresh_every is not None and not hasattr(method, "refresh_neighbors"):
        fail(
            "fit",
            "method",
            "to have refresh_neighbors() with refresh_every",
            type(method).__name__,
            "Leave refresh_every out.",
        )
    can_solve = getattr(method, "can_solve", False) and not isinstance(elbo, PredictiveLogLikelihood)
    if solve_every and not can_solve:
        fail("fit", "method", "to be able to solve() with solve_every", type(method).__name__, "Leave solve_every out.")
    local_lr = lr if local_lr is None else local_lr
    elbo = IntegratedELBO() if elbo is None else elbo
    solving = can_solve if solve_every is None else solve_every > 0
    run = Run(method, num_steps, batch_size, lr, local_lr, milestones, decay, elbo, num_data, solving, device, seed)
    run.settings |= {"clip_norm": clip_norm, "refresh_every": refresh_every, "solve_every": solve_every}
    best, start, slower, interrupted = _Best(), time.perf_counter(), 0, False
    alone = exclusive_checkpoint("fit", checkpoint)
    with alone, run.random, run.sparse_gradients(), deferred_interrupt() as pressed:
        if checkpoint is not None and os.path.exists(checkpoint):
            _load(checkpoint, run, best)
            interrupted = best.waited_out(patience)
        elif solving:
            method.solve()
        solved = run.step  # the step of the last solution
        bar = tqdm(total=num_steps, initial=run.step, disable=not progress, desc="fit", unit="step", mininterval=0.5)
        try:
            while run.step < num_steps and not (interrupted or pressed):
                if checkpoint is not None and run.step % checkpoint_every == 0:
                    _save(checkpoint, run, best)
                try:
                    loss = run.advance(clip_norm)
                except DivergenceError as error:
                    if checkpoint is None:
                        raise
                    if not step_back or slower == _MAX_STEPS_BACK:
                        raise DivergenceError(f"{error} Last good checkpoint: {checkpoint}.") from None
                    slower += 1
                    _load(checkpoint, run, best)
                    run.slow_down(0.5)
                    _save(checkpoint, run, best)
                    bar.n = run.step
                    continue
                bar.update()
                if run.step % 20 == 0:
                    bar.set_postfix(loss=f"{sum(run.losses[-20:]) / 20:.4f}", refresh=False)
                if refresh_every is not None and run.step % refresh_every == 0 and run.step < num_steps:
                    method.refresh_neighbors()
                if solving and (run.step % (solve_every or run.steps_per_epoch()) == 0 or run.step == num_steps):
                    method.solve()
                    solved = run.step
                if validate is not None and run.step % validate_every == 0:
                    best.update(run, float(validate()))
                    interrupted = best.waited_out(patience)
                if callback is not None:
                    with run.random.paused():
                        callback(run.step, loss)
        finally:
            bar.close()
        if checkpoint is not None:
            _save(checkpoint, run, best)
        if best.values is not None:
            run.restore(best.values)
        elif solving and solved != run.step:  # after the file is written, from which the run goes on as it stood
            method.solve()
    return FitResult(torch.tensor(run.losses), best.scores, time.perf_counter() - start, interrupted or bool(pressed))


class _Best:
    """Validation scores so far, and all parameters and buffers at the best of them."""

    def __init__(self) -> None:
        self.scores: list[tuple[int, float]] = []
        self.values: dict[str, Any] | None = None

    def update(self, run: Run, score: float) -> None:
        if score < min((s for _, s in self.scores), default=math.inf):
            self.values = run.snapshot()
        self.scores.append((run.step, score))

    def waited_out(self, patience: int | None) -> bool:
        """Whether that many validations, or more, have come after the best one."""
        scores = [s for _, s in self.scores]
        return patience is not None and bool(scores) and len(scores) - 1 - scores.index(min(scores)) >= patience


def _save(path: str | os.PathLike[str], run: Run, best: _Best) -> None:
    save_checkpoint(path, {"run": run.state(), "scores": best.scores, "best": best.values})


def _load(path: str | os.PathLike[str], run: Run, best: _Best) -> None:
    state = load_checkpoint(path)
    check_schema("fit", state, {"run": {}, "scores": [], "best": None})
    run.check(state["run"])
    for i, pair in enumerate(state["scores"]):
        check_schema("fit", pair, (0, 0.0), f"checkpoint['scores'][{i}]")
    if state["best"] is not None:
        check_schema("fit", state["best"], run.snapshot(), "checkpoint['best']")
    run.load(state["run"])
    best.scores, best.values = [tuple(pair) for pair in state["scores"]], state["best"]
