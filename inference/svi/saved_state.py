"""Checkpoints of a training run: their content, collected, checked and loaded, and their file, or folder.

On several processes content is divided into what all share, what belongs to one, and rows of parameters, so that
another number of processes can resume the run.
"""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.distributed import ShardedData
from pyro_nngp.inference.checkpoint import (
    CheckpointError,
    check_schema,
    load_checkpoint,
    refuse_state,
    save_checkpoint,
)
from pyro_nngp.inference.identity import differences
from pyro_nngp.inference.sharded_checkpoint import ShardedCheckpoint
from pyro_nngp.inference.svi.convergence import Rounds

_COURSE = ("refreshes", "solves", "stalls", "round_start", "gain", "objective", "converged")  # attributes of a trainer
_OF_PROCESS = ("batches", "random", "random_cuda")  # state of one of several processes


def run_content(trainer: Any) -> dict[str, Any]:
    """The content of a checkpoint: everything that the rest of the run of a trainer depends on."""
    course = {name: getattr(trainer, name) for name in _COURSE}
    state = {"run": trainer.state.state(), "course": course, "plateau": trainer.plateau.state()}
    kept = {"found_at": trainer.metric_at_refresh, "good": trainer.best_parameters or trainer.rounds.state()}
    return state | kept | {"scores": trainer.scores, "best": trainer.best}


def load_run(trainer: Any, content: dict[str, Any]) -> None:
    """Continue the run of a trainer from the content of a checkpoint.

    Raises:
        CheckpointError: if the content is of another run, or no such content.
    """
    _check_content(trainer, content)
    trainer.state.load(content["run"])
    for name in _COURSE:
        setattr(trainer, name, content["course"][name])
    trainer.plateau.load(content["plateau"])
    pairs = zip(content["found_at"], trainer.metric_at_refresh, strict=True)
    trainer.metric_at_refresh = [there.to(here) for there, here in pairs]
    trainer.scores, trainer.best = [tuple(pair) for pair in content["scores"]], content["best"]
    if trainer.state.quasi_newton is None:
        trainer.best_parameters = content["good"]
    else:
        trainer.rounds.load(content["good"])


def check_run(run: Any, state: dict[str, Any]) -> bool:
    """Raise ``CheckpointError`` unless a run can resume from a state; returns whether the saved run was shorter."""
    saved: Any = state.get("kind")
    check_schema("fit", saved, {"num_steps": 1, "run": {}}, "checkpoint['run']['kind']")
    other = differences(saved["run"], run.kind["run"])
    if other or saved["num_steps"] > run.num_steps:
        got = other or f"num_steps = {saved['num_steps']} and not {run.num_steps}"
        fail("fit", "a checkpoint", "of this run", f"one with {got}", "Name another file.", CheckpointError)
    check_schema("fit", state, {**run.state(), "losses": None}, "checkpoint['run']")
    step, losses = state["step"], state["losses"]
    if not isinstance(step, int) or not 0 <= step <= saved["num_steps"]:
        refuse_state("fit", "checkpoint['run']['step']", f"in 0..{saved['num_steps']}", step)
    if not isinstance(losses, Tensor) or losses.shape != (step,):
        refuse_state("fit", "checkpoint['run']['losses']", f"of shape ({step},)", getattr(losses, "shape", losses))
    place, most = "position", run.num_data
    if "stage" in run.batches.state():
        place, most = "stage", len(run.batches.sizes) - 1
    reached = state["batches"][place]
    if not isinstance(reached, int) or not 0 <= reached <= most:
        refuse_state("fit", f"checkpoint['run']['batches'][{place!r}]", f"in 0..{most}", reached)
    for i, (optimizer, saved_optimizer) in enumerate(zip(run.optimizers, state["optimizers"], strict=True)):
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
    return saved["num_steps"] < run.num_steps


class RunStore:
    """Checkpoints of a run: a file, or of several processes a folder, with which another number of them may go on."""

    def __init__(self, path: str | PathLike[str], shard: ShardedData | None = None) -> None:
        self.path, self.folder = Path(path), None if shard is None else ShardedCheckpoint(path, shard)

    def exists(self) -> bool:
        """Whether there is a run to resume."""
        return self.path.exists() if self.folder is None else self.folder.exists()

    def save(self, content: dict[str, Any]) -> None:
        """Write the content of a checkpoint."""
        if self.folder is None:
            save_checkpoint(self.path, content)
        else:
            self.folder.save(*_divided(content))

    def load(self, like: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Read the content of the checkpoint; of another number of processes, with the local state of `like`."""
        if self.folder is None:
            return load_checkpoint(self.path)
        return _joined(*self.folder.load(_divided(like())[1]))


def _check_content(trainer: Any, content: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` unless a run can resume from the content of a checkpoint."""
    like = run_content(trainer) | {"run": {}, "scores": [], "best": None, "good": {}}
    check_schema("fit", content, like)
    check_run(trainer.state, content["run"])
    for i, pair in enumerate(content["scores"]):
        check_schema("fit", pair, (0, 0.0), f"checkpoint['scores'][{i}]")
    if content["best"] is not None:
        check_schema("fit", content["best"], trainer.state.snapshot(), "checkpoint['best']")
    if content["good"]:
        optimizer = trainer.state.quasi_newton
        like = trainer.state.parameters() if optimizer is None else Rounds.first(optimizer.place)
        check_schema("fit", content["good"], like, "checkpoint['good']")


def _divided(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """The parts of a state on one of several processes: shared, of this process, and rows of parameters."""
    run, rows = dict(state["run"]), dict[str, Tensor]()
    values = {"values": run["values"], "best": state["best"]}
    for name, value in values.items():
        if value is not None:
            rows |= {f"{name}.{table}": part for table, part in value["rows"].items()}
            values[name] = value | {"rows": {}}
    run["values"] = values["values"]
    local = {name: run.pop(name) for name in _OF_PROCESS}
    if "stage" in local["batches"]:  # of a subsample, the same on all processes
        run["batches"] = local.pop("batches")
    return state | {"run": run, "best": values["best"]}, local, rows


def _joined(shared: dict[str, Any], local: dict[str, Any], rows: dict[str, Tensor]) -> dict[str, Any]:
    """The inverse of :func:`_divided`."""
    for place, part in rows.items():
        name, _, table = place.partition(".")
        value = shared["run"]["values"] if name == "values" else shared["best"]
        value["rows"][table] = part
    shared["run"] |= local
    return shared
