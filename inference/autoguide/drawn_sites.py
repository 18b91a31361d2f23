"""Sites that AutoNNGP draws: values with a log density."""

from typing import Any

import pyro.distributions as dist
from torch import Tensor
from torch.distributions import register_kl


class Value(dist.Delta):
    """A Delta whose divergence includes its log density, which Pyro's divergence of a Delta leaves out."""


@register_kl(Value, dist.Distribution)
def _kl(q: Value, p: Any) -> Tensor:
    return q.log_density - p.log_prob(q.v)
