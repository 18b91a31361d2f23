"""Sites that AutoNNGP draws: white values behind the Gaussian sites, and the values of latent sites that follow."""

from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor
from torch.distributions import register_kl

from pyro_nngp.inference.autoguide.conditional import ConditionalPosterior


class White(TorchDistribution):
    """The independent standard normal values behind the Gaussian sites, in coordinates of the leaves."""

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.real_vector
    has_rsample = True  # gradients do not go through the draw, see auto_nngp

    def __init__(self, q: ConditionalPosterior) -> None:
        self._q = q
        super().__init__((), (len(q),), validate_args=False)

    def rsample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "*S d"]:
        """Draws, without gradients."""
        shape = torch.Size(sample_shape)
        return self._q.draw(shape.numel()).reshape(*shape, len(self._q))

    def log_prob(self, value: Float[Tensor, "*S d"]) -> Float[Tensor, "*S"]:
        """Log density of the white values."""
        return self._q.log_white_prob(value)


class Value(dist.Delta):
    """A Delta whose divergence includes its log density, which Pyro's divergence of a Delta leaves out."""


@register_kl(Value, dist.Distribution)
def _kl(q: Value, p: Any) -> Tensor:
    return q.log_density - p.log_prob(q.v)
