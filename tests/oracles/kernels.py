"""Kernels without parts, inputs of kernels, their names in tests, and kernels bound on their own."""

from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_nngp.kernels import (
    RBF,
    ArcCosine,
    Constant,
    Cosine,
    Covariance,
    Kernel,
    Linear,
    Matern,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    Wendland,
)

STATIONARY = [RBF, Matern12, Matern32, Matern52, Matern, Wendland, RationalQuadratic, Periodic]
PLAIN = [*STATIONARY, Constant, Cosine, Linear, ArcCosine]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def points(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def fresh(kernel: Kernel) -> Covariance:
    """Bind with an empty parameter store: kernels outside any model would find each other's values there."""
    pyro.clear_param_store()
    return kernel.bind()


def name_of(value: Any) -> str:
    return type(value).__name__ if isinstance(value, Kernel) else getattr(value, "__name__", str(value))
