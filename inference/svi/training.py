"""The course of a training run: the optimizer, and when to refresh neighbors, to solve for q(u), and to stop.

Symbols and cost: see :mod:`pyro_nngp.inference.svi.loop`.
"""

import math
import time
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from pyro.infer import ELBO
from torch import Tensor
from tqdm.auto import tqdm

from pyro_nngp._checks import fail
from pyro_nngp.inference.checkpoint import check_schema, load_checkpoint, save_checkpoint
from pyro_nngp.inference.sharded_checkpoint import ShardedCheckpoint
from pyro_nngp.inference.svi.batches import Subsample
from pyro_nngp.inference.svi.convergence import Plateau, in_words, still_falling
from pyro_nngp.inference.svi.defaults import alternates, minibatch, most_rows, neighbor_parameters, suits_lbfgs
from pyro_nngp.inference.svi.family_check import check_family
from pyro_nngp.inference.svi.lbfgs import LBFGS
from pyro_nngp.inference.svi.neighbor_check import check_neighbors
from pyro_nngp.inference.svi.options import Checkpoint, Schedule, Validation
from pyro_nngp.inference.svi.outcome_check import check_leak, check_outcome, check_twins
from pyro_nngp.inference.svi.result import ConvergenceWarning, FitResult
from pyro_nngp.inference.svi.run import DivergenceError, Run
from pyro_nngp.inference.svi.saved_state import divided, joined
from pyro_nngp.linalg import report_nuggets

_PROBE = 2048  # rows whose loss decides on convergence
_ROUND = (50, 200)  # fewest and most steps of Adam per round
_ROUND_LBFGS, _STALLS = 30, 2  # most steps of a round; steps without a gain that end it
_ROUND_JUDGED, _MISSES = 8, 1  # most steps between solutions; rounds without a gain before the last
_MOST_STEPS = {"adam": 20_000, "lbfgs": 500}
_SLOWER, _CUTS = 1 / 3, 3
_AWAY = 0.1  # rise of the objective in a round, in nats per data point, after which parameters are taken back
_MOVED, _CHECK_EVERY = 0.05, 50  # move of the kernel's logarithms that matters, and steps between checks
_MAX_STEPS_BACK = 5
_COURSE = ("refreshes", "solves", "stalls", "round_start", "gain", "objective", "converged")  # saved attributes


