"""Defaults of ``fit`` that depend on the method: the optimizer and the rows of a batch."""

from typing import Any

import torch
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites
from torch import nn

from pyro_nngp._random import seeded
from pyro_nngp.inference.svi.parameters import modules_of

_BATCH, _LEAST_BATCH = 1024, 128
_FEW = 1000  # most parameters for quasi-Newton steps
_SUBSAMPLE, _SUBSAMPLE_MEMORY = 20_000, 2**26  # rows of the largest subsample; its size times K^2
_FIRST_SUBSAMPLE = 1000
_TRIED = 32  # rows, to check whether the guide has sites


def most_rows(method: Any, num_data: int) -> int:
    """Rows of the largest subsample."""
    k = getattr(getattr(method, "graph", None), "num_neighbors", 32)
    return min(num_data, _SUBSAMPLE, max(_FIRST_SUBSAMPLE, _SUBSAMPLE_MEMORY // k**2))


def minibatch(method: Any) -> int:
    """Rows of a minibatch: fewer if each has several latent functions."""
    return max(_LEAST_BATCH, _BATCH // (getattr(method, "num_latents", None) or 1))


def neighbor_parameters(method: Any) -> list[nn.Parameter]:
    """Parameters that determine neighbors: those of the kernel, of the guide of its priors, and inducing points."""
    if not hasattr(method, "refresh_neighbors"):
        return []
    parts = [getattr(method, name, None) for name in ("kernel", "hyper_guide")]
    params = [param for part in parts if isinstance(part, nn.Module) for param in part.parameters()]
    params += [param for name, param in method.named_parameters(recurse=False) if name.split("_")[0] == "z"]
    return params


def alternates(method: Any, solving: bool) -> bool:
    """Whether solutions for local variables alternate with steps on the hyperparameters, judged by the method's score.

    The loss is then a function of the hyperparameters at fixed local variables.
    """
    return solving and hasattr(method, "score") and method.can_alternate


@torch.no_grad()
def suits_lbfgs(method: Any, solving: bool) -> bool:
    """Whether the loss at given rows is smooth: few parameters, and no latent values except those solved for.

    A method may say so itself, by ``has_smooth_loss``.
    """
    alternating = alternates(method, solving)
    solved = {id(param) for param in method.solved_parameters()} if alternating else set()
    params = [param for module in modules_of(method) for param in module.parameters()]
    count = sum(param.numel() for param in params if id(param) not in solved)
    if isinstance(method, tuple) or not 0 < count <= _FEW:
        return False
    if getattr(method, "has_smooth_loss", False):
        return True
    idx = torch.arange(min(_TRIED, method.num_data), device=next(method.parameters()).device)
    args = getattr(method, "batch_args", lambda idx, generator: (idx,))(idx, torch.Generator())
    with seeded(0, next(method.parameters())):
        trace = poutine.trace(method.guide).get_trace(*args)
    return alternating or not prune_subsample_sites(trace).stochastic_nodes
