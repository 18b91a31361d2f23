r"""Nearest-neighbor priors on minibatches of their conditionals.

The density of a nearest-neighbor process is a product of one conditional per point, so that

.. math:: \log p(u) = \sum_{j=1}^M \log p(u_j \mid u_{n(j)})
   = E_J \Big[ \frac{M}{|J|} \sum_{j \in J} \log p(u_j \mid u_{n(j)}) \Big]

for random J of |J| points. Disjoint J of equal size average exactly to the density of all points. A chain keeps the
values at all points; an update reads the values of J and of their neighbors.

A site is minibatched where the program has it over all points of its graph and its data in minibatches, and where the
program has it on a batch itself, as in :class:`~pyro_nngp.models.VNNGP`.

Cost: O(B K^3) for B = |J|. Symbols: M points of a graph, K neighbors.
"""

from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
from jaxtyping import Float, Int
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Independent

from pyro_nngp._wrappers import base_distribution
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference._traces import sample_sites
from pyro_nngp.neighbors import Batch


def process_of(fn: Any) -> NNGP | None:
    """The nearest-neighbor process behind the distribution of a site; None if there is none."""
    base = base_distribution(fn, unmask=False)
    return base if isinstance(base, NNGP) else None


def at_batch(fn: Any, batch: Batch | None = None) -> Any:
    """The distribution of a site of a process on another batch; None is all points."""
    if isinstance(fn, Independent):
        return dist.Independent(at_batch(fn.base_dist, batch), fn.reinterpreted_batch_ndims)
    return fn.at_batch(batch)


def init_near_mean(site: Any) -> Tensor:
    """Start processes at their mean, 0, and other sites by Pyro's ``init_to_uniform``.

    Independent values would be far from any function that a process may be.
    """
    process = process_of(site["fn"])
    return init_to_uniform(site) if process is None else process.mean.expand(site["fn"].shape()).clone()


def whole_processes(trace: Trace) -> dict[str, NNGP]:
    """The process of each site that has one over all points of its graph."""
    found = {name: process_of(site["fn"]) for name, site in sample_sites(trace).items()}
    return {name: each for name, each in found.items() if each is not None and each.is_whole}


def batch_sizes(trace: Trace) -> list[int]:
    """Sizes of the subsamples of plates."""
    frames = [frame for site in sample_sites(trace).values() for frame in site["cond_indep_stack"]]
    return [frame.size for frame in frames if frame.full_size is not None and frame.size < frame.full_size]


class ProcessRows(Messenger):
    """Sites of processes at values of all points, with the density of a batch of them.

    Args:
        values: values at all points of sites that the program has on a batch, (..., M).
        rows: the points whose conditionals count, of sites that the program has over all points.
    """

    def __init__(self, values: Mapping[str, Float[Tensor, "*S M"]], rows: Mapping[str, Int[Tensor, " B"]]) -> None:
        super().__init__()
        self._values, self._rows = values, rows

    def _pyro_sample(self, msg: Any) -> None:
        name, process = msg["name"], process_of(msg["fn"])
        if process is None:
            return
        if name in self._values and not process.is_whole:
            msg["value"], msg["is_observed"] = self._values[name].index_select(-1, process.batch.rows), True
        elif name in self._rows and msg["value"] is not None:
            batch, value = process.graph.batch(self._rows[name]), msg["value"]
            density = at_batch(msg["fn"], batch).log_prob(value.index_select(-1, batch.rows))
            msg["fn"] = dist.Delta(value, density, event_dim=msg["fn"].event_dim)
            msg["scale"] = msg["scale"] * batch.scale


__all__ = ["ProcessRows", "at_batch", "batch_sizes", "init_near_mean", "process_of", "whole_processes"]
