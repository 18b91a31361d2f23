"""Equally weighted mixtures, such as a predictive distribution averaged over posterior draws.

Differs from ``MixtureSameFamily``: the components may be any distributions of one shape, discrete ones too, and keep
their batch shapes. Cost: each component is evaluated, one after the other. Symbols: S components.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_nngp._checks import fail
from pyro_nngp._kinds import check_kind, check_sequence, draws_shape
from pyro_nngp.distributions.expandable import Expandable


class Mixture(Expandable):
    r""":math:`p(y) = \frac1S \sum_s p_s(y)`.

    Args:
        components: S distributions of one batch and event shape.

    Raises:
        ValueError: if there is none, or their shapes differ.
    """

    def __init__(self, components: Sequence[Distribution], validate_args: bool | None = None) -> None:
        cure = "Give a list of distributions."
        check_sequence("Mixture", "components", components, cure)
        for component in components:
            check_kind("Mixture", "components", component, Distribution, "distributions", cure)
        shapes = {(tuple(c.batch_shape), tuple(c.event_shape)) for c in components}
        if len(shapes) != 1:
            fail("Mixture", "components", "of one shape", sorted(shapes), "Give at least one; expand the others.")
        self.components = tuple(components)
        super().__init__(components[0].batch_shape, components[0].event_shape, validate_args=validate_args)

    batched = ("components",)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint | None:
        return self.components[0].support

    def _log_prob(self, value: Tensor) -> Tensor:
        log_probs = torch.stack([c.log_prob(value) for c in self.components])
        return log_probs.logsumexp(0) - math.log(len(self.components))

    @property
    def has_atoms(self) -> bool:
        """Whether single values have a positive probability, such as limits of censored data."""
        return any(getattr(component, "has_atoms", False) for component in self.components)

    def cdf(self, value: Tensor) -> Tensor:
        """Cumulative distribution function: the mean over components.

        Raises:
            NotImplementedError: if a component has none.
        """
        if self._validate_args:
            self._validate_sample(value)
        return torch.stack([c.cdf(value) for c in self.components]).mean(0)

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Draw a component for each index of the batch, and from it.

        Cost: from each component, the largest number of draws that any index of the batch needs; for many draws little
        more than one per draw of the mixture.
        """
        sample_shape = draws_shape("Mixture.sample", sample_shape)
        num, size = math.prod(sample_shape), math.prod(self.batch_shape)
        like = self.components[0].sample()  # for its dtype and device
        draws = like.new_empty(num, size, *self.event_shape)
        if draws.numel() == 0:
            return draws.reshape(*sample_shape, *self.batch_shape, *self.event_shape)
        chosen, places = torch.randint(len(self.components), (num, size), device=like.device).sort(dim=0)
        counts = chosen.new_zeros(len(self.components), size, dtype=torch.int32)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
        done = torch.zeros_like(counts[0])
        for component, count, most in zip(self.components, counts, counts.amax(1).tolist(), strict=True):
            if most:
                drawn = component.sample((most,)).reshape(most, size, *self.event_shape)
                which, index = (torch.arange(most, device=like.device)[:, None] < count).nonzero(as_tuple=True)
                draws[places[done[index] + which, index], index] = drawn[which, index]
                done += count
        return draws.reshape(*sample_shape, *self.batch_shape, *self.event_shape)

    @property
    def mean(self) -> Tensor:
        return torch.stack([c.mean for c in self.components]).mean(0)

    @property
    def variance(self) -> Tensor:
        """Variance within components plus variance between them."""
        means, variances = (torch.stack([getattr(c, name) for c in self.components]) for name in ("mean", "variance"))
        return mixture_moments(means, variances)[1]


def mixture_moments(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of an equally weighted mixture, whose components are along the first dimension."""
    return means.mean(0), variances.mean(0) + means.var(0, correction=0)
