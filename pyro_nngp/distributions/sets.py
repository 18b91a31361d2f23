"""A batch of distributions of one event shape, one object for each index, evaluated one after the other.

This serves distributions that have no batch dimensions because their cost dwarfs a Python loop, such as posteriors of
several coupled processes at several sets of hyperparameters.

Cost: the sum over parts. Symbols: S batch dimensions, E event dimensions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints, kl_divergence, register_kl

from pyro_nngp._checks import fail
from pyro_nngp.distributions.expandable import Expandable


class Sets(TorchDistribution):
    """A batch of distributions: part s is the distribution of the values at index s.

    Args:
        parts: distributions without batch dimensions, in the row-major order of the batch shape.
        batch_shape: shape with as many indices.

    Raises:
        ValueError: if there is none or they are not as many, have batch dimensions, or differ in their event shape.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, parts: Sequence[Any], batch_shape: Sequence[int], validate_args: bool | None = None) -> None:
        shape, events = torch.Size(batch_shape), {(part.batch_shape, part.event_shape) for part in parts}
        if len(parts) != shape.numel() or len(events) != 1 or parts[0].batch_shape:
            expectation = f"{shape.numel()} distributions of one event shape, without batch dimensions"
            fail("Sets", "parts", expectation, (len(parts), sorted(events)), "Give one for each index.")
        self.parts = tuple(parts)
        super().__init__(shape, parts[0].event_shape, validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:
        """Whether all parts can be reparameterized."""
        return all(part.has_rsample for part in self.parts)

    @property
    def support(self) -> constraints.Constraint | None:
        """Support of the first part."""
        return self.parts[0].support

    @property
    def mean(self) -> Float[Tensor, "..."]:
        """Means of the parts."""
        return self.collect(lambda part: part.mean)

    @property
    def variance(self) -> Float[Tensor, "..."]:
        """Variances of the parts."""
        return self.collect(lambda part: part.variance)

    def collect(self, function: Callable[[Any], Tensor]) -> Tensor:
        """Apply a function to each part; the batch dimensions lead."""
        return torch.stack([function(part) for part in self.parts]).unflatten(0, self.batch_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Sets":
        shape = torch.Size(batch_shape)
        which = torch.arange(len(self.parts)).reshape(self.batch_shape).expand(shape)
        return Sets([self.parts[i] for i in which.flatten().tolist()], shape, self._validate_args)

    def rsample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "..."]:
        """Independent draws, also from parts that are one object."""
        return self._draws("rsample", sample_shape)

    def sample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "..."]:
        """Independent draws without gradients."""
        return self._draws("sample", sample_shape)

    def log_prob(self, value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Log densities of the values at each index under its part."""
        shape = torch.broadcast_shapes(value.shape, self.batch_shape + self.event_shape)
        inner = len(self.batch_shape) + len(self.event_shape)
        flat = value.expand(shape).flatten(len(shape) - inner, len(shape) - len(self.event_shape) - 1)
        each = zip(self.parts, flat.unbind(len(shape) - inner), strict=True)
        return torch.stack([part.log_prob(one) for part, one in each], -1).unflatten(-1, self.batch_shape)

    def _draws(self, method: str, sample_shape: Any) -> Tensor:
        first = torch.Size(sample_shape)
        draws = torch.stack([getattr(part, method)(first) for part in self.parts], len(first))
        return draws.unflatten(len(first), self.batch_shape)


class OneSet(Expandable):
    """A distribution over (L, U) that has no batch dimensions; its expansions are :class:`Sets`."""

    support = constraints.independent(constraints.real, 2)
    has_rsample = True

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Independent copies."""
        shape = torch.Size(batch_shape)
        return Sets([self] * shape.numel(), shape) if shape else self


@register_kl(Sets, Distribution)
def _kl_sets(q: Sets, p: Any) -> Tensor:
    """Divergences of the parts of q from the parts of p, or from p where it is one distribution for all."""
    if not isinstance(p, Sets):
        if p.batch_shape:
            raise NotImplementedError(f"no divergence of Sets from a {type(p).__name__} with batch dimensions")
        return q.collect(lambda part: kl_divergence(part, p))
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    pairs = zip(q.expand(shape).parts, p.expand(shape).parts, strict=True)
    return torch.stack([kl_divergence(*pair) for pair in pairs]).unflatten(0, shape)
