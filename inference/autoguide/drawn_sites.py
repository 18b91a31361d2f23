"""Sites that AutoNNGP draws: values with a log density."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
from pyro.poutine import Trace
from torch import Tensor
from torch.distributions import register_kl


class Value(dist.Delta):
    """A Delta whose divergence includes its log density, which Pyro's divergence of a Delta leaves out."""


@register_kl(Value, dist.Distribution)
def _kl(q: Value, p: Any) -> Tensor:
    return q.log_density - p.log_prob(q.v)


def draw_sites(
    prototype: Trace, plates: Mapping[str, Any], values: Mapping[str, Tensor], densities: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Draw the latent sites of a prototype in their plates, at values with log densities; returns the values."""
    result = {}
    for name, site in prototype.iter_stochastic_nodes():
        with ExitStack() as stack:
            for frame in site["cond_indep_stack"]:
                stack.enter_context(plates[frame.name])
            result[name] = pyro.sample(name, Value(values[name], densities[name], site["fn"].event_dim))
    return result
