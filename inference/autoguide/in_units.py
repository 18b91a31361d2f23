"""Parameters of which optimizers take steps in given units.

Adam's steps are as long as its learning rate, whatever the gradient. A mean in units of its standard deviation moves by
a small part of it, with few data or many.
"""

from typing import Any

import pyro
import torch
from torch import Tensor
from torch.distributions import AffineTransform, biject_to, constraints, transform_to

from pyro_nngp._checks import fail, warn


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


def take_stored(like: Tensor, loc: str, scale: str) -> tuple[Tensor, Tensor] | None:
    """Take a mean from Pyro's param store, with the standard deviations there as units; None if it has none.

    Args:
        like: a mean of the right shape.
        loc: name of the mean in the store.
        scale: name of the standard deviations in the store.

    Raises:
        ValueError: if the mean has another shape.

    Warns:
        UserWarning: if the store has one.
    """
    store = pyro.get_param_store()
    if loc not in store:
        return None
    cure = "Call pyro.clear_param_store() before the first call of a new guide."
    value, unit = store[loc].detach(), store[scale].detach() if scale in store else torch.ones_like(like)
    if value.shape != like.shape:
        shapes = f"{tuple(value.shape)}, of another program"
        fail("AutoNNGP", f"{loc!r} in Pyro's param store", f"of shape {tuple(like.shape)}", shapes, cure)
    warn(f"AutoNNGP: the hyperparameters start at {loc!r} in Pyro's param store. {cure}")
    del store[loc]
    return value, unit


@biject_to.register(InUnits)
@transform_to.register(InUnits)
def _in_units(constraint: InUnits) -> AffineTransform:
    return AffineTransform(0.0, constraint.unit)
