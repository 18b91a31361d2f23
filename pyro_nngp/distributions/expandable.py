"""A base for distributions that check a value once, and expand their parameters."""

from typing import Any, ClassVar, Self

import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor

from pyro_nngp._checks import check_tensor, undefined
from pyro_nngp._kinds import draws_shape, validation


class Expandable(TorchDistribution):
    """A distribution that expands what is named in `batched` and shares all other attributes.

    A subclass defines ``_log_prob``, and ``rsample``, ``sample`` or ``_draw``.

    Attributes:
        batched: names of the attributes that are tensors of shape batch_shape + (...), distributions of that batch
            shape, or tuples of these.
    """

    batched: ClassVar[tuple[str, ...]] = ()
    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}

    def __init__(
        self,
        batch_shape: torch.Size = torch.Size(),
        event_shape: torch.Size = torch.Size(),
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(batch_shape, event_shape, validate_args=validation(type(self).__name__, validate_args))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """This distribution with a broadcast batch shape; no tensor is copied."""
        new = self._get_checked_instance(type(self), _instance)
        shape = torch.Size(batch_shape)
        new.__dict__.update(self.__dict__, _batch_shape=shape)
        for name in self.batched:
            setattr(new, name, _expanded(getattr(self, name), len(self.batch_shape), shape))
        return new

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Draws without gradients."""
        with torch.no_grad():
            if self.has_rsample:
                return self.rsample(sample_shape)
            return self._draw(draws_shape(f"{type(self).__name__}.sample", sample_shape) + self.batch_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of a value, which is checked unless `validate_args` is False."""
        if self._validate_args:
            self._validate_sample(value)
        return self._log_prob(value)

    def _log_prob(self, value: Tensor) -> Tensor:
        """Log density of a value, unchecked."""
        undefined(self, "_log_prob", "subclass")

    def _draw(self, shape: torch.Size) -> Tensor:
        """Draws of a shape, without gradients."""
        undefined(self, "_draw", "subclass")

    def _validate_sample(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_complex():
            check_tensor(f"{type(self).__name__}.log_prob", "value", value)
        super()._validate_sample(value)


def _expanded(value: Any, num_old: int, shape: torch.Size) -> Any:
    """A tensor, a distribution or several of them with another batch shape in place of `num_old` dimensions."""
    if isinstance(value, tuple):
        return tuple(_expanded(part, num_old, shape) for part in value)
    return value.expand(shape + value.shape[num_old:] if isinstance(value, Tensor) else shape)
