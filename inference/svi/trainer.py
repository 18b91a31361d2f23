"""Decisions of a training run: the optimizer, and when to refresh neighbors, to solve for q(u), and to stop.

Symbols and cost: see :mod:`pyro_nngp.inference.svi.loop`.
"""

import math
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_nngp._random import shuffled
from pyro_nngp.inference.protocols import Refreshable, Smooth, Trainable, graph_of
from pyro_nngp.inference.svi.convergence import Plateau, Rounds, describe_fall, still_falling
from pyro_nngp.inference.svi.defaults import alternates, completed, has_neighbors_of_graph, neighbor_parameters
from pyro_nngp.inference.svi.final_checks import check_trained
from pyro_nngp.inference.svi.lbfgs import LBFGS
from pyro_nngp.inference.svi.options import Checkpoint, Recipe, Validation
from pyro_nngp.inference.svi.result import FitResult, warn_of
from pyro_nngp.inference.svi.saved_state import load_run, run_content
from pyro_nngp.inference.svi.train_state import DivergenceError, TrainState
from pyro_nngp.linalg import report_nuggets

_PROBE = 2048  # rows of the loss that decides on convergence
_ROUND = (50, 200)  # fewest and most steps of Adam per round
_MANY_ROWS = 2500  # below which L-BFGS has a smaller tolerance: .25 nats in all, of 250 rows, are worth a few steps
_WHOLE = 500  # rows whose tolerance all have together in the end: half a nat, a standard error of a hyperparameter
_ROUND_LBFGS, _STALLS = 30, 2  # most steps of a round; steps without a gain that end it
_NEGLIGIBLE = 0.1  # part of a small gain below which an expected one needs no step
_ROUND_ALTERNATING, _MISSES = 8, 1  # most steps between solutions; rounds without a gain before the last
_SLOWER, _CUTS = 1 / 3, 3
_RUNAWAY = 0.1  # rise of the objective in a round, in nats per data point, after which the best parameters are restored
_MOVED, _CHECK_EVERY = 0.05, 50  # move of the kernel's logarithms that matters, and steps between checks
_MAX_STEPS_BACK = 5


