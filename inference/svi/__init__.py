"""Stochastic variational inference: the training loop, the state of a run, and its optimizers."""

from pyro_nngp.inference.svi.loop import fit
from pyro_nngp.inference.svi.options import Checkpoint, Schedule, Validation
from pyro_nngp.inference.svi.result import ConvergenceWarning, FitResult
from pyro_nngp.inference.svi.row_adam import RowAdam
from pyro_nngp.inference.svi.run import DivergenceError

__all__ = [
    "Checkpoint",
    "ConvergenceWarning",
    "DivergenceError",
    "FitResult",
    "RowAdam",
    "Schedule",
    "Validation",
    "fit",
]
