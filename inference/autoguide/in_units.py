"""Parameters of which optimizers take steps in given units.

Adam's steps are as long as its learning rate, whatever the gradient. A mean in units of its standard deviation moves by
a small part of it, with few data or many.
"""

from typing import Any

from torch import Tensor
from torch.distributions import AffineTransform, biject_to, constraints, transform_to


class InUnits(constraints.Constraint):
    """Real numbers; their unconstrained values are multiples of units.

    Args:
        unit: the units, positive.
    """

    def __init__(self, unit: Tensor) -> None:
        self.unit = unit
        super().__init__()

    def check(self, value: Any) -> Any:
        """Whether values are numbers."""
        return value == value


@biject_to.register(InUnits)
@transform_to.register(InUnits)
def _in_units(constraint: InUnits) -> AffineTransform:
    return AffineTransform(0.0, constraint.unit)
