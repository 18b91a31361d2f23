r"""Stochastic variational inference with a complete training recipe.

:func:`fit` is the loop that one would write by hand around an ELBO of Pyro and optimizers of torch. The loss is the
negative ELBO divided by the number of data points, in nats per point. Without a number of steps it trains until it has
converged, in one of two ways:

- "lbfgs", for methods whose loss is a function of a few hyperparameters and has no noise (``Vecchia``, ``MLL`` and
  ``LOO`` of Gaussian data; coefficients of the mean with normal priors are integrated over exactly,
  :mod:`pyro_nngp.inference.svi.cubature`): quasi-Newton steps on a random subset of the rows that grows fourfold, up
  to about 20,000; a new neighbor search follows each round, at the present lengthscales. About 30 evaluations in
  total. Few rows that end at much noise, signal only or beyond the data have a second start
  (:mod:`pyro_nngp.inference.svi.second_start`).
  With auxiliary variables (``LOO`` of labels, counts, Student-t data) up to eight of these steps alternate with
  solutions for q(omega), until leave-one-out densities no longer improve; the best state is kept.
  With pseudo-observations at the data (``VNNGP``; any likelihood) each evaluation uses all rows, after a solution for
  q(u): the loss is then the largest bound over all q(u), exact for the nearest-neighbor prior, where a sparse factor of
  the posterior precision is small enough (up to about 10^5 points in two dimensions, a few thousand in many) and no
  hyperparameter but coefficients of the mean has a prior. About 15 evaluations, from 4,000 rows on most of them in
  stages on a quarter of the rows, 2,000 at least, as with factor loadings of ``LMC``.
- "adam", for all others: minibatches, rates of 0.1 for logarithms of hyperparameters and 0.01 for other
  parameters, divided by three after each round (an epoch, 50 to 200 steps) in which the loss on a fixed set of rows
  does not improve; convergence after three such rounds.

Neighbors follow the kernel: a search follows where it has moved by more than 5 % since the last one (checked every 50
steps, or after each round of "lbfgs").

After twenty steps on minibatches a recording of their tensor operations replaces model and guide, with the same numbers
(:mod:`pyro_nngp.inference.svi.replay`); ``replay=False`` runs them in every step.

Cost: one evaluation of model and guide with its gradient per step; one permutation of the data per epoch.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal, cast

import torch
from pyro.infer import ELBO

from pyro_nngp._checks import (
    check_choice,
    check_device,
    check_gradients,
    check_int,
    check_memory,
    check_positive,
    check_seed,
    fail,
)
from pyro_nngp._kinds import check_callable, check_flags
from pyro_nngp._memory import memory_errors
from pyro_nngp.inference._interrupt import deferred_interrupt
from pyro_nngp.inference.checkpoint import exclusive_checkpoint
from pyro_nngp.inference.elbo import IntegratedELBO, PredictiveLogLikelihood
from pyro_nngp.inference.protocols import (
    Checked,
    HoldsOut,
    Profiled,
    Program,
    Refreshable,
    Solvable,
    Trainable,
    has_program,
    offers,
    total_rows,
)
from pyro_nngp.inference.svi.options import COUNT, Checkpoint, Recipe, Schedule, Validation
from pyro_nngp.inference.svi.parameters import modules_of
from pyro_nngp.inference.svi.result import FitResult
from pyro_nngp.inference.svi.second_start import check_second_start, check_signal, with_second_start
from pyro_nngp.inference.svi.trainer import Trainer

_PATIENCE = 4  # scores of rows that a method holds out, without a better one


@memory_errors("fit", "Pass a smaller batch_size, or build the method with a smaller num_neighbors.")
def fit(
    method: Any,
    num_steps: int | None = None,
    *,
    batch_size: int | None = None,
    optimizer: Literal["adam", "lbfgs"] | None = None,
    lr: float | None = None,
    schedule: Schedule | None = None,
    refresh_every: int | None = None,
    solve_every: int | None = None,
    elbo: ELBO | None = None,
    num_data: int | None = None,
    tolerance: float = 1e-3,
    max_seconds: float | None = None,
    validation: Validation | Literal[False] | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    callback: Callable[[int, float], None] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    replay: bool = True,
    progress: bool = True,
) -> FitResult:
    """Train a method, or a pair (model, guide), by minibatch SVI; ``fit(gp)`` trains until it has converged.

    Args:
        method: an object with ``model`` and ``guide`` taking a batch of row numbers, and ``num_data``; optionally
            ``refresh_neighbors()`` and ``solve()``, and ``batch_args(idx, generator)`` for models that need more than
            row numbers. Or a tuple (model, guide), with `num_data`.
        num_steps: total number of steps, including resumed ones; None trains until convergence; Adam then goes
            back where the loss ran away, and ends at the parameters of its best round.
        batch_size: rows per step, of the largest subset with "lbfgs". If it covers all rows, the model is called
            without row numbers. None is 1024, divided by the number of latent functions but 128 at least,
            and about 20,000 with "lbfgs".
        optimizer: "adam" or "lbfgs", see above. None is "adam" with `num_steps`, `lr`, or a rate or bound of
            `schedule`, and otherwise the one that suits the loss.
        lr: learning rate of Adam. None is 0.1 for positive parameters, which are trained as logarithms, and 0.01 for
            others.
        schedule: learning rates over a given number of steps, and bounds; None is ``Schedule()``.
        refresh_every: steps between calls of ``method.refresh_neighbors()``; None calls it as the kernel moves, 0
            never.
        solve_every: steps between calls of ``method.solve()``, which sets ``method.solved_parameters()`` to their
            optimum given all others, without gradient steps; the first call comes before the first step, the last after
            the last. None is once per epoch, and at most every 20 steps, if ``method.can_solve`` and `elbo` is a
            bound of the evidence (a PredictiveLogLikelihood has another optimum); 0 leaves these parameters to
            gradients.
        elbo: any ELBO of Pyro; None is :class:`~pyro_nngp.inference.IntegratedELBO`.
        num_data: number of data points, if `method` does not have it.
        tolerance: largest improvement per round, in nats per data point, that counts as none; a tenth as much per step
            of "lbfgs", which scales both by N / 2,500 where there are fewer points; its last round, on all
            rows or the largest subsample, may gain 500 times as much in all, half a nat by default.
        max_seconds: limit on the wall time of this call; a run that it ends depends on the speed of the machine.
        validation: a score on held-out data, by which the best state is chosen. None holds rows of the method out where
            its loss does not tell when its predictions are best (``SWSGP`` with many inducing points) and nothing else
            says how long to train: they do not count in training, and the result says how many. False trains on all.
        checkpoint: file that the run is saved to, and resumed from if it exists, or a ``Checkpoint``. A resumed run
            equals one that was never stopped, bit for bit; data, rates and seed must equal the file's. With a
            larger `num_steps` than in the file, the run continues, finished or not, at the rates of the longer
            schedule.
        callback: called as ``callback(step, loss)`` after each step on all rows.
        device: where to train; None leaves the method where it is.
        seed: seed of minibatches and draws; the global random state is left alone.
        replay: whether Adam's steps may replace model and guide by a recording of their tensor operations, gradient
            included, after twenty steps in which data, neighbors and solved parameters have not changed: the same
            losses and gradients, bit for bit, in half the time or less. Python code of model and guide does not run
            in a replayed step: False runs it in every step, for a debugger, for prints, or for programs that depend on
            more than their tensors. A pair of functions, batches of all rows, GPUs, several processes, and evaluations
            of more than 0.1 s are never replayed, nor programs that read numbers out of tensors. The result says
            which step was the first (:attr:`~pyro_nngp.inference.FitResult.replayed_from`).
        progress: whether to show a progress bar.

    Raises:
        RuntimeError: if gradients are switched off around the call.
        DivergenceError: if the loss or a gradient is not finite: names the step, the parameters and the checkpoint.
        CheckpointError: if the checkpoint is damaged or belongs to another run.
        ValueError, TypeError: if an argument is out of range.

    Warns:
        ConvergenceWarning: if the loss still falls at the end, which fewer than 40 steps of a given number do not show;
            if predictions from eight times as many neighbors differ; if the model all but excludes the data; if the
            mean function lies away from them; if leave-one-out densities of labels owe much to the labels; if rows are
            predicted by near copies of them; if two starts end within a nat and one takes f for noise; or if the bound
            of a q(u) lies far below the log evidence, or above.

    Returns:
        The losses, the choices made, and what happened.
    """
    method, num_data = _trainable(method, num_data)
    _check_numbers(num_steps, batch_size, refresh_every, solve_every, lr, tolerance, max_seconds)
    if optimizer is not None:
        check_choice("fit", "optimizer", optimizer, ("adam", "lbfgs"))
    tensors = [chain(module.parameters(), module.buffers()) for module in modules_of(method)]
    check_gradients("fit", chain.from_iterable(tensors))
    check_seed("fit", seed)
    if device is not None:
        check_device("fit", device)
    check_flags("fit", replay=replay, progress=progress)
    if callback is not None:
        check_callable("fit", "callback", callback, "It is called as callback(step, loss).", 2)
    elbo = _given("elbo", elbo, ELBO)
    schedule = _given("schedule", schedule, Schedule) or Schedule()
    held_out = torch.empty(0)
    if validation is None and num_steps is elbo is None and isinstance(method, HoldsOut):
        held_out = method.held_out_rows(seed)
    validation = None if validation is False else _given("validation", validation, Validation)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    if refresh_every and not isinstance(method, Refreshable):
        cure = "Leave refresh_every out."
        fail("fit", "method", "to have refresh_neighbors() with refresh_every", type(method).__name__, cure)
    can_solve = isinstance(method, Solvable) and method.can_solve and not isinstance(elbo, PredictiveLogLikelihood)
    if solve_every and not can_solve:
        fail("fit", "method", "to be able to solve() with solve_every", type(method).__name__, "Leave solve_every out.")
    solving = can_solve if solve_every is None else solve_every > 0

    recipe = Recipe(
        num_steps=num_steps,
        batch_size=batch_size,
        optimizer=optimizer,
        lr=lr,
        schedule=schedule,
        refresh_every=refresh_every,
        solve_every=solve_every,
        solving=solving,
        elbo=IntegratedELBO() if elbo is None else elbo,
        tolerance=tolerance,
        device=device,
        seed=seed,
        replay=replay,
        automatic=num_steps is None,
    )

    def train_first(trainer: Trainer, max_seconds: float | None, pressed: list) -> None:
        """Train a copy on fewer rows first, which may do so as well, where the method has such stages."""
        whole, has_stages = trainer.method, trainer.automatic and solving and trainer.optimizer == "lbfgs"
        if not (has_stages and isinstance(whole, Profiled)) or trainer.has_checkpoint():
            return
        with whole.profile.first_stage() as part:
            if part is None:
                return
            stage = Trainer(part, recipe, part.num_data)
            train_first(stage, max_seconds, pressed)
            with stage.state.random, stage.state.sparse_gradients():
                stage.resume()
                stage.train(None, max_seconds, pressed, progress, f"fit of {part.num_data} rows first")
        trainer.follow(stage)

    def run(max_seconds: float | None, validation: Validation | None = validation) -> Trainer:
        trainer = Trainer(method, recipe, num_data, validation, checkpoint)
        state = trainer.state
        path = checkpoint.path if checkpoint is not None and state.ranks.is_first else None
        alone = exclusive_checkpoint("fit", path)
        with alone, deferred_interrupt() as pressed:
            train_first(trainer, max_seconds, pressed)
            with state.random, state.sparse_gradients():
                trainer.resume()
                trainer.train(callback, max_seconds, pressed, progress)
                trainer.keep_best()
        trainer.interrupted = bool(pressed)
        return trainer

    started = time.perf_counter()
    if len(held_out):
        with cast(HoldsOut, method).holding_out(held_out) as score:
            first = run(max_seconds, Validation(score, patience=_PATIENCE, at_start=True))
    else:
        first = run(max_seconds)
    left = None if max_seconds is None else max(0.0, max_seconds - (time.perf_counter() - started))
    trainer, comparison = with_second_start(first, lambda: run(left))
    result = trainer.result(len(held_out))
    check_second_start(comparison)
    check_signal(method, comparison)
    gain = None if comparison is None else comparison.gain
    return dataclasses.replace(result, seconds=time.perf_counter() - started, second_start=gain)


def _trainable(method: Any, num_data: int | None) -> tuple[Trainable, int]:
    """The method, or a pair of functions as a :class:`Program`, and the number of rows."""
    if not (isinstance(method, tuple) or has_program(method)):
        cure = "Pass a method, or a tuple of model and guide such as (gp.model, AutoNormal(gp.model)) with num_data=."
        fail("fit", "method", "with model and guide", type(method).__name__, cure, TypeError)
    if isinstance(method, tuple) and not (len(method) == 2 and all(map(callable, method))):
        actual = f"({', '.join(type(part).__name__ for part in method)})"
        fail("fit", "method", "to be a pair of functions (model, guide)", actual, "Pass both.", TypeError)
    if offers(method, Checked) and method.likelihood is None:
        cure = "Build the method with y and a likelihood; a prior inside a larger program is trained with that program."
        fail("fit", "method", "to have a likelihood", f"a {type(method).__name__} without one", cure)
    is_complete = hasattr(method, "num_data")
    count = total_rows(method) if is_complete and num_data is None else num_data
    check_int("fit", "num_data", count, 1, "Pass num_data= with a (model, guide) pair.")
    if not is_complete:
        check_memory("fit", "num_data", cast(int, count), torch.int64, "Pass the number of rows.")
        model, guide = method if isinstance(method, tuple) else (method.model, method.guide)
        method = Program(model, guide, cast(int, count))
    return method, cast(int, count)


def _check_numbers(
    num_steps: Any, batch_size: Any, refresh_every: Any, solve_every: Any, lr: Any, tolerance: Any, max_seconds: Any
) -> None:
    counts = {"num_steps": (num_steps, 1), "batch_size": (batch_size, 1)}
    counts |= {"refresh_every": (refresh_every, 0), "solve_every": (solve_every, 0)}
    for arg, (value, least) in counts.items():
        if value is not None:
            check_int("fit", arg, value, least, COUNT + " 0 is never." * (least == 0))
    if lr is not None:
        check_positive("fit", "lr", lr, "It is Adam's learning rate.")
    if max_seconds is not None:
        check_positive("fit", "max_seconds", max_seconds, "It is a ceiling in seconds.")
    check_positive("fit", "tolerance", tolerance, "It is an improvement in nats per data point.")


def _given(arg: str, value: Any, kind: type) -> Any:
    """`value`, which is of a kind or None."""
    if value is not None and not isinstance(value, kind):
        fail("fit", arg, f"to be a {kind.__name__}", type(value).__name__, f"Pass {kind.__name__}(...).", TypeError)
    return value
