"""A covariance function as a value: its hyperparameters have been read, and evaluating it has no Pyro effects.

Symbols: n, m points of the two blocks, D input columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._kinds import takes
from pyro_nngp.kernels.radial import Radial

KernelLike = Callable[[Tensor, Tensor], Tensor]
"""Anything that maps x (..., n, D) and z (..., m, D) to a covariance block (..., n, m)."""


@dataclass(frozen=True)
class Covariance:
    """A covariance function whose hyperparameters have been read; evaluating it has no Pyro effects.

    ``cov(x, z)`` is the block of shape (..., n, m), ``cov.diag(x)`` the variances (..., n) at x (..., n, D). ``radial``
    is given where the function is a stationary kernel or a sum of products of such, for code that can do better than
    evaluate blocks. Where the hyperparameters have batch dimensions, the dimensions of results begin with them;
    ``batch_shape`` is their shape, None where only an evaluation shows it. ``whole`` is given where the function is
    that of a residual.
    """

    block: KernelLike
    diag: Callable[[Tensor], Tensor]
    radial: Radial | None = None
    batch_shape: torch.Size | None = torch.Size()
    whole: "Whole | None" = None

    def __call__(self, x: Float[Tensor, "... n D"], z: Float[Tensor, "... m D"]) -> Float[Tensor, "..."]:
        """Covariances (*S, ..., n, m) of rows of x with rows of z, which autograd may need: do not change them."""
        return self.block(x, z)

    def nugget(self, x: Float[Tensor, "... n D"]) -> Float[Tensor, "..."]:
        """The variances that a relative nugget multiplies: those of the process, where this is its residual."""
        return self.diag(x) if self.whole is None else self.whole.kernel.diag(x[..., : self.whole.dim])

    def shifted(self, count: int) -> "Covariance":
        """Covariance with `count` batch dimensions of size 1 added at the right, or removed if negative.

        Batches of hyperparameters carry such dimensions for plates of a program that enclose only the data.
        """
        if not self.batch_shape or not count:
            return self
        rank, stop = len(self.batch_shape), len(self.batch_shape) + min(count, 0)
        ones = (1,) * count

        def leading(value: Tensor) -> Tensor:
            return value.reshape(*value.shape[:stop], *ones, *value.shape[rank:])

        def of_part(value: Tensor, own: int) -> Tensor:
            batch = value.shape[: value.dim() - own]
            kept = batch[: max(0, len(batch) + min(count, 0))]
            return value.reshape((*kept, *(ones if batch else ()), *value.shape[len(batch) :]))

        parts = self.radial
        if parts is not None:
            scale = parts.lengthscale
            scale = of_part(scale, min(1, scale.dim()))
            smoothness = None if parts.smoothness is None else of_part(parts.smoothness, parts.profile.rank)
            variance = of_part(parts.variance, parts.profile.rank)
            parts = parts._replace(lengthscale=scale, variance=variance, smoothness=smoothness)
        batch = (*self.batch_shape[:stop], *ones)
        return Covariance(
            lambda x, z: leading(self.block(x, z)), lambda x: leading(self.diag(x)), parts, torch.Size(batch)
        )


class Whole(NamedTuple):
    """The process of a residual, whose points have the values of its low-rank features as further columns."""

    kernel: Covariance
    dim: int
    """Number of columns before the features."""


def covariance_of(kernel: KernelLike) -> Covariance:
    """A function of two blocks of points as a covariance function, whose variances are blocks of one point.

    Raises:
        TypeError: if ``kernel`` is not callable, or returns something other than a tensor.
        ValueError: if it returns a tensor whose shape does not end in (n, m).
    """
    check_function("bind", kernel)

    def block(x: Tensor, z: Tensor) -> Tensor:
        value = kernel(x, z)
        if not isinstance(value, Tensor):
            cure = "Convert lazy matrices inside the callable, e.g. with .to_dense()."
            fail("bind", "kernel(x, z)", "to be a torch.Tensor", type(value).__name__, cure, TypeError)
        sizes = (x.shape[-2], z.shape[-2])
        if value.shape[-2:] != sizes:
            cure = "The callable has to map (..., n, D) and (..., m, D) to (..., n, m)."
            fail("bind", "kernel(x, z)", f"of shape (..., n, m) with (n, m) = {sizes}", tuple(value.shape), cure)
        return value

    def diag(x: Tensor) -> Tensor:
        point = x[..., None, :]
        return block(point, point)[..., 0, 0]

    return Covariance(block, diag, batch_shape=None)


def joint_batch_shape(*covs: Covariance) -> torch.Size | None:
    """Joint batch shape of covariance functions; None if it is unknown for one of them."""
    shapes = [cov.batch_shape for cov in covs]
    return None if None in shapes else torch.broadcast_shapes(*(shape for shape in shapes if shape is not None))


def check_function(where: str, kernel: Any) -> None:
    """Raise ``TypeError`` unless ``kernel`` is callable with two arguments."""
    if not callable(kernel) or isinstance(kernel, type):
        actual = kernel.__name__ if isinstance(kernel, type) else type(kernel).__name__
        fail(where, "kernel", "to be a Kernel or a callable", actual, "Pass an instance, such as RBF(2).", TypeError)
    if not takes(kernel, 2):
        actual = f"{type(kernel).__name__}, which does not take two arguments"
        cure = "Pass a kernel such as RBF(2), and name other parts, as in likelihood= and mean=."
        fail(where, "kernel", "to be a covariance function of x and z", actual, cure, TypeError)
