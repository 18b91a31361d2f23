"""Equally weighted mixtures, such as a predictive distribution averaged over posterior draws.

Differs from ``MixtureSameFamily``: the components may be any distributions of one shape, discrete ones too, and keep
their own batch shapes. Cost: that of each component, one after the other. Symbols: S components.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_nngp._checks import fail


class Mixture(TorchDistribution):
    r""":math:`p(y) = \frac1S \sum_s p_s(y)`.

    Args:
        components: S distributions of one batch and event shape.

    Raises:
        ValueError: if there is none, or their shapes differ.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, components: Sequence[Distribution], validate_args: bool | None = None) -> None:
        shapes = {(tuple(c.batch_shape), tuple(c.event_shape)) for c in components}
        if len(shapes) != 1:
            fail("Mixture", "components", "of one shape", sorted(shapes), "Give at least one; expand the others.")
        self.components = tuple(components)
        super().__init__(components[0].batch_shape, components[0].event_shape, validate_args=validate_args)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint | None:
        return self.components[0].support

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Mixture":
        new = self._get_checked_instance(Mixture, _instance)
        Mixture.__init__(new, [c.expand(batch_shape) for c in self.components], validate_args=self._validate_args)
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        log_probs = torch.stack([c.log_prob(value) for c in self.components])
        return log_probs.logsumexp(0) - math.log(len(self.components))

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Draw a component for each index of the batch, and from it."""
        draw = self.components[0].sample(sample_shape)
        shape = (*sample_shape, *self.batch_shape, *[1] * len(self.event_shape))
        chosen = torch.randint(len(self.components), shape, device=draw.device)
        for s, component in enumerate(self.components[1:], 1):
            draw = torch.where(chosen == s, component.sample(sample_shape), draw)
        return draw

    @property
    def mean(self) -> Tensor:
        return torch.stack([c.mean for c in self.components]).mean(0)

    @property
    def variance(self) -> Tensor:
        """That within components plus that between them."""
        means = torch.stack([c.mean for c in self.components])
        within = torch.stack([c.variance for c in self.components]).mean(0)
        return within + (means - means.mean(0)).square().mean(0)
