"""Hyperparameters of kernels and likelihoods: positive parameters by default, priors wherever the user wants them."""

from typing import Any, TypeAlias

import torch
from pyro.nn import PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from pyro_nngp._checks import fail

Hyperparameter: TypeAlias = Tensor | float | int | PyroParam | PyroSample
"""A positive value (it becomes a ``PyroParam``), or a ``PyroParam`` or ``PyroSample``, which is taken as it is."""


def positive(where: str, arg: str, value: Hyperparameter | None, default: float = 1.0) -> Any:
    """A positive ``PyroParam``, or the user's own or prior, ready to become an attribute of a ``PyroModule``.

    Args:
        where: Name of the class, for the error message.
        arg: Name of the attribute, for the error message.
        value: Initial value; a ``PyroParam`` or ``PyroSample`` is returned as it is.
        default: Initial value if ``value`` is None.

    Raises:
        ValueError: The value is not positive, not finite, or not in floating point.
    """
    if isinstance(value, PyroParam | PyroSample):
        return value
    tensor = value if isinstance(value, Tensor) else torch.tensor(default if value is None else float(value))
    if not (tensor.is_floating_point() and bool((tensor > 0).all()) and bool(tensor.isfinite().all())):
        cure = "Pass a float or a float tensor."
        fail(where, arg, "to be positive and finite, in floating point", tensor.tolist(), cure)
    return PyroParam(tensor, constraints.positive)
