"""The saved state of a training run: checked against the run that is to resume from it, and divided by process."""

from typing import Any

import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.inference.checkpoint import CheckpointError, check_schema, refuse_state
from pyro_nngp.inference.identity import differences

_OF_PROCESS = ("batches", "random", "random_cuda")  # state of one of several processes


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


def divided(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
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


def joined(shared: dict[str, Any], local: dict[str, Any], rows: dict[str, Tensor]) -> dict[str, Any]:
    """The inverse of :func:`divided`."""
    for place, part in rows.items():
        name, _, table = place.partition(".")
        value = shared["run"]["values"] if name == "values" else shared["best"]
        value["rows"][table] = part
    shared["run"] |= local
    return shared
