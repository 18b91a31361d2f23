"""Independent distributions of several outputs, of several families, with missing values.

Differs from ``torch.distributions.Independent`` and from a stack: a count and a measurement may stand side by side, and
NaN among the values counts as missing. Symbols: T outputs, B points.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_nngp._checks import fail


class Outputs(TorchDistribution):
    r"""T distributions of the batch shape (\*S, B) as one of the batch shape (\*S, T, B).

    Log densities of missing values, NaN, are 0.

    Args:
        parts: one distribution for each output, univariate.

    Raises:
        ValueError: if there is none, or their shapes differ.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.real

    def __init__(self, parts: Sequence[Distribution], validate_args: bool | None = None) -> None:
        shapes = {(tuple(part.batch_shape), tuple(part.event_shape)) for part in parts}
        if len(shapes) != 1 or len(parts[0].batch_shape) < 1 or len(parts[0].event_shape):
            fail("Outputs", "parts", "univariate, of one shape (..., B)", sorted(shapes), "Expand the others.")
        self.parts = tuple(parts)
        *first, points = parts[0].batch_shape
        super().__init__(torch.Size((*first, len(parts), points)), torch.Size(), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Outputs":
        new = self._get_checked_instance(Outputs, _instance)
        each = torch.Size((*batch_shape[:-2], batch_shape[-1]))
        Outputs.__init__(new, [part.expand(each) for part in self.parts], validate_args=self._validate_args)
        return new

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        draws = [part.sample(torch.Size(sample_shape)) for part in self.parts]
        dtype = torch.get_default_dtype()
        for draw in draws:
            dtype = draw.dtype if draw.is_floating_point() else dtype
        return torch.stack([draw.to(dtype) for draw in draws], -2)

    def log_prob(self, value: Tensor) -> Tensor:
        supports = [part.support for part in self.parts]
        return of_each_output(value, supports, lambda number, known: self.parts[number].log_prob(known))

    def cdf(self, value: Tensor) -> Tensor:
        """Cumulative distribution function of each output."""
        return self._each(value, "cdf")

    def icdf(self, value: Tensor) -> Tensor:
        """Quantiles of each output.

        Raises:
            NotImplementedError: if the family of an output has none.
        """
        return self._each(value, "icdf")

    @property
    def mean(self) -> Tensor:
        return torch.stack([part.mean for part in self.parts], -2)

    @property
    def variance(self) -> Tensor:
        return torch.stack([part.variance for part in self.parts], -2)

    def _each(self, value: Tensor, function: str) -> Tensor:
        values = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape)).unbind(-2)
        return torch.stack([getattr(part, function)(v) for part, v in zip(self.parts, values, strict=True)], -2)


def missing_values(y: Tensor) -> Tensor:
    """Whether each value is NaN; integers never are."""
    return y.isnan() if y.is_floating_point() else torch.zeros_like(y, dtype=torch.bool)


def of_each_output(
    y: Tensor, supports: Sequence[constraints.Constraint | None], function: Callable[[int, Tensor], Tensor]
) -> Tensor:
    r"""Apply a function to each output of y, (\*S, T, B), with zeros where y is NaN.

    Args:
        y: values, of which some may be missing.
        supports: of each output, for a value in place of the missing ones; None takes 0.
        function: maps the number of an output and its values, (\*S, B), to a tensor of that shape or a wider one; it
            never sees NaN.
    """
    results = []
    for number, (values, support) in enumerate(zip(y.unbind(-2), supports, strict=True)):
        missing = missing_values(values)
        if bool(missing.all()):
            results.append(torch.zeros_like(values))
            continue
        zero = torch.zeros_like(values)
        fits = support is None or bool(support.check(zero).all())
        stand_in = zero if fits else values[~missing][0]
        results.append(function(number, torch.where(missing, stand_in, values)).masked_fill(missing, 0.0))
    return torch.stack(torch.broadcast_tensors(*results), -2)
