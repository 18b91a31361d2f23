"""A base for distributions whose parameters are tensors with leading batch dimensions."""

from typing import Any, ClassVar, Self

import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor

from pyro_nngp._checks import check_tensor


class Expandable(TorchDistribution):
    """A distribution that expands the tensors named in `batched` and shares all other attributes.

    Attributes:
        batched: names of the attributes that are tensors of shape batch_shape + (...).
    """

    batched: ClassVar[tuple[str, ...]]
    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """This distribution with a broadcast batch shape; no tensor is copied."""
        new = self._get_checked_instance(type(self), _instance)
        new.__dict__.update(self.__dict__)
        for name in self.batched:
            tensor = getattr(self, name)
            inner = tensor.shape[len(self.batch_shape) :]
            setattr(new, name, tensor.expand(torch.Size(batch_shape) + inner))
        new._batch_shape = torch.Size(batch_shape)
        return new

    def _validate_sample(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_complex():
            check_tensor(f"{type(self).__name__}.log_prob", "value", value)
        super()._validate_sample(value)
