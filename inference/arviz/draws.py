"""Draws of latent sites from MCMC runs and from guides, one at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from pyro import poutine
from pyro.infer import MCMC
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.inference._traces import latent_values
from pyro_nngp.inference.autoguide.transport import Transported
from pyro_nngp.inference.mcmc.minibatch import with_all_rows
from pyro_nngp.inference.mcmc.recorder import RECORD
from pyro_nngp.inference.protocols import Checked, has_program, owner_of

Statistics = dict[str, tuple[tuple[str, ...], np.ndarray]]  # names of dimensions, and an array
Draw = tuple[dict[str, Tensor], poutine.Trace | None]  # values of the latent sites, and the trace of a guide


class MCMCDraws:
    """Draws of a finished run, chain by chain.

    Args:
        where: name of the caller, for messages.
        mcmc: the run.
        num_samples: number of draws of each chain, evenly spaced; None is all.

    Raises:
        ValueError: if there are no draws, fewer than requested, or no model.
    """

    def __init__(self, where: str, mcmc: MCMC, num_samples: int | None) -> None:
        if mcmc._samples is None:
            fail(where, "the MCMC object", "to hold draws", "none", "Call its run(...) first.")
        self.model: Any = getattr(mcmc.kernel, "model", None)
        if self.model is None:
            fail(where, "the MCMC kernel", "to have a model", "a potential only", "Build the kernel from a model.")
        self._transported = self.model if isinstance(self.model, Transported) else None
        if self._transported is not None:
            self.model = self._transported.original
        self._mcmc, self._samples = mcmc, mcmc.get_samples(group_by_chain=True)
        self.num_chains, self._total = next(iter(self._samples.values())).shape[:2]
        self.num_samples = self._total if num_samples is None else num_samples
        if self.num_samples > self._total:
            fail(where, "num_samples", f"<= {self._total}, the draws of a chain", num_samples, "Run longer chains.")
        self._kept = np.linspace(0, self._total - 1, self.num_samples).round().astype(int)

    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        """Arguments of the run, with all rows instead of each minibatch."""
        return with_all_rows(self._mcmc._args, self._mcmc._kwargs)

    def at(self, chain: int, draw: int, args: tuple, kwargs: Mapping[str, Any]) -> Draw:
        """Values of the latent sites at one of the selected draws."""
        values = {name: value[chain, self._kept[draw]] for name, value in self._samples.items()}
        if self._transported is not None:
            values = self._transported.original_values(values, *args, **kwargs)
        return values, None

    def are_of(self, method: Any) -> bool:
        """Whether the draws are from the guide of a method, which is None for other programs."""
        return False

    def statistics(self) -> Statistics:
        """Kernel diagnostics as {name: (dims, array)}: divergences and records per draw, numbers per chain."""
        chains: Any = self._mcmc._diagnostics
        statistics: Statistics = {}
        for name in chains[0]:
            values = [chain[name] for chain in chains]
            if name == "divergences":
                diverging = np.zeros((self.num_chains, self._total), dtype=bool)
                for row, places in zip(diverging, values, strict=True):
                    row[places] = True
                statistics["diverging"] = (("chain", "draw"), diverging[:, self._kept])
            elif all(isinstance(value, (int, float)) for value in values):
                statistics[name.replace(" ", "_")] = (("chain",), np.asarray(values))
        for name, recorded in self._recorded("draws").items():
            statistics[name] = (("chain", "draw"), recorded[:, self._kept])
        return statistics

    def warmup(self) -> tuple[dict[str, Tensor], Statistics]:
        """Draws of the warm-up, (chains, draws, ...), and their statistics; empty unless a ``Recorder`` kept them."""
        kept = self._recorded("warmup draws")
        transforms = getattr(self._mcmc, "transforms", None) or {}
        values = {name: torch.as_tensor(value) for name, value in kept.items()}
        values = {name: transforms[name].inv(z) if name in transforms else z for name, z in values.items()}
        if values and self._transported is not None:
            values = self._originals(self._transported, values)
        recorded = self._recorded("warmup") if kept else {}
        statistics: Statistics = {name: (("chain", "draw"), value) for name, value in recorded.items()}
        return values, statistics

    def _originals(self, transported: Transported, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values of the original program's sites at draws of a transported one, (chains, draws, ...)."""
        (args, kwargs), shape = self.arguments(), next(iter(values.values())).shape[:2]
        every = [{name: value[at] for name, value in values.items()} for at in np.ndindex(shape)]
        rows = [transported.original_values(row, *args, **kwargs) for row in every]
        return {name: torch.stack([row[name] for row in rows]).unflatten(0, shape) for name in rows[0]}

    def _recorded(self, part: str) -> dict[str, np.ndarray]:
        """Statistics or draws that a ``Recorder`` kept of all chains, (chains, draws, ...)."""
        chains: Any = self._mcmc._diagnostics
        records = [chain.get(RECORD, {}).get(part, {}) for chain in chains]
        return {name: np.stack([record[name] for record in records]) for name in records[0]}


class GuideDraws:
    """Independent draws from a guide, as one chain."""

    num_chains = 1

    def __init__(self, model: Callable, guide: Callable, num_samples: int) -> None:
        self.model, self._guide, self.num_samples = model, guide, num_samples

    def at(self, chain: int, draw: int, args: tuple, kwargs: Mapping[str, Any]) -> Draw:
        """A new draw."""
        trace = poutine.trace(self._guide).get_trace(*args, **kwargs)
        return latent_values(trace), trace

    def are_of(self, method: Any) -> bool:
        """Whether the draws are from the guide of a method."""
        return method is not None and owner_of(self._guide) is method

    def statistics(self) -> Statistics:
        """An empty dictionary: independent draws have no diagnostics."""
        return {}

    def warmup(self) -> tuple[dict[str, Tensor], Statistics]:
        """Empty dictionaries: independent draws need no warm-up."""
        return {}, {}


def draws_of(where: str, source: Any, num_samples: int | None) -> MCMCDraws | GuideDraws:
    """Draws from an MCMC run, from a pair (model, guide), or from an object that has both; 500 of a guide by default.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(source, MCMC):
        return MCMCDraws(where, source, num_samples)
    if has_program(source):
        source = (source.model, source.guide)
    if not (isinstance(source, tuple) and len(source) == 2 and all(callable(part) for part in source)):
        expectation = "to be an MCMC object, a pair (model, guide), or an object with both"
        fail(where, "source", expectation, type(source).__name__, "Pass one of them.", TypeError)
    return GuideDraws(*source, 500 if num_samples is None else num_samples)


def method_of(model: Any) -> Any:
    """The method that a model belongs to; None for other programs."""
    owner = owner_of(model)
    return owner if isinstance(owner, Checked) else None
