"""The state of a training run: parameters, optimizers, batches, random numbers; it can be saved and restored."""

import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._random import RandomStream
from pyro_nngp.inference._validation import validation_off
from pyro_nngp.inference.identity import identity
from pyro_nngp.inference.protocols import Batched, Profiled, Program, Solvable, Trainable, shard_of, total_rows
from pyro_nngp.inference.svi.lbfgs import LBFGS
from pyro_nngp.inference.svi.options import Recipe
from pyro_nngp.inference.svi.parameters import (
    find_parameters,
    local_modules,
    make_optimizers,
    modules_of,
    refuse_others,
    set_rates,
)
from pyro_nngp.inference.svi.ranks import ranks_of
from pyro_nngp.inference.svi.replay import Replay
from pyro_nngp.inference.svi.row_adam import coalesced
from pyro_nngp.inference.svi.saved_state import check_run
from pyro_nngp.linalg import NotPositiveDefiniteError, report_nuggets

_FIRST_SUBSAMPLE = 1000  # rows


class DivergenceError(RuntimeError):
    """The loss or a gradient stopped being finite."""


class TrainState:
    """All that a step of training needs; :meth:`advance` makes one, :meth:`state` and :meth:`load` save and restore it.

    Args:
        method: the method.
        recipe: all choices of the run; runs must agree in them to continue each other or to run side by side.
        num_data: number of rows, on all processes.
        keeps_factor: whether evaluations may depend on earlier ones, which a resumed run does not have.

    Raises:
        ProcessError: unless all processes have the same settings and starting values.
    """

    def __init__(
        self,
        method: Trainable,
        recipe: Recipe,
        num_data: int,
        keeps_factor: bool,
    ) -> None:
        num_steps, schedule, seed = cast(int, recipe.num_steps), recipe.schedule, recipe.seed
        self.method: Any = method
        self.model, self.guide = method.model, method.guide
        self.modules = modules_of(method)
        if recipe.device is not None:
            for module in self.modules:
                module.to(recipe.device)
        self.ranks = ranks_of(method)
        self.profile: Any = cast(Profiled, method).profile if recipe.profiling else None
        self.keeps_factor = keeps_factor
        first = None if recipe.profiling else _FIRST_SUBSAMPLE
        self.batches: Any = self.ranks.batches(recipe.optimizer, recipe.batch_size, seed, num_data, first)
        self.batch_args = method.batch_args if isinstance(method, Batched) else _row_numbers
        self.elbo, self.num_data, self.seed, self.step = recipe.elbo, num_data, self.ranks.seed(seed), 0
        self.clip_norm = schedule.clip_norm
        self.losses: list[float] = []
        self.num_steps = num_steps
        self.settings: dict[str, Any] = {
            "batch_size": self.batch_size,
            "num_data": num_data,
            "seed": seed,
            "optimizer": recipe.optimizer,
            "rates": [recipe.lr, schedule.local_lr, schedule.decay, *schedule.milestones],
            "solving": recipe.solving,
            "clip_norm": schedule.clip_norm,
            "refresh_every": recipe.refresh_every,
            "solve_every": recipe.solve_every,
            "tolerance": recipe.tolerance,
            "automatic": recipe.automatic,
        }
        self.params, logarithms = find_parameters(self.modules, self._evaluate_once, seed)
        self.device = next(iter(self.params.values())).device
        self.random = RandomStream(self.seed, self.cuda_devices())
        self.solved = {id(param) for param in cast(Solvable, method).solved_parameters()} if recipe.solving else set()
        self.ranks.check_shared(self.free_parameters())
        self.sparse: set[int] = set()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.quasi_newton: LBFGS | None = None
        if recipe.optimizer == "lbfgs":
            self.quasi_newton = LBFGS(self.free_parameters())
        else:
            tables = local_modules(self.modules) if self.batches.size else []
            self.sparse = {id(param) for table in tables for param in table.parameters(recurse=False)}
            rates = recipe.lr, schedule.local_lr
            self.optimizers = make_optimizers(self.free_parameters(), self.sparse, logarithms, *rates)
        self.replay = self._make_replay() if recipe.replay and recipe.optimizer == "adam" else None
        self.replayed_from: int | None = None
        steps = [round(fraction * num_steps) for fraction in schedule.milestones]
        self.schedules = [torch.optim.lr_scheduler.MultiStepLR(o, steps, schedule.decay) for o in self.optimizers]
        self.ranks.check_same(self._descriptions)

    def advance(self) -> float:
        """One step on the next batch of rows; returns the loss per data point.

        Threads that train at the same time take turns in evaluating model and guide, which draw random numbers, and
        run the rest of a step side by side.
        """
        if total_rows(self.method) != self.num_data:
            expectation, cure = f"to keep its {self.num_data} rows while it is trained", "Call fit again after extend."
            fail("fit", "method", expectation, self.method.num_data, cure, RuntimeError)
        value = self._gradient_step() if self.quasi_newton is None else self._quasi_newton_step(self.quasi_newton)
        self.step += 1
        self.losses.append(value)
        return value

    @property
    def batch_size(self) -> int | None:
        """Rows per step, on all processes; None is all rows."""
        return getattr(self.batches, "size_of_all", self.batches.size)

    def free_parameters(self) -> list[Tensor]:
        """Parameters that are trained by gradients."""
        return [param for param in self.params.values() if id(param) not in self.solved]

    @torch.no_grad()
    def objective(self, size: int) -> float:
        """Loss per data point on fixed rows, with fixed random draws."""
        size_used = None if self.batches.size is None else size
        rows = self.ranks.batches("lbfgs", size_used, self.settings["seed"], self.num_data, None)
        args = self.batch_args(rows.next(self.device), rows.generator)
        with RandomStream(self.seed, self.cuda_devices()), validation_off():
            loss = float(self.elbo.loss(self.model, self.guide, *args)) * rows.weight / self.num_data
        return self.ranks.sum(loss)

    def _evaluate_once(self, device: torch.device | None) -> None:
        """Evaluate the loss on the first rows, so that model and guide create their parameters."""
        count = self.batches.size if self.profile is None else min(_FIRST_SUBSAMPLE, self.num_data)
        args = self.batch_args(self.ranks.first_rows(count, device), torch.Generator().manual_seed(0))
        self.elbo.loss(self.model, self.guide, *args)

    def _gradient_step(self) -> float:
        """One step of Adam."""
        for param in self.params.values():
            param.grad = None
        rows = self.batches.next(self.device)
        loss = self.replay(rows) if self.replay is not None and self.losses else None
        if loss is not None:
            self.replayed_from = self.replayed_from or self.step + 1
            with self.random.paused():
                return self._descend(loss)
        loss = self._evaluate(rows)
        with self.random.paused():
            return self._descend(self._differentiate(loss))

    def _quasi_newton_step(self, optimizer: LBFGS) -> float:
        """One step of L-BFGS on the present subsample, with fixed random draws."""

        def closure() -> float:
            self.random.restart()
            try:
                with self._at_optimum():
                    loss = self._evaluate(self.batches.next(self.device))
            except (DivergenceError, NotPositiveDefiniteError):
                return math.inf
            with self.random.paused():
                return float(self._differentiate(loss).detach())

        try:
            return optimizer.step(closure)
        except ArithmeticError as error:
            bad = [name for name, param in self.params.items() if not param.isfinite().all()]
            raise DivergenceError(f"fit: {error} at step {self.step}; not finite: {bad or 'no parameter'}.") from None

    def _at_optimum(self) -> AbstractContextManager[None]:
        """A context for an evaluation; where q is profiled, it is at its optimum."""
        return nullcontext() if self.profile is None else self.profile.optimum(keep=self.keeps_factor)

    def _loss(self, rows: Tensor | None) -> Tensor:
        """The loss per data point on some rows."""
        args = self.batch_args(rows, self.batches.generator)
        loss = self.elbo.differentiable_loss(self.model, self.guide, *args) / self.num_data
        return loss if self.batches.weight == 1 else loss * self.batches.weight

    def _make_replay(self) -> Replay | None:
        """The recorder of the loss; None except on minibatches of a method, on a CPU and one process."""
        if isinstance(self.method, Program) or shard_of(self.method) is not None:
            return None
        if self.device.type != "cpu" or self.batches.size is None:
            return None
        free, generator = self.free_parameters(), self.batches.generator
        return Replay(self._loss, self.elbo, self.modules, free, self.sparse, generator)

    def _evaluate(self, rows: Tensor | None) -> Tensor:
        """The loss per data point on some rows.

        Raises:
            DivergenceError: if a covariance matrix is indefinite, or a parameter not finite.
        """
        for param in self.params.values():
            param.grad = None
        try:
            with validation_off() if self.losses else nullcontext():
                loss = self._loss(rows)
        except (NotPositiveDefiniteError, ValueError) as error:
            bad = [name for name, param in self.params.items() if not param.isfinite().all()]
            if isinstance(error, ValueError) and not bad:
                raise  # an error of the model
            why = f"not finite: {bad}" if bad else "parameters are finite"
            failed = DivergenceError(f"fit: no loss at step {self.step}; {why}. {error}")
            return self.ranks.without_loss(failed, error, next(iter(self.params.values())))
        if not self.losses and loss.requires_grad:
            refuse_others(loss, self.params)
        return loss

    def _differentiate(self, loss: Tensor) -> Tensor:
        """Set gradients of the parameters that are not solved for; returns the loss. Both are sums over processes."""
        if loss.requires_grad:
            loss.backward()
        for param in self.params.values():
            if id(param) in self.solved:
                param.grad = None
        return self.ranks.sum_gradients(loss, self.free_parameters(), self.sparse)

    def _descend(self, loss: Tensor) -> float:
        """Move the parameters along their gradients; returns the loss."""
        norms = self._gradient_norms()
        total = torch.stack([loss.new_zeros(()), *norms.values()]).norm()
        value, size = torch.stack([loss.detach(), total]).tolist()  # a step waits for a GPU here alone
        if not (math.isfinite(value) and math.isfinite(size)):
            bad = [n for n, p in self.params.items() if not (p.isfinite().all() and norms.get(n, total * 0).isfinite())]
            raise DivergenceError(
                f"fit: loss {value} at step {self.step}; not finite, value or gradient: {bad or 'none'}."
            ) from _indefinite_covariances()
        if self.clip_norm is not None and size > self.clip_norm:
            for param in self.params.values():
                if param.grad is not None:
                    param.grad.mul_(self.clip_norm / size)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        return value

    def slow_down(self, factor: float) -> None:
        """Multiply all learning rates, present and future."""
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]
            for group in optimizer.param_groups:
                group["lr"] *= factor

    def steps_per_epoch(self) -> int:
        """Steps per pass over all rows, but at least 20."""
        return max(20, self.num_data // (self.batch_size or self.num_data))

    def parameters(self) -> dict[str, Tensor]:
        """Copies of all parameters; on several processes without solved ones, which are rows of one process there."""
        shared = self.ranks.shared(self.params, self.solved)
        return {name: param.detach().clone() for name, param in shared.items()}

    @torch.no_grad()
    def put_back(self, values: dict[str, Tensor]) -> None:
        """Restore copies of all parameters, in place, and clear the moments of the optimizers."""
        for name, value in values.items():
            self.params[name].copy_(value)
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def snapshot(self) -> dict[str, Any]:
        """Copies of all parameters and of the modules' buffers."""
        return self.ranks.snapshot(self.params, self.modules)

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore a snapshot, in place."""
        self.ranks.restore(snapshot, self.params, self.modules)

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint: everything that the next step depends on."""
        return {
            "kind": self.kind,
            "values": self.snapshot(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "quasi_newton": None if self.quasi_newton is None else self.quasi_newton.state_dict(),
            "schedules": [{k: v for k, v in s.state_dict().items() if k != "milestones"} for s in self.schedules],
            "step": self.step,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "batches": self.batches.state(),
            "random": torch.get_rng_state(),
            "random_cuda": [torch.cuda.get_rng_state(d) for d in self.cuda_devices()],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state; after a shorter run, at the rates of the longer schedule.

        Raises:
            CheckpointError: if the state is of a run with other settings or another model.
        """
        longer = check_run(self, state)
        self.restore(state["values"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
            if longer:
                set_rates(schedule)
        if self.quasi_newton is not None:
            self.quasi_newton.load_state_dict(state["quasi_newton"])
        self.step, self.losses = state["step"], state["losses"].tolist()
        self.batches.load(state["batches"])
        torch.set_rng_state(state["random"])
        for device, random in zip(self.cuda_devices(), state["random_cuda"], strict=True):
            torch.cuda.set_rng_state(random, device)

    @functools.cached_property
    def kind(self) -> dict[str, Any]:
        """The identity of the run: its number of steps, which may grow, and descriptions of everything else by name."""
        parts = {"model": self.model, "guide": self.guide, "elbo": self.elbo, "parameters": self.params}
        return {"num_steps": self.num_steps, "run": self.ranks.described(identity(**parts, **self.settings))}

    def cuda_devices(self) -> list[int]:
        """Devices whose random state belongs to the run."""
        return sorted({p.device.index for p in self.params.values() if p.device.type == "cuda"})

    def _descriptions(self) -> dict[str, str]:
        """Settings and starting values of one of several processes, by name."""
        start = identity(start=self.snapshot()["shared"])
        return self.kind["run"] | start | {"num_steps": str(self.num_steps)}

    @contextmanager
    def sparse_gradients(self) -> Iterator[None]:
        """Switch on sparse gradients in the modules that support them, within this block."""
        switches = local_modules(self.modules)
        for module in switches:
            module.sparse_grad = self.batches.size is not None
        try:
            yield
        finally:
            for module in switches:
                module.sparse_grad = False

    def _gradient_norms(self) -> dict[str, Tensor]:
        norms = {}
        for name, param in self.params.items():
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                param.grad = coalesced(param.grad)
                norms[name] = param.grad.values().norm()
            else:
                norms[name] = param.grad.norm()
        return norms


def _row_numbers(idx: Tensor | None, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Arguments of model and guide that take row numbers alone."""
    return () if idx is None else (idx,)


def _indefinite_covariances() -> NotPositiveDefiniteError | None:
    """The error of a conditional on a GPU that has given NaN, if there is one."""
    try:
        report_nuggets()
    except NotPositiveDefiniteError as error:
        return error
    return None
