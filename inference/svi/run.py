"""State of a training run: parameters, optimizers, minibatches, random numbers; all of it can be saved and restored."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp._random import RandomStream
from pyro_nngp.inference.checkpoint import CheckpointError, check_schema, refuse_state
from pyro_nngp.inference.identity import differences, identity
from pyro_nngp.inference.svi.row_adam import RowAdam, coalesced
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.variational import LocalTables


class DivergenceError(RuntimeError):
    """The loss or a gradient stopped being finite."""


class Minibatches:
    """Rows of the data, without replacement within an epoch; a last batch that would be smaller is left out.

    Args:
        num_data: number of rows.
        size: rows per batch; None, or as many as there are, gives None for "all rows".
        seed: of the order.
    """

    def __init__(self, num_data: int, size: int | None, seed: int) -> None:
        self.num_data = num_data
        self.size = None if size is None or size >= num_data else size
        self.generator = torch.Generator().manual_seed(seed)
        self._epoch, self._position, self._order = self.generator.get_state(), num_data, torch.empty(0)

    def next(self, device: torch.device) -> Tensor | None:
        """The next batch of rows."""
        if self.size is None:
            return None
        if self._position + self.size > self.num_data:
            self._epoch, self._position = self.generator.get_state(), 0
            self._order = torch.randperm(self.num_data, generator=self.generator)
        batch = self._order[self._position : self._position + self.size]
        self._position += self.size
        return batch.to(device)

    def state(self) -> dict[str, Any]:
        """The random states now and at the start of the epoch, and how far the epoch is."""
        return {"now": self.generator.get_state(), "epoch": self._epoch, "position": self._position}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._epoch, self._position = state["epoch"], state["position"]
        self.generator.set_state(self._epoch)
        self._order = torch.randperm(self.num_data, generator=self.generator)
        self.generator.set_state(state["now"])


class Run:
    """One training run of (model, guide); :meth:`advance` makes a step, :meth:`state` and :meth:`load` move it to disk.

    Arguments are those of :func:`pyro_nngp.inference.fit`.
    """

    def __init__(
        self,
        method: Any,
        num_steps: int,
        batch_size: int | None,
        lr: float,
        local_lr: float,
        milestones: tuple[float, ...],
        decay: float,
        elbo: ELBO,
        num_data: int | None,
        solving: bool,
        device: torch.device | str | None,
        seed: int,
    ) -> None:
        self.model, self.guide = method if isinstance(method, tuple) else (method.model, method.guide)
        owners = [getattr(part, "__self__", part) for part in (self.model, self.guide)]
        self.modules = list({id(owner): owner for owner in owners if isinstance(owner, nn.Module)}.values())
        if device is not None:
            for module in self.modules:
                module.to(device)
        num_data = getattr(method, "num_data", None) if num_data is None else num_data
        if not isinstance(num_data, int) or num_data < 1:
            fail("fit", "num_data", "to be a positive int", num_data, "Pass num_data= with a (model, guide) pair.")
        self.batches = Minibatches(num_data, batch_size, seed)
        self.batch_args = getattr(method, "batch_args", lambda idx, generator: () if idx is None else (idx,))
        self.elbo, self.num_data, self.step = elbo, num_data, 0
        self.losses: list[float] = []
        self.num_steps = num_steps
        self.settings: dict[str, Any] = {
            "batch_size": self.batches.size,
            "num_data": num_data,
            "seed": seed,
            "rates": [lr, local_lr, decay, *milestones],
            "solving": solving,
        }
        self.params = self._find_parameters(seed)
        self.device = next(iter(self.params.values())).device
        self.random = RandomStream(seed, self.cuda_devices())
        self.solved = {id(param) for param in method.solved_parameters()} if solving else set()
        self.optimizers = self._optimizers(lr, local_lr)
        steps = [round(fraction * num_steps) for fraction in milestones]
        self.schedules = [torch.optim.lr_scheduler.MultiStepLR(o, steps, decay) for o in self.optimizers]

    def advance(self, clip_norm: float | None) -> float:
        """One gradient step on the next minibatch; returns the loss per data point.

        Threads that train at the same time take turns in evaluating model and guide, which draw random numbers, and
        run the rest of a step side by side.
        """
        args = self.batch_args(self.batches.next(self.device), self.batches.generator)
        for param in self.params.values():
            param.grad = None
        try:
            loss = self.elbo.differentiable_loss(self.model, self.guide, *args) / self.num_data
        except (NotPositiveDefiniteError, ValueError) as error:
            bad = [name for name, param in self.params.items() if not param.isfinite().all()]
            if isinstance(error, ValueError) and not bad:
                raise  # an error of the model's own
            why = f"not finite: {bad}" if bad else "parameters are finite"
            raise DivergenceError(f"fit: no loss at step {self.step}; {why}. {error}") from error
        if not self.losses:
            _warn_of_others(loss, self.params)
        with self.random.paused():
            return self._descend(loss, clip_norm)

    def _descend(self, loss: Tensor, clip_norm: float | None) -> float:
        loss.backward()
        for param in self.params.values():
            if id(param) in self.solved:
                param.grad = None
        value = float(loss.detach())
        norms = self._gradient_norms()
        total = torch.stack([loss.new_zeros(()), *norms.values()]).norm()
        if not (torch.isfinite(total) and torch.isfinite(loss)):
            bad = [n for n, p in self.params.items() if not (p.isfinite().all() and norms.get(n, total * 0).isfinite())]
            raise DivergenceError(
                f"fit: loss {value} at step {self.step}; not finite, value or gradient: {bad or 'none'}."
            )
        if clip_norm is not None and total > clip_norm:
            for param in self.params.values():
                if param.grad is not None:
                    param.grad.mul_(clip_norm / total)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        self.step += 1
        self.losses.append(value)
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
        saved = state.get("kind")
        check_schema("fit", saved, {"num_steps": 1, "run": {}}, "checkpoint['run']['kind']")
        other = differences(saved["run"], self.kind["run"])
        if other or saved["num_steps"] > self.num_steps:
            got = other or f"num_steps = {saved['num_steps']} and not {self.num_steps}"
            fail("fit", "a checkpoint", "of this run", f"one with {got}", "Name another file.", CheckpointError)
        check_schema("fit", state, {**self.state(), "losses": None}, "checkpoint['run']")
        step, losses, position = state["step"], state["losses"], state["batches"]["position"]
        if not isinstance(step, int) or not 0 <= step <= saved["num_steps"]:
            refuse_state("fit", "checkpoint['run']['step']", f"in 0..{saved['num_steps']}", step)
        if not isinstance(losses, Tensor) or losses.shape != (step,):
            refuse_state("fit", "checkpoint['run']['losses']", f"of shape ({step},)", getattr(losses, "shape", losses))
        if not isinstance(position, int) or not 0 <= position <= self.num_data:
            refuse_state("fit", "checkpoint['run']['batches']['position']", f"in 0..{self.num_data}", position)
        for i, (optimizer, saved_optimizer) in enumerate(zip(self.optimizers, state["optimizers"], strict=True)):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            for row, moments in saved_optimizer["state"].items():
                like = params[row] if row in range(len(params)) else None
                at = f"checkpoint['run']['optimizers'][{i}]['state'][{row}]"
                check_schema("fit", moments, {"step": None, "exp_avg": like, "exp_avg_sq": like}, at)
        randoms = {"['random']": state["random"]}
        randoms |= {f"['batches'][{key!r}]": state["batches"][key] for key in ("now", "epoch")}
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
        if not params:
            fail("fit", "method", "to have parameters to train", "none", "Use pyro.param, PyroParam or nn.Parameter.")
        return params

    def _optimizers(self, lr: float, local_lr: float) -> list[torch.optim.Optimizer]:
        local = {id(p) for m in self._local_modules() for p in m.parameters(recurse=False) if self.batches.size}
        free = [p for p in self.params.values() if id(p) not in self.solved]
        dense, sparse = [p for p in free if id(p) not in local], [p for p in free if id(p) in local]
        made: list[torch.optim.Optimizer] = []
        if dense:
            made.append(torch.optim.Adam(dense, lr=lr))
        if sparse:
            made.append(RowAdam(sparse, lr=local_lr))
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


def _warn_of_others(loss: Tensor, params: dict[str, Tensor]) -> None:
    """Warn of tensors that ask for a gradient of the loss but are not among the parameters of the run."""
    known = {id(param) for param in params.values()}
    nodes, seen, shapes = [loss.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [inner for inner, _ in node.next_functions]
        if hasattr(node, "variable") and id(node.variable) not in known:
            shapes.append(tuple(node.variable.shape))
    if shapes:
        cure = "Pass the network itself, such as mean=net, or call pyro.module('net', net) in the function."
        warnings.warn(
            "fit: expected all tensors with requires_grad to be parameters of model or guide, got others of shapes "
            f"{sorted(shapes)}, which are neither trained nor saved. {cure} Use net.requires_grad_(False) to keep it.",
            stacklevel=4,
        )