class Training:
    """A run and its decisions; arguments are those of :func:`~pyro_nngp.inference.fit`, checked."""

    def __init__(
        self,
        method: Any,
        *,
        num_steps: int | None,
        batch_size: int | None,
        optimizer: str | None,
        lr: float | None,
        schedule: Schedule,
        refresh_every: int | None,
        solve_every: int | None,
        solving: bool,
        elbo: ELBO,
        num_data: int,
        tolerance: float,
        validation: Validation | None,
        checkpoint: Checkpoint | None,
        device: torch.device | str | None,
        seed: int,
    ) -> None:
        self.method, self.solving, self.tolerance = method, solving, tolerance
        self.refresh_every, self.solve_every = refresh_every, solve_every
        self.validation, self.checkpoint, self.automatic = validation, checkpoint, num_steps is None
        for_adam = [lr, schedule.local_lr, schedule.clip_norm] != [None] * 3
        if optimizer is None:
            optimizer = "lbfgs" if num_steps is None and not for_adam and suits_lbfgs(method, solving) else "adam"
        self.optimizer = optimizer
        if optimizer == "lbfgs" and for_adam:
            cure = 'Leave them out, or choose optimizer="adam".'
            fail("fit", "lr, local_lr and clip_norm", "to be None with L-BFGS", f"lr={lr} and {schedule}", cure)
        if schedule.is_own and (num_steps is None or optimizer == "lbfgs"):
            cure = "They are fractions of num_steps: pass it, for Adam."
            fail("fit", "schedule", "without milestones of its own here", schedule, cure)
        if checkpoint is not None and checkpoint.step_back and optimizer == "lbfgs":
            fail("fit", "checkpoint", "without step_back with L-BFGS", "step_back=True", "It shortens steps by itself.")
        if num_steps is None:
            schedule = Schedule((), 1.0, schedule.local_lr, schedule.clip_norm)
        self.milestone = min(schedule.milestones, default=1.0)
        self.num_steps = _MOST_STEPS[optimizer] if num_steps is None else num_steps
        if batch_size is None:
            batch_size = most_rows(method, num_data) if optimizer == "lbfgs" else minibatch(method)
        self.run = Run(
            method, self.num_steps, batch_size, optimizer, lr, schedule, elbo, num_data, solving, device, seed
        )
        self.ranks = self.run.ranks
        self.run.settings |= {"clip_norm": schedule.clip_norm, "refresh_every": refresh_every}
        self.run.settings |= {"solve_every": solve_every, "tolerance": tolerance, "automatic": self.automatic}
        self.judged = optimizer == "lbfgs" and num_steps is None and alternates(method, solving)
        self.plateau, self.gain = Plateau(tolerance, _MISSES if self.judged else _CUTS), math.inf
        self.scores: list[tuple[int, float]] = []
        self.best: dict[str, Any] | None = None
        self.good: dict[str, Tensor] = {}  # parameters at the end of the best round of Adam
        self.objective = math.inf
        judges = torch.randperm(num_data, generator=torch.Generator().manual_seed(seed))[:_PROBE]
        shard = self.ranks.shard
        self.folder = None if checkpoint is None or shard is None else ShardedCheckpoint(checkpoint.path, shard)
        self.num_judges, self.judges = len(judges), self.ranks.own(judges.to(self.run.device))
        self.watched = neighbor_parameters(method)
        self.found_at = self._kernel_now()
        self.refreshes, self.solves, self.solved_at, self.stalls, self.round_start = 0, 0, -1, 0, 0
        self.slower, self.converged, self.ended, self.begin = 0, False, False, time.perf_counter()

    def start(self) -> None:
        """Resume from the checkpoint, if there is one; otherwise solve once."""
        saved = self.checkpoint if self.folder is None else self.folder
        if saved is not None and saved.exists():
            self._load()
            self.ended = self.converged or self._waited_out()
            self.solved_at = self.run.step
            return
        if self.solving:
            self._solve()
        if self.automatic and self.run.quasi_newton is None:
            self.objective = self.run.objective(_PROBE)
            if math.isfinite(self.objective):
                self.plateau.best, self.good = self.objective, self.run.parameters()

    def train(
        self, callback: Callable[[int, float], None] | None, max_seconds: float | None, pressed: list, progress: bool
    ) -> None:
        """All steps, until one of the reasons to stop."""
        run, total = self.run, None if self.automatic else self.num_steps
        limit = math.inf if max_seconds is None else max_seconds
        progress = progress and self.ranks.is_first
        bar = tqdm(total=total, initial=run.step, disable=not progress, desc="fit", unit="step", mininterval=0.5)
        try:
            while run.step < self.num_steps and not self.ended:
                late = time.perf_counter() - self.begin > limit
                if self.ranks.any(bool(pressed) or late):
                    self.ended = not pressed
                    break
                if self.checkpoint is not None and run.step % self.checkpoint.every == 0:
                    self._save()
                try:
                    loss = run.advance()
                except DivergenceError as error:
                    self._step_back(error)
                    bar.n = run.step
                    continue
                bar.update()
                if run.step % 20 == 0 or run.quasi_newton is not None:
                    bar.set_postfix(loss=f"{sum(run.losses[-20:]) / len(run.losses[-20:]):.4f}", refresh=False)
                if run.step % run.steps_per_epoch() == 0:
                    report_nuggets()
                if run.quasi_newton is None:
                    self._after_adam()
                else:
                    self._after_lbfgs(run.quasi_newton, cast(Subsample, run.batches))
                if callback is not None:
                    with run.random.paused():
                        callback(run.step, loss)
        finally:
            bar.close()

    def finish(self) -> None:
        """Write the checkpoint, and leave the method at its best state."""
        report_nuggets()
        if self.checkpoint is not None:
            self._save()
        if self.best is not None:
            self.run.restore(self.best)
            return
        if self.good and not self.objective <= self.plateau.best + self.tolerance:
            self._take_back()
            return
        moved = self.refresh_every is None and self._moved()
        if moved:  # after the checkpoint is written, so that a resumed run starts from the state before
            self._refresh()
        if self.solving and (moved or self.solved_at != self.run.step):
            self._solve()

    def result(self, interrupted: bool) -> FitResult:
        """The result; warns if the run did not converge."""
        run = self.run
        interrupted = interrupted or (self.ended and not self.converged)
        fall = self.gain if self.automatic else still_falling(run.losses, self.milestone)
        converged = self.converged if self.automatic else None if fall is None else fall == 0
        if interrupted and not self.automatic and converged and run.step < self.num_steps and not self._waited_out():
            converged = None  # a loss may be flat before the rates are lowered
        if converged is False and not (interrupted and self._waited_out()) and self.ranks.is_first:
            self._warn(fall)
        rows = run.batch_size or run.num_data
        seconds = time.perf_counter() - self.begin
        losses = torch.tensor(run.losses)
        counts = self.refreshes, self.solves, getattr(getattr(self.method, "graph", None), "num_neighbors", None)
        found = FitResult(losses, self.scores, seconds, converged, interrupted, self.optimizer, rows, *counts)
        if not interrupted:
            check_leak(self.method, stacklevel=3)
            check_neighbors(self.method, stacklevel=3)
            check_twins(self.method, stacklevel=3)
        if not interrupted and self.ranks.is_first:
            check_outcome(self.method, found, stacklevel=3)
            check_family(self.method, found, stacklevel=3)
        return found

    def _after_adam(self) -> None:
        """Refresh, solve and validate; at the end of a round, check convergence."""
        run = self.run
        last = run.step == self.num_steps
        if self.refresh_every is None:
            due = (run.step % _CHECK_EVERY == 0 or last) and self._moved()
        else:
            due = self.refresh_every > 0 and run.step % self.refresh_every == 0 and not last
        if due:
            self._refresh()
        if self.solving and (run.step % self._solve_period() == 0 or last):
            self._solve()
        ends = self.automatic and run.step % self._round_steps() == 0
        if ends:
            self._end_round()
            self.gain, self.converged = self.plateau.gain, self.plateau.converged
            self.ended = self.converged
        self._validate(ends if self.automatic else run.step % 500 == 0)

    def _end_round(self) -> None:
        """Keep the parameters of the best round; slow down after one without gain, go back after one that ran away."""
        self.objective = self.run.objective(_PROBE)
        if self.objective < self.plateau.best:
            self.good = self.run.parameters()
        stalled = self.plateau.observe(self.objective)
        if self.good and not self.objective <= self.plateau.best + _AWAY:
            self._take_back()
        if stalled:
            self.run.slow_down(_SLOWER)

    def _take_back(self) -> None:
        """Return to the parameters of the best round, and to what belongs to them."""
        self.run.put_back(self.good)
        if self.refresh_every != 0 and hasattr(self.method, "refresh_neighbors"):
            self._refresh()
        if self.solving:
            self._solve()
        self.objective = self.plateau.best

    def _after_lbfgs(self, optimizer: LBFGS, rows: Subsample) -> None:
        """At the end of a round refresh and solve, then go on to a larger subsample, or check convergence."""
        run, losses = self.run, self.run.losses
        largest = rows.grown
        enough = self.tolerance / 10 if largest else self.tolerance
        in_round = run.step - self.round_start
        gain = losses[-2] - losses[-1] if in_round > 1 else math.inf
        self.stalls = self.stalls + 1 if gain < enough else 0
        ends = self.stalls == _STALLS or in_round == (_ROUND_JUDGED if self.judged else _ROUND_LBFGS)
        if ends:
            stalled = self.stalls == _STALLS
            self.round_start, self.stalls = run.step, 0
            refreshed = self.refresh_every is None and self._moved()
            if refreshed:
                self._refresh()
            if self.solving:
                self._solve()
            if not largest:
                rows.grow()
            elif self.judged:
                self._judge()
            else:
                self.gain = optimizer.start_loss - losses[-1]
                settled = stalled and not (refreshed or self.solving)
                self.converged = self.ended = settled or self.gain < self.tolerance
            optimizer.forget()
        if self.refresh_every and run.step % self.refresh_every == 0:
            self._refresh()
            optimizer.forget()
        self._validate(ends)

    def _judge(self) -> None:
        """Score a round by the method's criterion, keep the best state, and stop after one round too many."""
        share = self.method.score(self.judges) * len(self.judges) / self.num_judges if len(self.judges) else 0.0
        score, best = self.ranks.sum(share), self.plateau.best
        if score < best and self.validation is None:
            self.best = self.run.snapshot()
        self.plateau.observe(score)
        self.gain, self.converged = self.plateau.gain, self.plateau.converged
        self.ended = self.converged

    def _validate(self, due: bool) -> None:
        if self.validation is None:
            return
        every = self.validation.every
        if due if every is None else self.run.step % every == 0:
            score = self.ranks.of_first(float(self.validation.score()))
            if score < min((s for _, s in self.scores if math.isfinite(s)), default=math.inf):
                self.best = self.run.snapshot()
            self.scores.append((self.run.step, score))
            self.ended = self.ended or self._waited_out()

    def _waited_out(self) -> bool:
        """Whether the patience is used up: that many validations have followed the best one."""
        if self.validation is None or self.validation.patience is None:
            return False
        scores = [s if math.isfinite(s) else math.inf for _, s in self.scores]
        return bool(scores) and len(scores) - 1 - scores.index(min(scores)) >= self.validation.patience

    def _solve_period(self) -> int:
        """Steps between solutions: an epoch, but at least 20."""
        return self.solve_every or self.run.steps_per_epoch()

    def _round_steps(self) -> int:
        """Steps of a round: an epoch within limits, or a multiple of the steps between solutions."""
        least, most = _ROUND
        if self.solving:
            return self._solve_period() * math.ceil(least / self._solve_period())
        return min(most, max(least, self.run.steps_per_epoch()))

    def _refresh(self) -> None:
        self.method.refresh_neighbors()
        self.refreshes += 1
        self.found_at = self._kernel_now()

    def _solve(self) -> None:
        self.method.solve()
        self.solves += 1
        self.solved_at = self.run.step

    def _kernel_now(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.watched]

    def _moved(self) -> bool:
        """Whether a parameter of the kernel has moved since the neighbors were found."""
        pairs = zip(self._kernel_now(), self.found_at, strict=True)
        return any(bool(((now - then).abs() > _MOVED).any()) for now, then in pairs)

    def _warn(self, fall: float | None) -> None:
        steps = len(self.run.losses)
        what = "the last round" if self.automatic else "an eighth of the steps"
        amount = in_words(fall, what)
        cure = "Raise max_seconds." if self.automatic else f"Leave num_steps={self.num_steps} out, or raise it or lr."
        if self.automatic and steps >= self.num_steps:
            cure = "Look for parameters that run away, or raise tolerance."
        text = f"fit: expected the loss to stop falling, got a loss that {amount} after {steps} steps. {cure}"
        warnings.warn(text, ConvergenceWarning, stacklevel=4)

    def _step_back(self, error: DivergenceError) -> None:
        """Go back to the last checkpoint at half the rates, or raise."""
        if self.checkpoint is None:
            raise error
        if not self.checkpoint.step_back or self.slower == _MAX_STEPS_BACK:
            raise DivergenceError(f"{error} Last good checkpoint: {self.checkpoint.path}.") from None
        self.slower += 1
        self._load()
        self.run.slow_down(0.5)
        self._save()

    def _save(self) -> None:
        if self.folder is None:
            save_checkpoint(cast(Checkpoint, self.checkpoint).path, self._state())
        else:
            self.folder.save(*divided(self._state()))

    def _state(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        course = {name: getattr(self, name) for name in _COURSE}
        state = {"run": self.run.state(), "course": course, "plateau": self.plateau.state()}
        return state | {"found_at": self.found_at, "scores": self.scores, "best": self.best, "good": self.good}

    def _load(self) -> None:
        if self.folder is None:
            state = load_checkpoint(cast(Checkpoint, self.checkpoint).path)
        else:
            state = joined(*self.folder.load(divided(self._state())[1]))
        check_schema("fit", state, self._state() | {"run": {}, "scores": [], "best": None, "good": {}})
        self.run.check(state["run"])
        for i, pair in enumerate(state["scores"]):
            check_schema("fit", pair, (0, 0.0), f"checkpoint['scores'][{i}]")
        if state["best"] is not None:
            check_schema("fit", state["best"], self.run.snapshot(), "checkpoint['best']")
        if state["good"]:
            check_schema("fit", state["good"], self.run.parameters(), "checkpoint['good']")
        self.run.load(state["run"])
        for name in _COURSE:
            setattr(self, name, state["course"][name])
        self.plateau.load(state["plateau"])
        self.found_at = [there.to(here) for there, here in zip(state["found_at"], self.found_at, strict=True)]
        self.scores, self.best = [tuple(pair) for pair in state["scores"]], state["best"]
        self.good = state["good"]