class Trainer:
    """A :class:`TrainState` and all decisions about its course.

    Args:
        method: the method.
        recipe: the caller's choices.
        num_data, validation, checkpoint: as in :func:`~pyro_nngp.inference.fit`, checked.

    Attributes:
        coarse: gain of a round that counts as none on subsamples that grow, in nats per row.
        tolerance: the same on the largest, or on all rows.
    """

    def __init__(
        self,
        method: Trainable,
        recipe: Recipe,
        num_data: int,
        validation: Validation | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.method: Any = method
        self.refresh_every, self.solve_every = recipe.refresh_every, recipe.solve_every
        self.validation, self.checkpoint, self.automatic = validation, checkpoint, recipe.automatic
        recipe = completed(recipe, method, num_data, checkpoint)
        self.optimizer, self.num_steps = cast(str, recipe.optimizer), cast(int, recipe.num_steps)
        is_lbfgs = self.optimizer == "lbfgs"
        self.coarse = recipe.tolerance * (min(1.0, num_data / _MANY_ROWS) if is_lbfgs else 1.0)
        self.milestone = min(recipe.schedule.milestones, default=1.0)
        self.profiling = recipe.profiling
        self.solving = recipe.solving and not self.profiling  # between steps
        self.state = TrainState(method, recipe, num_data, keeps_factor=checkpoint is None)
        self.ranks = self.state.ranks
        self.alternating = is_lbfgs and self.automatic and alternates(method, recipe.solving)
        in_rounds = self.alternating or (self.solving and isinstance(method, Smooth))
        is_exact = is_lbfgs and not in_rounds
        most = self.state.batch_size or num_data
        self.tolerance = min(self.coarse, recipe.tolerance * _WHOLE / most) if is_exact else self.coarse
        self.plateau, self.gain = Plateau(recipe.tolerance, _MISSES if self.alternating else _CUTS), math.inf
        self.scores: list[tuple[int, float]] = []
        self.best: dict[str, Any] | None = None
        self.best_parameters: dict[str, Tensor] = {}  # parameters at the end of the best round of Adam
        self.rounds = Rounds()  # of L-BFGS between solutions
        self.objective = math.inf
        scored = shuffled(num_data, recipe.seed)[:_PROBE]
        self.store: Any = None if checkpoint is None else self.ranks.store(checkpoint.path)
        self.num_scored, self.scored_rows = len(scored), self.ranks.local_rows(scored.to(self.state.device))
        self.metric_parameters = neighbor_parameters(method)
        self.metric_at_refresh = self._metric_now()
        self.refreshes, self.solves, self.solved_at, self.stalls, self.round_start = 0, 0, -1, 0, 0
        self.steps_back, self.converged, self.ended, self.started = 0, False, False, time.perf_counter()
        self.interrupted = False  # by Ctrl-C
        self.stages: tuple[tuple[int, int], ...] = ()  # rows and steps of training on fewer rows

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.store is not None and self.store.exists()

    def follow(self, stage: "Trainer") -> None:
        """Start with all rows, and with neighbors for the hyperparameters that a stage on some rows has determined."""
        self.stages = *stage.stages, (stage.state.num_data, stage.state.step)
        rows = self.state.batches
        while self.optimizer == "lbfgs" and not rows.grown:
            rows.grow()
        if self.state.quasi_newton is not None and stage.state.quasi_newton is not None:
            self.state.quasi_newton.follow(stage.state.quasi_newton)
        self._refresh_if_moved()

    def resume(self) -> None:
        """Resume from the checkpoint, if there is one; otherwise solve and score once, where that is asked for."""
        if self.has_checkpoint():
            self._load()
            self.ended = self.converged or self._out_of_patience()
            self.solved_at = self.state.step
            return
        if self.solving:
            self._solve()
        if self.automatic and self.state.quasi_newton is None:
            self.objective = self.state.objective(_PROBE)
            if math.isfinite(self.objective):
                self.plateau.best, self.best_parameters = self.objective, self.state.parameters()
        if self.validation is not None and self.validation.at_start:
            self._validate(True)

    def train(
        self,
        callback: Callable[[int, float], None] | None,
        max_seconds: float | None,
        pressed: list,
        progress: bool,
        title: str = "fit",
    ) -> None:
        """Make steps until convergence, the last step, Ctrl-C or the time limit."""
        state, total = self.state, None if self.automatic else self.num_steps
        limit = math.inf if max_seconds is None else max_seconds
        progress = progress and self.ranks.is_first
        bar = tqdm(total=total, initial=state.step, disable=not progress, desc=title, unit="step", mininterval=0.5)
        try:
            while state.step < self.num_steps and not self.ended:
                late = time.perf_counter() - self.started > limit
                if self.ranks.any(bool(pressed) or late):
                    self.ended = not pressed
                    break
                if self.checkpoint is not None and state.step % self.checkpoint.every == 0:
                    self._save()
                try:
                    loss = state.advance()
                except DivergenceError as error:
                    self._step_back(error)
                    bar.n = state.step
                    continue
                bar.update()
                if state.step % 20 == 0 or state.quasi_newton is not None:
                    bar.set_postfix(self._shown(limit), refresh=False)
                if state.step % state.steps_per_epoch() == 0:
                    report_nuggets()
                if state.quasi_newton is None:
                    self._follow_adam_step()
                else:
                    self._follow_lbfgs_step(state.quasi_newton)
                if callback is not None:
                    with state.random.paused():
                        callback(state.step, loss)
        finally:
            bar.close()

    def _shown(self, limit: float) -> dict[str, str]:
        """Loss per row in the progress bar, and what makes it rise or ends the run: rows, the last round, seconds."""
        state = self.state
        last = state.losses[-20:] if state.quasi_newton is None else state.losses[-1:]
        shown = {"loss": f"{sum(last) / len(last):.4f} per row"}
        if state.quasi_newton is not None and not state.batches.grown:
            shown["rows"] = f"{state.batches.num_rows} of {state.num_data} so far"
        if self.automatic and math.isfinite(self.gain):
            shown["last round"] = f"{-self.gain:+.2g} (ends above {-self.tolerance:g})"
        if math.isfinite(limit):
            shown["left"] = f"{max(0.0, limit - (time.perf_counter() - self.started)):.0f} s"
        return shown

    def keep_best(self) -> None:
        """Write the checkpoint, and bring the method to its best state."""
        report_nuggets()
        if self.checkpoint is not None:
            self._save()
        if self.best is not None:
            self.state.restore(self.best)
            return
        if self.best_parameters and not self.objective <= self.plateau.best + self.tolerance:
            self._restore_best_round()
            return
        moved = self._refresh_if_moved()  # after the checkpoint is written, so that a resumed run starts from before
        if self.profiling or (self.solving and (moved or self.solved_at != self.state.step)):
            self._solve()

    def result(self, held_out: int = 0) -> FitResult:
        """The result, with a number of rows that fit held out by itself; warns if the run did not converge."""
        state = self.state
        self.converged = self.converged or (held_out > 0 and self._out_of_patience())
        ended_by = "Ctrl-C" if self.interrupted else None
        if self.ended and not (self.converged or self.interrupted):
            ended_by = "early stopping" if self._out_of_patience() else "the time limit"
        interrupted = ended_by is not None
        fall = self.gain if self.automatic else still_falling(state.losses, self.milestone)
        converged = self.converged if self.automatic else None if fall is None else fall == 0
        is_early = interrupted and state.step < self.num_steps and not self._out_of_patience()
        if is_early and converged and not self.automatic:
            converged = None  # a loss may be flat before the rates are lowered
        if self.ranks.is_first and ended_by in ("Ctrl-C", "the time limit"):
            cure = "Raise max_seconds." if ended_by == "the time limit" else "Call fit again, which goes on from here."
            text = f"got {ended_by} after {state.step} steps: predictions are those of a model that is not trained"
            warn_of(f"training to go on until it has converged, {text}. {cure}")
        elif self.ranks.is_first and converged is False and ended_by is None:
            self._warn(fall)
        rows = state.batch_size or state.num_data
        seconds = time.perf_counter() - self.started
        losses = torch.tensor(state.losses)
        graph = graph_of(self.method)
        counts = self.refreshes, self.solves, None if graph is None else graph.num_neighbors, state.replayed_from
        facts = losses, self.scores, seconds, converged, ended_by, self.optimizer, rows, *counts
        result = FitResult(*facts, held_out=held_out, stages=self.stages)
        if not interrupted:
            check_trained(self.method, result, self.ranks.is_first)
        return result

    def _follow_adam_step(self) -> None:
        """Refresh, solve and validate; at the end of a round, check convergence."""
        state = self.state
        last = state.step == self.num_steps
        if self.refresh_every is None:
            due = (state.step % _CHECK_EVERY == 0 or last) and self._metric_moved()
        else:
            due = self.refresh_every > 0 and state.step % self.refresh_every == 0 and not last
        if due:
            self._refresh()
        if self.solving and (state.step % self._solve_period() == 0 or last):
            self._solve()
        ends = self.automatic and state.step % self._round_steps() == 0
        if ends:
            self._end_round()
        self._validate(ends if self.automatic else state.step % 500 == 0)

    def _end_round(self) -> None:
        """Keep the best parameters; slow down after a round without gain, restore them if the loss ran away."""
        self.objective = self.state.objective(_PROBE)
        if self.objective < self.plateau.best:
            self.best_parameters = self.state.parameters()
        stalled = self._observe(self.objective)
        if self.best_parameters and not self.objective <= self.plateau.best + _RUNAWAY:
            self._restore_best_round()
        if stalled:
            self.state.slow_down(_SLOWER)

    def _restore_best_round(self) -> None:
        """Restore the parameters of the best round, with their neighbors and solutions."""
        self.state.put_back(self.best_parameters)
        if self.refresh_every != 0 and isinstance(self.method, Refreshable):
            self._refresh()
        if self.solving:
            self._solve()
        self.objective = self.plateau.best

    def _follow_lbfgs_step(self, optimizer: LBFGS) -> None:
        """At the end of a round refresh and solve, then go on to a larger subsample, or check convergence."""
        state, losses = self.state, self.state.losses
        rows = state.batches
        largest = rows.grown
        least = self.tolerance / 10 if largest else self.coarse
        in_round = state.step - self.round_start
        gain = (losses[-2] if in_round > 1 else optimizer.start_loss) - losses[-1]
        self.stalls = self.stalls + 1 if gain < least else 0
        expected = optimizer.expected_gain
        foreseen = expected < least and largest and in_round > 1 and optimizer.informed  # by a stage
        if foreseen or (self.stalls and expected < _NEGLIGIBLE * least):
            self.stalls = _STALLS
        ends = self.stalls == _STALLS or in_round == (_ROUND_ALTERNATING if self.alternating else _ROUND_LBFGS)
        if ends:
            stalled = self.stalls == _STALLS
            self.round_start, self.stalls = state.step, 0
            if self.solving and not self.alternating:
                optimizer.place = self.rounds.end(optimizer.place)
            refreshed = self._refresh_if_moved()
            if self.solving:
                self._solve()
            if not largest:
                rows.grow()
            elif self.alternating:
                self._score_round()
            else:
                self.gain = optimizer.start_loss - losses[-1]
                settled = stalled and not (refreshed or self.solving)
                self.converged = self.ended = settled or self.gain < self.tolerance
            optimizer.forget()
        if self.refresh_every and state.step % self.refresh_every == 0:
            self._refresh()
            optimizer.forget()
        self._validate(ends)

    def _score_round(self) -> None:
        """Score a round by the method's criterion, and keep the best state; two rounds without gain are convergence."""
        rows = self.scored_rows
        part = self.method.score(rows) * len(rows) / self.num_scored if len(rows) else 0.0
        score, best = self.ranks.sum(part), self.plateau.best
        if score < best and self.validation is None:
            self.best = self.state.snapshot()
        self._observe(score)

    def _observe(self, objective: float) -> bool:
        """Record the objective of a round, which may be the last; returns whether it did not improve."""
        stalled = self.plateau.observe(objective)
        self.gain, self.converged = self.plateau.gain, self.plateau.converged
        self.ended = self.converged
        return stalled

    def _validate(self, due: bool) -> None:
        if self.validation is None:
            return
        every = self.validation.every
        if due if every is None else self.state.step % every == 0:
            score = self.ranks.of_first(float(self.validation.score()))
            if score < min((s for _, s in self.scores if math.isfinite(s)), default=math.inf):
                self.best = self.state.snapshot()
            self.scores.append((self.state.step, score))
            self.ended = self.ended or self._out_of_patience()

    def _out_of_patience(self) -> bool:
        """Whether as many validations as the patience have followed the best one after the first step."""
        if self.validation is None or self.validation.patience is None:
            return False
        scores = [s if math.isfinite(s) else math.inf for step, s in self.scores if step]
        return bool(scores) and len(scores) - 1 - scores.index(min(scores)) >= self.validation.patience

    def _solve_period(self) -> int:
        """Steps between solutions: an epoch, but at least 20."""
        return self.solve_every or self.state.steps_per_epoch()

    def _round_steps(self) -> int:
        """Steps of a round: an epoch within limits, or a multiple of the steps between solutions."""
        least, most = _ROUND
        if self.solving:
            return self._solve_period() * math.ceil(least / self._solve_period())
        return min(most, max(least, self.state.steps_per_epoch()))

    def _refresh_if_moved(self) -> bool:
        """Search for neighbors anew if what determines them has moved since the last search, and is left to us."""
        moved = self.refresh_every is None and self._metric_moved()
        if moved:
            self._refresh()
        return moved

    def _refresh(self) -> None:
        self.method.refresh_neighbors()
        self.refreshes += 1
        self.metric_at_refresh = self._metric_now()

    def _solve(self) -> None:
        self.method.solve()
        self.solves += 1
        self.solved_at = self.state.step

    def _metric_now(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.metric_parameters]

    def _metric_moved(self) -> bool:
        """Whether parameters that determine neighbors have moved since the last refresh, other than in units."""
        pairs = zip(self._metric_now(), self.metric_at_refresh, strict=True)
        moved = any(bool(((now - then).abs() > _MOVED).any()) for now, then in pairs)
        return moved and not has_neighbors_of_graph(self.method, _MOVED)

    def _warn(self, fall: float | None) -> None:
        steps = len(self.state.losses)
        what = "the last round" if self.automatic else "an eighth of the steps"
        amount = describe_fall(fall, what)
        cure = f"Leave num_steps={self.num_steps} out, or raise it or lr."
        if self.automatic:
            cure = "Look for parameters that run away, or raise tolerance."
        warn_of(f"the loss to stop falling, got a loss that {amount} after {steps} steps. {cure}")

    def _step_back(self, error: DivergenceError) -> None:
        """Go back to the last checkpoint at half the rates, or raise."""
        if self.checkpoint is None:
            raise error
        if not self.checkpoint.step_back or self.steps_back == _MAX_STEPS_BACK:
            raise DivergenceError(f"{error} Last good checkpoint: {self.checkpoint.path}.") from None
        self.steps_back += 1
        self._load()
        self.state.slow_down(0.5)
        self._save()

    def _save(self) -> None:
        self.store.save(run_content(self))

    def _load(self) -> None:
        load_run(self, self.store.load(lambda: run_content(self)))
