r"""Kernels of mapped inputs, :math:`k(w(x), w(z))`: deep kernels, rotated anisotropy.

The map is applied once to each point, not to each pair, and where the inner kernel is stationary the nearest-neighbor
conditional stays in compiled code. Cost: the inner kernel, and the map once per point. Symbols: D input columns, F
columns of the map.

Reference: Wilson, Hu, Salakhutdinov and Xing (2016), "Deep kernel learning".
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from pyro.nn import PyroParam, PyroSample, pyro_method
from torch import Tensor
from torch.distributions import constraints

from pyro_nngp._checks import check_number, check_tensor, fail
from pyro_nngp._kinds import check_callable
from pyro_nngp.hyperparameters import GPModule
from pyro_nngp.kernels.base import Kernel, Wrapper, check_kernel, in_dtype
from pyro_nngp.kernels.covariance import Covariance


class Warped(Wrapper):
    """k(w(x), w(z)), the kernel of inputs that a function has mapped.

    Args:
        kern: the kernel k, on the F columns that the map returns.
        warp: the map w, from inputs (..., n, D) to (..., n, F). A ``torch.nn.Module`` is trained and saved with the
            kernel; of a module of the package, such as :class:`Rotation`, hyperparameters may have priors.
        input_dim: number D of input columns.
        active_dims: indices of these columns, as in :class:`Kernel`.

    Raises:
        TypeError: if ``kern`` is not a :class:`Kernel`, or ``warp`` not callable.
        ValueError: if the map does not return a matrix for a matrix.
    """

    moves_inputs = True

    def __init__(
        self, kern: Kernel, warp: Callable[[Tensor], Tensor], input_dim: int, active_dims: Sequence[int] | None = None
    ) -> None:
        check_kernel("Warped", "kern", kern)
        check_callable("Warped", "warp", warp, "Pass a torch.nn.Module or a function of the inputs.", 1)
        super().__init__(kern, input_dim, active_dims)
        self.warp = warp

    @pyro_method
    def bind(self) -> Covariance:
        cov, warp = self.kern.bind(), self.warp.bind() if isinstance(self.warp, Rotation) else self.warp

        def mapped(x: Tensor) -> Tensor:
            return self._checked(warp, self._columns(x))

        def block(x: Tensor, z: Tensor) -> Tensor:
            left = mapped(x)
            return cov(left, left if z is x else mapped(z))

        parts = cov.radial
        if parts is not None:
            columns = parts.columns
            parts = parts._replace(columns=lambda x: columns(mapped(x)))
        return Covariance(block, lambda x: cov.diag(mapped(x)), parts, cov.batch_shape)

    def inner_inputs(self, x: Float[Tensor, "... n D"]) -> Float[Tensor, "... n F"]:
        return self._checked(self.warp, self._columns(x))

    def _checked(self, warp: Any, x: Tensor) -> Tensor:
        """w(x)."""
        y = in_dtype(warp, x.dtype)(x)
        if not isinstance(y, Tensor) or y.dim() != x.dim() or y.shape[:-1] != x.shape[:-1]:
            actual = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            fail("Warped", "warp", f"to map {tuple(x.shape)} to columns (..., n, F)", actual, "Return one row per row.")
        return y


class Rotation(GPModule):
    r"""A rotation of two columns, so that the lengthscales of a kernel lie along its axes: geometric anisotropy.

    .. math:: (x_1, x_2) \mapsto (x_1 \cos\theta + x_2 \sin\theta,\; x_2 \cos\theta - x_1 \sin\theta)

    ``Warped(Matern32(2), Rotation(), 2)`` is a Matérn kernel whose ranges and direction are learned. A quarter turn
    exchanges the axes, so the angle is one of several equivalent ones.

    Args:
        angle: :math:`\theta` [radians], counterclockwise from the first axis: a float, a ``PyroParam``, a
            ``PyroSample`` or a tensor of a running program.
    """

    def __init__(self, angle: float | Tensor | PyroParam | PyroSample = 0.3) -> None:
        super().__init__()
        given = isinstance(angle, Tensor | PyroParam | PyroSample)
        if not given:
            check_number("Rotation", "angle", angle, -math.inf, "Pass radians.")
        self.angle: Any = angle if given else PyroParam(torch.tensor(float(angle)), constraints.real)

    @pyro_method
    def bind(self) -> Callable[[Tensor], Tensor]:
        """Read the angle once; returns the plain function."""
        angle = self.angle
        if angle.dim():
            cure = "Take parallel=False, vectorize_particles=False."
            fail("Rotation", "angle", "to be a scalar, one at a time", tuple(angle.shape), cure)

        def rotate(x: Tensor) -> Tensor:
            check_tensor("Rotation", "x", x)
            if x.shape[-1:] != (2,):
                fail("Rotation", "x", "with 2 columns", tuple(x.shape), "Choose them with active_dims of Warped.")
            cos, sin = angle.to(x.dtype).cos(), angle.to(x.dtype).sin()
            return torch.stack([x[..., 0] * cos + x[..., 1] * sin, x[..., 1] * cos - x[..., 0] * sin], -1)

        return rotate

    def forward(self, x: Float[Tensor, "... 2"]) -> Float[Tensor, "... 2"]:
        return self.bind()(x)
