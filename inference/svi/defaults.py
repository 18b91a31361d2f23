"""Defaults of ``fit`` that depend on the method: the optimizer, its steps, and the rows of a batch."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp._random import seeded
from pyro_nngp.inference.elbo import IntegratedELBO
from pyro_nngp.inference.protocols import (
    Alternating,
    Batched,
    Checked,
    Profiled,
    Program,
    Refreshable,
    Smooth,
    Solvable,
    Trainable,
    graph_of,
)
from pyro_nngp.inference.svi.cubature import CubatureELBO, coefficient_nodes
from pyro_nngp.inference.svi.options import Checkpoint, Recipe, Schedule
from pyro_nngp.inference.svi.parameters import modules_of
from pyro_nngp.kernels import neighbor_metric

_METRIC_PARTS = ("kernel", "hyper_guide")
_BATCH, _LEAST_BATCH = 1024, 128
_MOST_STEPS = {"adam": 20_000, "lbfgs": 500}
_FEW = 1000  # most parameters for quasi-Newton steps
_SUBSAMPLE, _SUBSAMPLE_MEMORY = 20_000, 2**26  # rows of the largest subsample; its size times K^2
_FIRST_SUBSAMPLE = 1000
_NEIGHBORS = 32  # assumed of a method without a graph
_MOST_NODES = 65  # of coefficients that are integrated over exactly, one more than coefficients
_TRIED = 32  # rows, to check whether the guide has sites


def completed(recipe: Recipe, method: Trainable, num_data: int, checkpoint: Checkpoint | None) -> Recipe:
    """The recipe of a run with all choices made that the caller left open.

    Raises:
        ValueError: for settings that the optimizer does not take.
    """
    schedule, elbo, solving, automatic = recipe.schedule, recipe.elbo, recipe.solving, recipe.automatic
    for_adam = [recipe.lr, schedule.local_lr, schedule.clip_norm] != [None] * 3
    is_default = recipe.num_steps is recipe.batch_size is recipe.solve_every is None and type(elbo) is IntegratedELBO
    profiling = is_default and recipe.optimizer != "adam" and not for_adam and profiles(method, solving)
    optimizer = recipe.optimizer
    if optimizer is None:
        suits = profiling or (automatic and not for_adam and suits_lbfgs(method, solving, elbo))
        optimizer = "lbfgs" if suits else "adam"
    if optimizer == "lbfgs" and integrates_coefficients(method, solving, elbo):
        elbo = CubatureELBO(method)
    if optimizer == "lbfgs" and for_adam:
        cure = 'Leave them out, or choose optimizer="adam".'
        fail("fit", "lr, local_lr and clip_norm", "to be None with L-BFGS", f"lr={recipe.lr} and {schedule}", cure)
    if schedule.changes_milestones and (automatic or optimizer == "lbfgs"):
        cure = "They are fractions of num_steps: pass it, for Adam."
        fail("fit", "schedule", "without milestones of its own here", schedule, cure)
    if checkpoint is not None and checkpoint.step_back and optimizer == "lbfgs":
        fail("fit", "checkpoint", "without step_back with L-BFGS", "step_back=True", "It shortens steps by itself.")
    batch_size = recipe.batch_size
    if profiling:
        batch_size = num_data
    elif batch_size is None:
        batch_size = most_rows(method, num_data) if optimizer == "lbfgs" else minibatch(method)
    return dataclasses.replace(
        recipe,
        num_steps=_MOST_STEPS[optimizer] if automatic else recipe.num_steps,
        batch_size=batch_size,
        optimizer=optimizer,
        schedule=Schedule((), 1.0, schedule.local_lr, schedule.clip_norm) if automatic else schedule,
        elbo=elbo,
        profiling=profiling,
    )


def most_rows(method: Trainable, num_data: int) -> int:
    """Rows of the largest subsample."""
    graph = graph_of(method)
    k = _NEIGHBORS if graph is None else graph.num_neighbors
    return min(num_data, _SUBSAMPLE, max(_FIRST_SUBSAMPLE, _SUBSAMPLE_MEMORY // k**2))


def minibatch(method: Trainable) -> int:
    """Rows of a minibatch: fewer if each has several latent functions."""
    count = method.num_latents if isinstance(method, Checked) else None
    return max(_LEAST_BATCH, _BATCH // (count or 1))


def neighbor_parameters(method: Trainable) -> list[nn.Parameter]:
    """Parameters that determine neighbors: kernel, guide of its priors, inducing points."""
    if not (isinstance(method, Refreshable) and isinstance(method, nn.Module)):
        return []
    params = [param for name, part in method.named_children() if name in _METRIC_PARTS for param in part.parameters()]
    return params + [param for name, param in method.named_parameters(recurse=False) if name.split("_")[0] == "z"]


@torch.no_grad()
def has_neighbors_of_graph(method: Any, tolerance: float) -> bool:
    """Whether a method's lengthscales are those of its graph but for a common factor, which changes no neighbors.

    Args:
        method: a method with a graph of its data.
        tolerance: on logarithms of ratios.
    """
    graph = graph_of(method)
    if graph is None or not isinstance(graph.metric, Tensor) or not torch.equal(graph.x, method.x):
        return False
    now = neighbor_metric(method.bound().kernel, method.x) if method.metric is None else graph.metric
    if not isinstance(now, Tensor):
        return False
    ratio = (now.double() / graph.metric.double()).log()
    return bool(ratio.max() - ratio.min() < tolerance)


def alternates(method: Trainable, solving: bool) -> bool:
    """Whether solutions for local variables alternate with steps on the hyperparameters until the score is best.

    The loss is then a function of the hyperparameters at fixed local variables.
    """
    return solving and isinstance(method, Alternating) and method.can_alternate


def profiles(method: Trainable, solving: bool) -> bool:
    """Whether each evaluation of the loss, on all rows, solves anew for local variables."""
    return solving and _has_few_parameters(method) and isinstance(method, Profiled) and method.profile.applies


@torch.no_grad()
def suits_lbfgs(method: Trainable, solving: bool, elbo: ELBO) -> bool:
    """Whether the loss on given rows is smooth: few parameters, and no latent values other than solved ones.

    A method can decide it by ``has_smooth_loss``.
    """
    alternating = alternates(method, solving)
    solved = cast(Solvable, method).solved_parameters() if alternating else ()
    if isinstance(method, Program) or not _has_few_parameters(method, solved):
        return False
    if isinstance(method, Smooth) and method.has_smooth_loss:
        return True
    device = next(param.device for module in modules_of(method) for param in module.parameters())
    idx = torch.arange(min(_TRIED, method.num_data), device=device)
    args = method.batch_args(idx, torch.Generator()) if isinstance(method, Batched) else (idx,)
    with seeded(0, idx):
        trace = poutine.trace(method.guide).get_trace(*args)
    drawn = set(prune_subsample_sites(trace).stochastic_nodes)
    return alternating or not drawn or integrates_coefficients(method, solving, elbo, drawn)


def integrates_coefficients(method: Trainable, solving: bool, elbo: ELBO, drawn: Collection[str] = ()) -> bool:
    """Whether the loss is integrated exactly over coefficients of the mean: a few that are solved for.

    Args:
        method: the method.
        solving: whether the run solves for them.
        elbo: the objective.
        drawn: sites of the guide that have to be among them.
    """
    if not (solving and type(elbo) is IntegratedELBO):
        return False
    nodes = coefficient_nodes(method)
    return bool(nodes) and nodes.keys() >= set(drawn) and len(next(iter(nodes.values()))) <= _MOST_NODES


def _has_few_parameters(method: Trainable, solved: Sequence[Tensor] = ()) -> bool:
    """Whether there are parameters, and few besides these."""
    left_out = set(map(id, solved))
    params = [param for module in modules_of(method) for param in module.parameters()]
    return 0 < sum(param.numel() for param in params if id(param) not in left_out) <= _FEW
