"""Kernels without parts and with varying lengthscales, and their names in tests."""

from typing import Any

from builders import tensor
from torch import Tensor

from pyro_nngp.kernels import (
    RBF,
    ArcCosine,
    Constant,
    Cosine,
    Gneiting,
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


def name_of(value: Any) -> str:
    return type(value).__name__ if isinstance(value, Kernel) else getattr(value, "__name__", str(value))


def growing(x: Tensor) -> Tensor:
    """A factor of lengthscales."""
    return (0.8 * x[..., 0]).exp()


def space_time(cls: type[Kernel] = Matern32) -> Gneiting:
    kern = cls(2, 1.5, tensor(0.5, 2.0), active_dims=[0, 2])
    return Gneiting(kern, 1, timescale=0.7, interaction=0.8, exponent=0.6, decay=0.4)
