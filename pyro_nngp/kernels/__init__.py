r"""Covariance functions on batches of input blocks, ``(..., n, D), (..., m, D) -> (..., n, m)``.

A :class:`Kernel` is a ``PyroModule`` that owns hyperparameters, named as in ``pyro.contrib.gp.kernels``. Reading them
has Pyro effects (``pyro.param``, ``pyro.sample``), so it happens in one place: :meth:`Kernel.bind` reads them once and
returns a :class:`Covariance`, a plain function that can be evaluated on as many blocks as needed. Any other function of
that shape is a kernel too; :func:`bind` wraps it.

Distances are computed from differences after moving the origin to a point of the block, so that close points far from
the origin keep their distance in float32.

Differs from ``pyro.contrib.gp.kernels``: batch dimensions, distances from differences, finite gradients at zero.
Cost: O(n m D) per block. Symbols: D = ``input_dim``, \ell lengthscale, \sigma^2 variance, r the distance after scaling.
"""

from pyro_nngp.kernels.base import Kernel, Product, Sum, Wrapper
from pyro_nngp.kernels.binding import bind
from pyro_nngp.kernels.covariance import Covariance
from pyro_nngp.kernels.elementary import ArcCosine, Constant, Cosine, Linear, VerticalScaling
from pyro_nngp.kernels.gibbs import Gibbs
from pyro_nngp.kernels.matern import Matern
from pyro_nngp.kernels.metric import KernelMetric, neighbor_metric
from pyro_nngp.kernels.space_time import Gneiting
from pyro_nngp.kernels.stationary import (
    RBF,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    Stationary,
    Wendland,
)
from pyro_nngp.kernels.warped import Rotation, Warped

__all__ = [
    "RBF",
    "ArcCosine",
    "Constant",
    "Cosine",
    "Covariance",
    "Gibbs",
    "Gneiting",
    "Kernel",
    "KernelMetric",
    "Linear",
    "Matern",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "Product",
    "RationalQuadratic",
    "Rotation",
    "Stationary",
    "Sum",
    "VerticalScaling",
    "Warped",
    "Wendland",
    "Wrapper",
    "bind",
    "neighbor_metric",
]
