"""Stochastic variational inference: the training loop, the state of a run, and an optimizer of rows."""

from pyro_nngp.inference.svi.loop import FitResult, fit
from pyro_nngp.inference.svi.row_adam import RowAdam
from pyro_nngp.inference.svi.run import DivergenceError

__all__ = [
    "DivergenceError",
    "FitResult",
    "RowAdam",
    "fit",
]
