"""Present hyperparameters of any method as values, until all methods have ``bound()``; goes with ``models.tower``."""

from types import SimpleNamespace
from typing import Any


def bound_of(gp: Any) -> Any:
    """Kernel, likelihood and mean function of a method at the medians of its guide."""
    if hasattr(gp, "bound"):
        return gp.bound()
    kernel, likelihood, mean = gp.at_medians()
    return SimpleNamespace(kernel=kernel, likelihood=likelihood, mean=mean)
