"""Real parameters with a scale: values in the user's units, gradient steps in multiples of a given unit.

Adam moves each parameter by about its learning rate per step, whatever the size of the gradient. At the usual rates, a
mean of 3e5 or an inducing point in UTM meters would hardly move. The parameter that an optimizer sees is the value
divided by a unit, so that the same learning rate suits the same problem in any units.

Cost: one product per reading.
"""

from typing import Any

import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import Transform


class Scaled(constraints.Constraint):
    """Any real value; the unconstrained parameter is the value divided by a unit.

    Args:
        unit: positive numbers that broadcast against the value, such as one per input column.
    """

    def __init__(self, unit: float | Tensor) -> None:
        self.unit = unit.detach().cpu().double() if isinstance(unit, Tensor) else torch.tensor(float(unit)).double()

    def check(self, value: Tensor) -> Tensor:
        """True where the value is a number."""
        return value == value


class _Units(Transform):
    """Multiply by the unit."""

    domain = codomain = constraints.real
    bijective = True
    sign = +1

    def __init__(self, unit: Tensor) -> None:
        super().__init__()
        self.unit = unit

    def _call(self, x: Tensor) -> Tensor:
        return x * self._beside(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return y / self._beside(y)

    def _beside(self, x: Tensor) -> Tensor | float:
        """The unit for a product with x, without waiting for the device of x."""
        return self.unit.to(x, non_blocking=True) if self.unit.dim() else self.unit.item()

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Logarithm of the unit."""
        return self.unit.to(x).log().expand_as(x)


@transform_to.register(Scaled)
@biject_to.register(Scaled)
def _to_scaled(constraint: Scaled) -> Transform:
    return _Units(constraint.unit)


@torch.no_grad()
def assign(module: PyroModule, name: str, value: Tensor) -> None:
    """Give a ``PyroParam`` attribute another value of the same shape, in place."""
    constraint, _ = module._pyro_params[name]
    parameter = getattr(module, name + "_unconstrained")
    parameter.copy_(transform_to(constraint).inv(value.to(parameter).reshape(parameter.shape)))


def scaled(value: Tensor, unit: float | Tensor) -> Any:
    """A ``PyroParam`` with the given value whose gradient steps are in multiples of `unit`."""
    return PyroParam(value.detach().clone(), Scaled(unit))
