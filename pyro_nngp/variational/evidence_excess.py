r"""What the evidence of Gaussian sites has beyond its approximation by minibatches, to first order in the parameters.

A minibatch can evaluate Vecchia's approximation of the *observations*, which conditions each on K noisy ones. Where
noise is large, K of them say little: on 1,000 labels with K = 20 it is 15 to 21 nats too low, by different amounts
along the ridge of variance and lengthscale, while the evidence under the prior of *latent values*
(:mod:`pyro_nngp.variational.latent_evidence`) is within 1 nat of the dense value
(``benchmarks/results/beside_gpboost.md``). With :math:`\theta_0` the parameters at the last solution for the sites, the
objective between solutions is

.. math:: \log Z_\text{obs}(\theta) + [\log Z - \log Z_\text{obs}](\theta_0)
   + (\theta - \theta_0)^\top \nabla [\log Z - \log Z_\text{obs}](\theta_0),

whose stationary points are those of log Z once solutions no longer move.

Cost: that of the gradient of log Z and one pass over the data, O(N K^3), per call of :meth:`EvidenceExcess.update`.
Symbols: N points, K neighbors, L latent functions, P numbers in the parameters.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import bind_double
from pyro_nngp.linalg.gaussian_sampling import DENSE_UP_TO
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.latent_evidence import ConditionalGradient, conditional_gradient, latent_log_evidence

_ROWS = 4096  # rows whose conditionals are differentiated at once


class EvidenceExcess(nn.Module):
    """Value and gradient of the difference, kept as buffers.

    Args:
        kernel: of the prior.
        graph: neighbors of the prior.
        jitter: relative nugget of the prior.
        parameters: a function that returns what the kernel depends on: its parameters and those of the guides of its
            priors.

    Attributes:
        place: the parameters at the last update, (P,).
        slope: the gradient there, (P,).
        value: the difference there. Beyond 1,000 points it is the line integral of the gradient since the first
            update, so that the losses of one run can be compared.
    """

    trained_buffers = frozenset({"place", "slope", "value"})  # do not identify a run

    place: Tensor
    slope: Tensor
    value: Tensor

    def __init__(
        self, kernel: Any, graph: NeighborGraph, jitter: float, parameters: Callable[[], Sequence[Tensor]]
    ) -> None:
        super().__init__()
        self._prior, self._depends_on = (kernel, graph, jitter), parameters
        zero = torch.zeros(sum(param.numel() for param in parameters()), dtype=torch.float64, device=graph.x.device)
        for name, start in (("place", zero), ("slope", zero.clone()), ("value", zero.new_zeros(()))):
            self.register_buffer(name, start)

    def forward(self) -> Float[Tensor, ""]:
        """The difference at the present parameters, to first order."""
        parameters = self._depends_on()
        move = _flattened(parameters) - self.place if parameters else self.place
        return self.value + move @ self.slope

    def update(
        self, target: Float[Tensor, "*L N"], precision: Float[Tensor, "*L N"], loc: Float[Tensor, "*L N"]
    ) -> None:
        """Find value and gradient at the present parameters.

        Args:
            target: sites of u.
            precision: their precisions.
            loc: posterior means of u.
        """
        (kernel, graph, jitter), every = self._prior, self._depends_on()
        free = [param for param in every if param.requires_grad]
        if not free:
            return
        with torch.no_grad():
            prior = NNGP(kernel, graph, jitter=jitter).factor.prepared()
            target, precision, loc = (part.double().reshape(-1, len(prior)) for part in (target, precision, loc))
            gradients = [conditional_gradient(prior, *parts) for parts in zip(loc, precision, strict=True)]
        with torch.enable_grad():
            bound = bind_double(kernel, graph.x.dtype)
            found, observed = excess_gradient(free, bound, graph, jitter, target, precision, gradients)
        by_param = dict(zip(map(id, free), found, strict=True))
        slope = _flattened([by_param.get(id(param), torch.zeros_like(param)) for param in every]).detach()
        place = _flattened(every).detach()
        if len(prior) <= DENSE_UP_TO:
            parts = zip(target, loc, precision, strict=True)
            self.value.fill_(sum(float(latent_log_evidence(prior, *part)) for part in parts) - observed)
        elif self.slope.any():
            self.value += (place - self.place) @ (slope + self.slope) / 2
        self.place.copy_(place)
        self.slope.copy_(slope)


def excess_gradient(
    parameters: Sequence[Tensor],
    kernel: Any,
    graph: NeighborGraph,
    jitter: float,
    target: Float[Tensor, "L N"],
    precision: Float[Tensor, "L N"],
    gradients: Sequence[ConditionalGradient],
) -> tuple[list[Tensor], float]:
    """By how much the gradient of log Z exceeds that of the evidence of the observations, and the value of the latter.

    Args:
        parameters: what the kernel depends on, P numbers in total.
        kernel: bound, with values in double precision.
        graph: the points and their neighbors.
        jitter: relative nugget.
        target: sites of each latent function.
        precision: their precisions.
        gradients: of log Z in the conditionals, for each latent function.
    """
    x, noise = graph.x.double(), 1 / precision.double()
    found, value = [torch.zeros_like(param, dtype=torch.float64) for param in parameters], 0.0
    w_bar, var_bar = (sum(parts) for parts in zip(*gradients, strict=True))
    for rows in torch.arange(len(x), device=x.device).split(_ROWS):
        near = graph.neighbors[rows]
        w, var = graph_conditional(kernel, x[rows], x, near, jitter=jitter)
        latent = (w_bar[rows] * w).sum() + (var_bar[rows] * var).sum()
        w, var = graph_conditional(kernel, x[rows], x, near, noise, jitter)
        spread = var + noise[:, rows]
        error = target[:, rows] - (w * target[:, near.clamp(min=0)]).sum(-1)
        observed = -0.5 * (error.square() / spread + (2 * math.pi * spread).log()).sum()
        parts = torch.autograd.grad(latent - observed, parameters, retain_graph=True, allow_unused=True)
        found = [total if part is None else total + part for total, part in zip(found, parts, strict=True)]
        value += float(observed.detach())
    return found, value


def _flattened(values: Sequence[Tensor]) -> Float[Tensor, " P"]:
    """All numbers of some tensors, in double precision."""
    return torch.cat([value.reshape(-1).double() for value in values])
