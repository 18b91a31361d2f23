r"""One layer of a sparse Gaussian process whose inducing values (and optionally inputs) are Pyro sites.

With :math:`K_{zz} = L L^\top`, inducing values :math:`u = L \nu` and :math:`\nu \sim N(0, I)`, each output has
:math:`f(x) \mid \nu \sim N(a^\top \nu, v)`, :math:`a = L^{-1} k_z(x)` (:mod:`pyro_nngp.conditionals.inducing`).

Cost: O(M^3 + B M^2). Symbols: S draws of the inputs, H outputs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.nn import PyroSample
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_nngp.conditionals import whitened_conditional
from pyro_nngp.hyperparameters import GPModule
from pyro_nngp.inducing.priors import InducingPrior, inducing_prior
from pyro_nngp.kernels.binding import bind_double, check_covariance
from pyro_nngp.linalg import cholesky


class SparseLayer(GPModule):
    """Sites ``nu`` and, with a prior, ``z``; the conditional of the layer's outputs.

    Args:
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``.
        z: initial inducing inputs.
        outputs: () for one output without an extra dimension, or (H,).
        prior: prior of z, see :mod:`pyro_nngp.inducing.priors`; None makes z a parameter.
        skip: (D, H), the linear map of the inputs that is added to a hidden layer's outputs; None for the last layer.
        jitter: relative nugget.

    Attributes:
        event_dims: numbers of dimensions of one set of values of each site.

    Raises:
        ValueError, TypeError: if the prior is unknown or of another shape, or the kernel does not fit these inputs.
    """

    def __init__(
        self,
        kernel: Any,
        z: Float[Tensor, "M D"],
        outputs: tuple[int, ...],
        prior: InducingPrior | None,
        skip: Float[Tensor, "D H"] | None,
        jitter: float,
    ) -> None:
        super().__init__()
        check_covariance("BSGP", kernel, z)
        self.kernel, self.outputs, self.jitter = kernel, outputs, jitter
        self.register_buffer("start", z.detach().clone())
        self.register_buffer("skip", skip)
        self.event_dims = {"nu": 1 + len(outputs), "z": 2}
        self.nu = PyroSample(partial(SparseLayer.white))  # a partial, since Pyro renames functions
        if prior is None:
            self.z = nn.Parameter(z.detach().clone())
        else:
            prior_of_z = inducing_prior("BSGP", prior, tuple(z.shape))
            self.z = PyroSample(prior_of_z if isinstance(prior_of_z, Distribution) else partial(_of_layer, prior_of_z))

    def white(self) -> Distribution:
        """The prior of nu, standard normal over (M,) or (H, M)."""
        zero = self.start.new_zeros(*self.outputs, len(self.start))
        return dist.Normal(zero, 1.0).to_event(zero.dim())

    def forward(self, x: Float[Tensor, "... B D"]) -> tuple[Float[Tensor, "... B"], Float[Tensor, "... B"]]:
        """Means and variances of the outputs at x given nu, (..., B) or (..., H, B)."""
        a, var, _ = whitened_conditional(self.kernel, x, self.z, self.jitter)
        loc = self.nu @ a.mT
        return loc, (var[..., None, :] if self.outputs else var).expand(loc.shape)

    def hidden(self, x: Float[Tensor, "S B D"], noise: Float[Tensor, "S B H"] | None) -> Float[Tensor, "S B H"]:
        """A draw of the output of a hidden layer, from standard normal noise; None draws the noise."""
        loc, var = self(x)
        noise = torch.randn_like(loc.mT) if noise is None else noise
        return x @ self.skip + loc.mT + var.mT.sqrt() * noise

    def joint(self, x: Float[Tensor, "P D"], count: int) -> Float[Tensor, "S *H P"]:
        """Draws of the outputs at x from the exact process given nu, correlated between points; O(P^3), in float64."""
        points, cov = x.double(), bind_double(self.kernel, x.dtype)
        a, var, _ = whitened_conditional(cov, points, self.z.double(), self.jitter)
        rest = cov(points, points) - a @ a.mT
        rest.diagonal(dim1=-2, dim2=-1).copy_(var)
        loc = self.nu.double() @ a.mT
        noise = torch.randn(count, *loc.shape, dtype=loc.dtype, device=loc.device)
        return (loc + noise @ cholesky(rest, 0.0).mT).to(x)


def stacked_layers(
    kernels: Sequence[Any],
    z: Float[Tensor, "M D"],
    axes: Float[Tensor, "D H"],
    outputs: tuple[int, ...],
    prior: InducingPrior | None,
    jitter: float,
) -> list[SparseLayer]:
    """Layers of a deep process (or its only layer): all but the last have H outputs.

    Args:
        kernels: one per layer.
        z: initial inducing inputs of the first layer; the other layers start at its images along `axes`.
        axes: linear map from D inputs to H hidden values, which is added to the outputs of hidden layers.
        outputs: shape of the outputs of the last layer, () or (T,).
        prior: of the inducing inputs of each layer.
        jitter: relative nugget.
    """
    layers = []
    for kernel in kernels[:-1]:
        layers.append(SparseLayer(kernel, z, axes.shape[1:], prior, axes, jitter))
        z, axes = z @ axes, torch.eye(axes.shape[1]).to(axes)
    return [*layers, SparseLayer(kernels[-1], z, outputs, prior, None, jitter)]


def leading_axes(x: Float[Tensor, "N D"], width: int) -> Float[Tensor, "D H"]:
    """The identity, padded with zeros to a larger width; the principal axes of x for a smaller one."""
    if width >= x.shape[1]:
        return torch.eye(x.shape[1], width).to(x)
    return torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh[:width].mT.contiguous()


def _of_layer(prior: Callable[[Any, Tensor], Distribution], layer: SparseLayer) -> Distribution:
    return prior(layer.kernel, layer.start)
