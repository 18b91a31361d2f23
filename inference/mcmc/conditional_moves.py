r"""Slice sampling of single coordinates of :math:`\theta`, with one of three sets of variables held fixed.

For a latent nearest-neighbor vector f with logistic observations and other sites :math:`\theta`: f itself, its
whitened values, or the logits. The conditionals at fixed f alone mix slowly (interweaving, Yu and Meng 2011).

A slice comes from stepping out and shrinking (Neal 2003, figures 3 and 5).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.poutine import Trace
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._wrappers import base_distribution
from pyro_nngp.distributions import NNGP, NNGPReparam
from pyro_nngp.inference._traces import check_all_rows, latent_sites, run_at
from pyro_nngp.inference.mcmc.logistic import LogisticData
from pyro_nngp.inference.mcmc.potential import ModelPotential
from pyro_nngp.linalg import NotPositiveDefiniteError

_STEPS_OUT = 16  # most widths of a slice

Params = dict[str, Tensor]  # unconstrained values of the latent sites
Move = tuple[Callable[[Params], float], Callable[[Params], Params]]  # log density of z, and f for the accepted z


class ConditionalMoves:
    """Conditional densities of a model's latent sites other than its NNGP site.

    Args:
        where: name of the caller, for messages.
        model: the Pyro model.
        args, kwargs: its arguments.
        init_strategy: where chains start, one of ``pyro.infer.autoguide.initialization``.
        latent: name of the NNGP site; None takes the only one.
        start: unconstrained values of the latent sites to start from; None asks `init_strategy`.

    Attributes:
        potential: potential of the model.
        start: unconstrained values of the latent sites.
        site: name of the NNGP site.
        data: the observed sites.
        evaluations: number of evaluations of log densities so far.

    Raises:
        ValueError: if the model has no such site, or its data are not logistic.
    """

    def __init__(
        self,
        where: str,
        model: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        init_strategy: Callable,
        latent: str | None,
        start: Params | None,
    ) -> None:
        self._where, self._model, self._args, self._kwargs, self.evaluations = where, model, args, kwargs, 0
        self.potential = ModelPotential(where, model, args, kwargs, init_strategy)
        self.start = self.potential.unpack(self.potential.initial()) if start is None else start
        trace = self.trace(self.start)
        self.site = _find_latent(where, trace, latent)
        check_all_rows(where, trace)
        self._white_site = f"{self.site}_white"
        white = poutine.reparam(model, {self.site: NNGPReparam()})
        self._white_potential = ModelPotential(where, white, args, kwargs, init_strategy)

        def run(f: Tensor) -> Trace:
            return self.trace({**self.start, self.site: f})

        self.data = LogisticData(where, run, self.site, self.start[self.site])

    def trace(self, params: Params) -> Trace:
        """Trace of the model at some values."""
        values = {name: self.potential.transforms[name].inv(z) for name, z in params.items()}
        return run_at(self._where, self._model, self._args, self._kwargs, values)

    def prior(self, params: Params) -> NNGP:
        """The distribution of f given all other sites."""
        return self.prior_of(self.trace(params))

    def prior_of(self, trace: Trace) -> NNGP:
        """The distribution of f in a trace."""
        return trace.nodes[self.site]["fn"]

    def kinds(self, params: Params, name: str) -> list[str]:
        """The variables to hold fixed while a site moves, in turn: those whose fixing changes the move of this site."""
        here, there = self.trace(params), self.trace({**params, name: params[name] + 0.5})
        held = ["values"]
        before, after = (self.prior_of(trace).conditionals for trace in (here, there))
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            held.append("white")
        if not torch.equal(self.data.mean_offset(here), self.data.mean_offset(there)):
            held.append("logits")
        return held

    def hold(self, kind: str, params: Params) -> Move:
        """Fix the values of f, its white values, or the logits at their values in `params`."""
        return {"values": self._hold_values, "white": self._hold_white, "logits": self._hold_logits}[kind](params)

    def _hold_values(self, params: Params) -> Move:
        return lambda moved: self._log_density(self.potential, moved), lambda moved: moved

    def _hold_white(self, params: Params) -> Move:
        white = self.prior(params).whiten(params[self.site])

        def log_density(moved: Params) -> float:
            rest = {name: z for name, z in moved.items() if name != self.site}
            return self._log_density(self._white_potential, {**rest, self._white_site: white})

        return log_density, lambda moved: {**moved, self.site: self.prior(moved).color(white)}

    def _hold_logits(self, params: Params) -> Move:
        logits = params[self.site] + self.data.mean_offset(self.trace(params))

        def follow(moved: Params) -> Params:
            return {**moved, self.site: logits - self.data.mean_offset(self.trace(moved))}

        return lambda moved: self._log_density(self.potential, follow(moved)), follow

    def _log_density(self, potential: ModelPotential, params: Params) -> float:
        self.evaluations += 1
        try:
            return -float(potential.energy(potential.pack(params)))
        except NotPositiveDefiniteError:
            return -math.inf


def slice_coordinate(move: Move, params: Params, name: str, i: int, width: float) -> tuple[Params, float]:
    """Draw coordinate i of a site given all else by slice sampling.

    Args:
        move: log density of the moved values, and the resulting values of f.
        params: initial values.
        name: name of the site.
        i: the coordinate.
        width: width of the first interval; it changes the cost, not the distribution.

    Returns:
        The values after the move, and how far the coordinate moved.
    """
    log_density, follow = move

    def moved(z: float) -> Params:
        flat = params[name].flatten().clone()
        flat[i] = z
        return {**params, name: flat.reshape(params[name].shape)}

    start = float(params[name].flatten()[i])
    place, split, drop = torch.rand(3, dtype=torch.float64).tolist()
    level = log_density(params) + math.log1p(-drop)
    low, high = start - place * width, start + (1 - place) * width
    steps_down = int(split * _STEPS_OUT)
    steps_up = _STEPS_OUT - 1 - steps_down
    while steps_down > 0 and log_density(moved(low)) > level:
        low, steps_down = low - width, steps_down - 1
    while steps_up > 0 and log_density(moved(high)) > level:
        high, steps_up = high + width, steps_up - 1
    z = low + (high - low) * float(torch.rand((), dtype=torch.float64))
    while not log_density(moved(z)) > level and low < high:
        low, high = (z, high) if z < start else (low, z)
        z = low + (high - low) * float(torch.rand((), dtype=torch.float64))
    return follow(moved(z)), abs(z - start)


def _find_latent(where: str, trace: Trace, wanted: str | None) -> str:
    """The name of the NNGP site."""
    sites = {
        name: site for name, site in latent_sites(trace).items() if isinstance(base_distribution(site["fn"]), NNGP)
    }
    if wanted is not None and wanted not in sites:
        fail(where, "latent", f"among the latent NNGP sites {sorted(sites)}", repr(wanted), "Name one of them.")
    if wanted is None and len(sites) != 1:
        expectation, cure = "with one latent NNGP site", "Sample one from NNGP(kernel, graph), or name it as latent=."
        fail(where, "model", expectation, sorted(sites) or "none", cure)
    name = wanted or next(iter(sites))
    prior, site = base_distribution(sites[name]["fn"]), sites[name]
    rows = torch.arange(prior.graph.num_points, device=prior.batch.rows.device)
    if (
        site["fn"] is not prior
        or prior.batch_shape
        or not all(map(rows.equal, (prior.batch.rows, prior.batch.targets)))
    ):
        actual = f"{type(site['fn']).__name__} of shape {tuple(site['fn'].shape())}"
        fail(where, f"site {name!r}", "to be one NNGP over all points", actual, "Leave batch, expand and mask out.")
    if site["mask"] is not None or torch.as_tensor(site["scale"]).ne(1).any():
        fail(where, f"site {name!r}", "without mask and scale", "one with them", "Mask or scale the data instead.")
    return name
