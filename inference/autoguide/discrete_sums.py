r"""Log densities summed over discrete latent sites, row by row.

A program with discrete latent sites is run with all their values at once, each site in a dimension of its own, left of
the dimensions of plates. Sites that depend on the same discrete values are one density:

.. math:: \log \sum_{z_i} p(z_i) \prod_j p(y_{ij} \mid z_i)

for each row i of the plates of z.

Cost: the product of the numbers of values of the discrete sites of a group, for each row.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from pyro import poutine
from pyro.distributions import Unit
from pyro.infer import config_enumerate
from pyro.poutine import Trace
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.inference._traces import is_delta, log_prob, sample_sites
from pyro_nngp.inference.autoguide.quadratics import OpaqueSiteError


def enumerated(model: Callable, nesting: int) -> Callable:
    """The program with all values of its discrete sites, in dimensions left of `nesting` ones of plates."""
    return poutine.enum(config_enumerate(model, "parallel"), first_available_dim=-1 - nesting)


def summed(trace: Trace, nesting: int) -> Trace:
    """A trace with a factor in place of all sites that depend on the same discrete values, for each group of these.

    Args:
        trace: trace of an enumerated program, which is changed.
        nesting: number of dimensions of plates.

    Raises:
        OpaqueSiteError: if sites of one sum are in other plates than its discrete ones, have scales, or are latent and
            continuous.
    """
    for names in _groups(trace, nesting):
        sites = [trace.nodes[name] for name in names]
        hidden = [site for site in sites if not site["is_observed"]]
        log_density = _sum(sites, hidden, nesting)
        for name in names:
            trace.remove_node(name)
        shown = " and ".join(site["name"] for site in sites if site["is_observed"])
        name = f"{shown} over {' and '.join(site['name'] for site in hidden)}"
        new = {"name": name, "fn": Unit(log_density), "value": log_density.new_empty((*log_density.shape, 0))}
        trace.add_node(name, **hidden[0] | new | {"is_observed": True, "mask": None, "infer": {}})
    return trace


def _groups(trace: Trace, nesting: int) -> list[list[str]]:
    """Names of the sites that depend on the same discrete values, for each group of these."""
    groups: list[tuple[set[int], list[str]]] = []
    for name, site in sample_sites(trace).items():
        fn = site["fn"]
        if is_delta(site):
            continue
        shape = torch.broadcast_shapes(fn.batch_shape, site["value"].shape[: site["value"].dim() - fn.event_dim])
        dims = {dim for dim in range(-len(shape), -nesting) if shape[dim] > 1}
        if dims:
            joined = [group for group in groups if group[0] & dims]
            groups = [group for group in groups if not group[0] & dims]
            every = dims.union(*(group[0] for group in joined))
            groups.append((every, [*(each for group in joined for each in group[1]), name]))
    return [names for _, names in groups]


def _sum(sites: list[Any], hidden: list[Any], nesting: int) -> Float[Tensor, "..."]:
    """Log density of some sites, summed over the discrete ones, for each row of their plates."""
    plates = _plates(hidden[0])
    fits = all(_plates(site) == plates for site in hidden) and all(_plates(site) >= plates for site in sites)
    if not (fits and all("_enumerate_dim" in site["infer"] for site in hidden) and all(s["scale"] == 1 for s in sites)):
        actual = {site["name"]: sorted(_plates(site)) for site in sites}
        cure = "Draw from the posterior with QuickNUTS(model)."
        expectation = "observed, or discrete and in the same plates, without scales"
        fail("AutoNNGP", "sites of a sum over discrete ones", expectation, f"plates {actual}", cure, OpaqueSiteError)
    total = torch.zeros(())
    for site in sites:
        value = log_prob(site, 0.0)
        own = [dim for dim in _plates(site) - plates if -dim <= value.dim()]
        total = total + (value.sum(own, keepdim=True) if own else value)
    total = total.logsumexp(list(range(-total.dim(), -nesting)))
    while total.dim() and total.shape[0] == 1:
        total = total[0]
    return total


def _plates(site: Any) -> set[int]:
    """Dimensions of the vectorized plates of a site."""
    return {frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
