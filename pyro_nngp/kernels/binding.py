"""Kernels and other callables as covariance functions: :func:`bind` reads the hyperparameters once.

Symbols: n, m points of the two blocks, D input columns.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp.kernels.base import Kernel, in_dtype
from pyro_nngp.kernels.covariance import Covariance, KernelLike, check_function, covariance_of


def bind(kernel: KernelLike) -> Covariance:
    """Read the hyperparameters of a :class:`Kernel` once, or wrap any other covariance function.

    Args:
        kernel: a :class:`Kernel`, or a callable ``(..., n, D), (..., m, D) -> (..., n, m)`` such as
            ``lambda x, z: gpytorch_kernel(x, z).to_dense()``. The variances of a callable are computed as blocks of one
            point.

    Raises:
        TypeError: if ``kernel`` is not callable, or returns something other than a tensor.
        ValueError: if a callable returns a tensor whose shape does not end in (n, m).
    """
    if isinstance(kernel, Kernel):
        return kernel.bind()
    if isinstance(kernel, Covariance):
        return kernel
    return covariance_of(kernel)


def bind_double(kernel: KernelLike, dtype: torch.dtype) -> Covariance:
    """Bind a kernel for float64 points and blocks, whatever the dtype of its weights.

    Modules such as deep kernels are evaluated in float64, with copies of their weights. Opaque callables are evaluated
    in `dtype`, with its precision.

    Args:
        kernel: as in :func:`bind`.
        dtype: dtype of the data and of the weights.
    """
    cov = bind(kernel)
    if isinstance(kernel, Kernel | Covariance):
        return cov
    parts = list(kernel.modules()) if isinstance(kernel, nn.Module) else []
    if parts and all(isinstance(part, Kernel) or not isinstance(part, PyroModule) for part in parts):
        return bind(in_dtype(kernel, torch.float64))
    return Covariance(
        lambda x, z: cov(x.to(dtype), z.to(dtype)).double(),
        lambda x: cov.diag(x.to(dtype)).double(),
        batch_shape=cov.batch_shape,
    )


def check_covariance(where: str, kernel: Any, x: Float[Tensor, "n D"] | None = None) -> None:
    """Raise unless ``kernel`` is callable with two arguments and, given x, acts on the columns of x."""
    if not isinstance(kernel, Kernel):
        check_function(where, kernel)
    elif x is not None:
        kernel.check_columns(x)


def check_kernels(where: str, kernels: Any) -> list[nn.Module]:
    """Return a list of kernels; raise ``TypeError`` unless they are a sequence of modules."""
    if not isinstance(kernels, Sequence) or not kernels or not all(isinstance(each, nn.Module) for each in kernels):
        cure = "Give one per latent function."
        fail(where, "kernels", "to be a sequence of kernels", f"{kernels!r:.40}", cure, TypeError)
    return list(kernels)
