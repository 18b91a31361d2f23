"""Export of Pyro posteriors to ArviZ: MCMC runs, guides, and methods with a model and a guide.

The model is run once more at each draw, conditioned on the data, and once with the data drawn anew. Arrays are allocated
once and filled draw by draw, off the device that the model runs on.

Cost: two runs of the model per draw (one of the guide), S draws of all that is kept in memory.
"""

import functools
import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pyro
import torch
import xarray as xr
from jaxtyping import Int
from pyro import poutine
from pyro.infer import MCMC
from torch import Tensor
from tqdm.auto import tqdm

from pyro_nngp._checks import fail
from pyro_nngp.inference._interrupt import deferred_interrupt
from pyro_nngp.inference._sites import (
    is_data,
    is_deterministic,
    latent_values,
    log_density as density_of,
    log_prob,
    plate_dims,
    plate_rows,
    run_at,
    sample_sites,
)
from pyro_nngp.inference.potential import Minibatch

_WHERE = "to_arviz"
_SAMPLES = ("posterior", "posterior_predictive", "log_likelihood", "sample_stats")


def to_arviz(
    source: Any,
    *args: Any,
    model_kwargs: Mapping[str, Any] | None = None,
    num_samples: int | None = None,
    var_names: Collection[str] | None = None,
    posterior_predictive: bool = True,
    log_likelihood: bool = True,
    log_density: bool = False,
    batch_size: int | None = None,
    num_data: int | None = None,
    losses: Any = None,
    constant_data: Mapping[str, Any] | None = None,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Iterable[str]] | None = None,
    progress: bool = True,
) -> Any:
    """Export a posterior to ArviZ.

    Groups of the result:

    - ``posterior``: latent and deterministic sites;
    - ``posterior_predictive``: observed sites drawn anew;
    - ``log_likelihood``: log density of each observation, without the scales of plates and ``poutine.scale``; NaN where
      it is masked;
    - ``sample_stats``: for MCMC ``diverging`` and what the kernel tells of each chain (step size, temperatures, ...); with
      `log_density`, ``log_p`` and, for guides, ``log_q``;
    - ``observed_data``; ``constant_data`` with the inputs ``x`` of a method; ``params`` with the model's parameters, which
      are point estimates; ``svi`` with the trace of losses.

    Plates are dimensions with the rows they took as coordinates. Other dimensions are ``<site>_dim_<k>``, or named by
    `dims`.

    Args:
        source: an ``MCMC`` object after its run; an object with ``model`` and ``guide``; or a pair (model, guide).
        *args: arguments of model and guide. For MCMC, none takes those of its run, a
            :class:`~pyro_nngp.inference.potential.Minibatch` being replaced by all its rows.
        model_kwargs: keyword arguments of model and guide.
        num_samples: draws, per chain. None is all of an MCMC run (fewer are taken evenly spaced) and 500 of a guide.
        var_names: sites to keep in the posterior; with "~" in front, sites to leave out, such as "~u".
        posterior_predictive: whether to draw the data anew.
        log_likelihood: whether to keep pointwise log likelihoods.
        log_density: whether to keep the log joint density ``log_p`` of latent sites and data, and that of the guide.
        batch_size: run the model on so many rows at a time, as ``model(idx)``, at values drawn for all rows.
        num_data: number of rows for `batch_size`, where `source` has no ``num_data``.
        losses: trace of the loss, one number per step, such as ``fit(...).losses``.
        constant_data: further arrays to store, {name: array}.
        coords: labels of dimensions, {dimension: labels}; of a plate, one for each of all its rows.
        dims: names for the dimensions of a site (or of an entry of `constant_data`) that belong to no plate.
        progress: show a progress bar where the export takes longer than a second.

    Returns:
        ``InferenceData`` with ArviZ 0.x, ``xarray.DataTree`` with ArviZ 1.x. Ctrl-C ends it with the draws so far.

    Raises:
        TypeError, ValueError: for a source of another kind or not yet run, arguments out of range, latent sites without
            draws, rows that change from draw to draw, names that do not fit.

    Cost: two runs of the model per draw, one without `posterior_predictive`, and the guide's. `log_density` adds the
    densities of latent sites, O(N K^3) for a nearest-neighbor prior.
    """
    if num_samples is not None and num_samples < 1:
        fail(_WHERE, "num_samples", ">= 1", num_samples, "Ask for at least one draw.")
    draws = _MCMCDraws(source, num_samples) if isinstance(source, MCMC) else _GuideDraws(source, 500 if num_samples is None else num_samples)
    kwargs = dict(model_kwargs or {})
    if isinstance(source, MCMC) and not args and not kwargs and batch_size is None:
        args, kwargs = draws.arguments()
    blocks = _blocks(batch_size, getattr(source, "num_data", None) if num_data is None else num_data, args, kwargs, log_density)
    arrays = _Arrays(draws.num_chains, draws.num_samples, dims or {})
    with torch.no_grad(), deferred_interrupt() as pressed:
        done = 0
        for s in tqdm(range(draws.num_samples), disable=not progress, delay=1, desc=_WHERE, unit="draw"):
            for c in range(draws.num_chains):
                values, log_q = draws.at(c, s, args, kwargs)
    ...
