"""State of a training run: parameters, optimizers, batches, random numbers; all of it can be saved and restored."""

import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from pyro import poutine
from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp._random import RandomStream
from pyro_nngp.inference._validation import validation_off
from pyro_nngp.inference.checkpoint import CheckpointError, check_schema, refuse_state
from pyro_nngp.inference.identity import differences, identity
from pyro_nngp.inference.svi.batches import Minibatches, Subsample
from pyro_nngp.inference.svi.lbfgs import LBFGS
from pyro_nngp.inference.svi.options import Schedule
from pyro_nngp.inference.svi.row_adam import RowAdam, coalesced
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.variational import LocalTables

_FIRST_SUBSAMPLE = 1000
_LOG_RATE = 0.1  # learning rate of positive parameters, which are trained as logarithms
_RATE = 0.01  # of others


class DivergenceError(RuntimeError):
    """The loss or a gradient stopped being finite."""


class Run:
    """One training run of (model, guide); :meth:`advance` makes a step, :meth:`state` and :meth:`load` move it to disk.

    Arguments are those of :func:`pyro_nngp.inference.fit`.
    """

    def __init__(
        self,
        method: Any,
        num_steps: int,
        batch_size: int | None,
        optimizer: str,
        lr: float | None,
        schedule: Schedule,
        elbo: ELBO,
        num_data: int,
        solving: bool,
        device: torch.device | str | None,
        seed: int,
    ) -> None:
        self.model, self.guide = method if isinstance(method, tuple) else (method.model, method.guide)
        self.modules = modules_of(method)
        if device is not None:
            for module in self.modules:
                module.to(device)
        self.batches: Minibatches | Subsample = Minibatches(num_data, batch_size, seed)
        if optimizer == "lbfgs":
            self.batches = Subsample(num_data, batch_size, seed, _FIRST_SUBSAMPLE)
        self.batch_args = getattr(method, "batch_args", lambda idx, generator: () if idx is None else (idx,))
        self.elbo, self.num_data, self.seed, self.step = elbo, num_data, seed, 0
        self.clip_norm = schedule.clip_norm
        self.losses: list[float] = []
        self.num_steps = num_steps
        self.settings: dict[str, Any] = {
            "batch_size": self.batches.size,
            "num_data": num_data,
            "seed": seed,
            "optimizer": optimizer,
            "rates": [lr, schedule.local_lr, schedule.decay, *schedule.milestones],
            "solving": solving,
        }
        self.params = self._find_parameters(seed)
        self.device = next(iter(self.params.values())).device
        self.random = RandomStream(seed, self.cuda_devices())
        self.solved = {id(param) for param in method.solved_parameters()} if solving else set()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.quasi_newton: LBFGS | None = None
        if optimizer == "lbfgs":
            self.quasi_newton = LBFGS(self.free_parameters())
        else:
            self.optimizers = self._optimizers(lr, schedule.local_lr)
        steps = [round(fraction * num_steps) for fraction in schedule.milestones]
        self.schedules = [torch.optim.lr_scheduler.MultiStepLR(o, steps, schedule.decay) for o in self.optimizers]

    def advance(self) -> float:
        """One step on the next batch of rows; returns the loss per data point.

        Threads that train at the same time take turns in evaluating model and guide, which draw random numbers, and
        run the rest of a step side by side.
        """
        value = self._gradient_step() if self.quasi_newton is None else self._quasi_newton_step(self.quasi_newton)
        self.step += 1
        self.losses.append(value)
        return value

    def free_parameters(self) -> list[Tensor]:
        """The parameters that are trained by gradients."""
        return [param for param in self.params.values() if id(param) not in self.solved]

    @torch.no_grad()
    def objective(self, size: int) -> float:
        """Loss per data point on rows that are always the same, with random numbers that are always the same."""
        rows = Subsample(self.num_data, None if self.batches.size is None else size, self.seed)
        args = self.batch_args(rows.next(self.device), rows.generator)
        with RandomStream(self.seed, self.cuda_devices()), validation_off():
            return float(self.elbo.loss(self.model, self.guide, *args)) / self.num_data

    def _gradient_step(self) -> float:
        """One step of Adam."""
        loss = self._evaluate()
        with self.random.paused():
            self._differentiate(loss)
            return self._descend(loss)

    def _quasi_newton_step(self, optimizer: LBFGS) -> float:
        """One step of L-BFGS on the present subsample, at the same random numbers each time."""

        def closure() -> float:
            torch.manual_seed(self.seed)
            try:
                loss = self._evaluate()
            except DivergenceError:
                return math.inf
            with self.random.paused():
                self._differentiate(loss)
            return float(loss.detach())

        try:
            return optimizer.step(closure)
        except ArithmeticError as error:
            bad = [name for name, param in self.params.items() if not param.isfinite().all()]
            raise DivergenceError(f"fit: {error} at step {self.step}; not finite: {bad or 'no parameter'}.") from None

    def _evaluate(self) -> Tensor:
        """The loss per data point on the next rows."""
        args = self.batch_args(self.batches.next(self.device), self.batches.generator)
        for param in self.params.values():
            param.grad = None
        try:
            with validation_off() if self.losses else nullcontext():
                loss = self.elbo.differentiable_loss(self.model, self.guide, *args) / self.num_data
        except (NotPositiveDefiniteError, ValueError) as error:
            bad = [name for name, param in self.params.items() if not param.isfinite().all()]
            if isinstance(error, ValueError) and not bad:
                raise  # an error of the model's own
            why = f"not finite: {bad}" if bad else "parameters are finite"
            raise DivergenceError(f"fit: no loss at step {self.step}; {why}. {error}") from error
        if not self.losses:
            _warn_of_others(loss, self.params)
        return loss

    def _differentiate(self, loss: Tensor) -> None:
        """Gradients of the loss in what is not solved for."""
        loss.backward()
        for param in self.params.values():
            if id(param) in self.solved:
                param.grad = None

    def _descend(self, loss: Tensor) -> float:
        """Move the parameters along their gradients; returns the loss."""
        value = float(loss.detach())
        norms = self._gradient_norms()
        total = torch.stack([loss.new_zeros(()), *norms.values()]).norm()
        if not (torch.isfinite(total) and torch.isfinite(loss)):
            bad = [n for n, p in self.params.items() if not (p.isfinite().all() and norms.get(n, total * 0).isfinite())]
            raise DivergenceError(
                f"fit: loss {value} at step {self.step}; not finite, value or gradient: {bad or 'none'}."
            )
        if self.clip_norm is not None and total > self.clip_norm:
            for param in self.params.values():
                if param.grad is not None:
                    param.grad.mul_(self.clip_norm / total)
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
        """Steps in which all rows pass by, but 20 at least."""
        return max(20, self.num_data // (self.batches.size or self.num_data))

    def snapshot(self) -> dict[str, Any]:
        """Copies of all parameters and of the modules' buffers."""
        return {
            "params": {name: param.detach().clone() for name, param in self.params.items()},
            "modules": [{k: v.clone() for k, v in module.state_dict().items()} for module in self.modules],
        }

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Any]) -> None:
        """Put a snapshot back, in place."""
        for module, state in zip(self.modules, snapshot["modules"], strict=True):
            module.load_state_dict(state)
        for name, value in snapshot["params"].items():
            self.params[name].copy_(value)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
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
        """Continue from a state; one of a shorter run goes on at the rates of the longer schedule.

        Raises:
            CheckpointError: if the state is of a run with other settings or another model.
        """
        longer = self.check(state)
        self.restore(state["values"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
            if longer:
                _set_rates(schedule)
        if self.quasi_newton is not None:
            self.quasi_newton.load_state_dict(state["quasi_newton"])
        self.step, self.losses = state["step"], state["losses"].tolist()
        self.batches.load(state["batches"])
        torch.set_rng_state(state["random"])
        for device, random in zip(self.cuda_devices(), state["random_cuda"], strict=True):
            torch.cuda.set_rng_state(random, device)

    @functools.cached_property
    def kind(self) -> dict[str, Any]:
        """What decides the bits of the run, by name; the number of steps, which may grow, and all else as strings."""
        parts = {"model": self.model, "guide": self.guide, "elbo": self.elbo, "parameters": self.params}
        return {"num_steps": self.num_steps, "run": identity(**parts, **self.settings)}

    def check(self, state: dict[str, Any]) -> bool:
        """Whether a state is of a shorter run; raises ``CheckpointError`` unless this run can go on from it."""
        saved: Any = state.get("kind")
        check_schema("fit", saved, {"num_steps": 1, "run": {}}, "checkpoint['run']['kind']")
        other = differences(saved["run"], self.kind["run"])
        if other or saved["num_steps"] > self.num_steps:
            got = other or f"num_steps = {saved['num_steps']} and not {self.num_steps}"
            fail("fit", "a checkpoint", "of this run", f"one with {got}", "Name another file.", CheckpointError)
        check_schema("fit", state, {**self.state(), "losses": None}, "checkpoint['run']")
        step, losses = state["step"], state["losses"]
        if not isinstance(step, int) or not 0 <= step <= saved["num_steps"]:
            refuse_state("fit", "checkpoint['run']['step']", f"in 0..{saved['num_steps']}", step)
        if not isinstance(losses, Tensor) or losses.shape != (step,):
            refuse_state("fit", "checkpoint['run']['losses']", f"of shape ({step},)", getattr(losses, "shape", losses))
        place, most = "position", self.num_data
        if isinstance(self.batches, Subsample):
            place, most = "stage", len(self.batches.sizes) - 1
        reached = state["batches"][place]
        if not isinstance(reached, int) or not 0 <= reached <= most:
            refuse_state("fit", f"checkpoint['run']['batches'][{place!r}]", f"in 0..{most}", reached)
        for i, (optimizer, saved_optimizer) in enumerate(zip(self.optimizers, state["optimizers"], strict=True)):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            for row, moments in saved_optimizer["state"].items():
                like = params[row] if row in range(len(params)) else None
                at = f"checkpoint['run']['optimizers'][{i}]['state'][{row}]"
                check_schema("fit", moments, {"step": None, "exp_avg": like, "exp_avg_sq": like}, at)
        randoms = {"['random']": state["random"]}
        batches = state["batches"]
        randoms |= {f"['batches'][{key!r}]": batches[key] for key in ("now", "epoch") if key in batches}
        for at, random in randoms.items():
            try:
                torch.Generator().set_state(random)
            except RuntimeError as error:
                refuse_state("fit", f"checkpoint['run']{at}", "to be a state of torch's generator", error)
        return saved["num_steps"] < self.num_steps

    def cuda_devices(self) -> list[int]:
        """Devices whose random state belongs to the run."""
        return sorted({p.device.index for p in self.params.values() if p.device.type == "cuda"})

    @contextmanager
    def sparse_gradients(self) -> Iterator[None]:
        """Let the modules that can do so give sparse gradients, and only meanwhile."""
        switches = self._local_modules()
        for module in switches:
            module.sparse_grad = self.batches.size is not None
        try:
            yield
        finally:
            for module in switches:
                module.sparse_grad = False

    def _find_parameters(self, seed: int) -> dict[str, Tensor]:
        """Every parameter that model and guide touch, by its Pyro name."""
        idx = None if self.batches.size is None else torch.arange(self.batches.size)
        known = next((param for module in self.modules for param in module.parameters()), None)
        if idx is not None and known is not None:  # an AutoGuide has no parameters before its first call
            idx = idx.to(known.device)
        args = self.batch_args(idx, torch.Generator().manual_seed(0))
        cuda = [known.device.index] if known is not None and known.is_cuda else []
        with torch.no_grad(), RandomStream(seed, cuda), poutine.trace(param_only=True) as capture:
            self.elbo.loss(self.model, self.guide, *args)
        sites = {name: site["value"] for name, site in capture.trace.nodes.items() if site["type"] == "param"}
        leaves = {id(value.unconstrained()): (name, value.unconstrained()) for name, value in reversed(sites.items())}
        params = {name: leaf for name, leaf in reversed(leaves.values()) if leaf.requires_grad}  # each under one name
        pairs = {name: (value, value.unconstrained()) for name, value in sites.items()}
        logs = [n for n, (v, free) in pairs.items() if (v is not free and v.equal(free.exp())) or "hyper_guide." in n]
        self.logarithms = {id(sites[name].unconstrained()) for name in logs}
        if not params:
            fail("fit", "method", "to have parameters to train", "none", "Use pyro.param, PyroParam or nn.Parameter.")
        return params

    def _optimizers(self, lr: float | None, local_lr: float | None) -> list[torch.optim.Optimizer]:
        local = {id(p) for m in self._local_modules() for p in m.parameters(recurse=False) if self.batches.size}
        free = self.free_parameters()
        dense, sparse = [p for p in free if id(p) not in local], [p for p in free if id(p) in local]
        made: list[torch.optim.Optimizer] = []
        if dense and lr is not None:
            made.append(torch.optim.Adam(dense, lr=lr))
        elif dense:
            logs = [p for p in dense if id(p) in self.logarithms]
            rest = [p for p in dense if id(p) not in self.logarithms]
            groups = [{"params": logs, "lr": _LOG_RATE}, {"params": rest, "lr": _RATE}]
            made.append(torch.optim.Adam([group for group in groups if group["params"]]))
        if sparse:
            made.append(RowAdam(sparse, lr=local_lr or lr or _RATE))
        return made

    def _local_modules(self) -> list[LocalTables]:
        return [m for module in self.modules for m in module.modules() if isinstance(m, LocalTables)]

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


def _set_rates(schedule: torch.optim.lr_scheduler.MultiStepLR) -> None:
    """Give the optimizer the rates that the schedule has at its present step."""
    passed = sum(count for step, count in schedule.milestones.items() if step <= schedule.last_epoch)
    for group, rate in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
        group["lr"] = rate * schedule.gamma**passed


def modules_of(method: Any) -> list[nn.Module]:
    """The modules that own model and guide: the method itself, or those of a pair."""
    parts = method if isinstance(method, tuple) else (method.model, method.guide)
    owners = [getattr(part, "__self__", part) for part in parts]
    return list({id(owner): owner for owner in owners if isinstance(owner, nn.Module)}.values())


def _warn_of_others(loss: Tensor, params: dict[str, Tensor]) -> None:
    """Warn of parameters of modules that the loss depends on but that the run does not train."""
    known = {id(param) for param in params.values()}
    nodes, seen, shapes = [loss.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [inner for inner, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            shapes.append(tuple(leaf.shape))
    if shapes:
        cure = "Pass the network itself, such as mean=net, or call pyro.module('net', net) in the function."
        warnings.warn(
            "fit: expected all torch parameters to be parameters of model or guide, got others of shapes "
            f"{sorted(shapes)}, which are neither trained nor saved. {cure} Use net.requires_grad_(False) to keep it.",
            stacklevel=7,
        )
