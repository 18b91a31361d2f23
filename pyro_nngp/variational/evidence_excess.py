r"""Difference of the evidence of Gaussian sites and its approximation by minibatches, to first order in parameters.

A minibatch can evaluate Vecchia's approximation of the *observations*, which conditions each on K noisy ones. Where
noise is large, K of them say little: on 1,000 labels with K = 20 it is 15 to 21 nats too low, by different amounts
along the ridge of variance and lengthscale, while the evidence under the prior of *latent values*
(:mod:`pyro_nngp.variational.latent_evidence`) is within 1 nat of the dense value
(``benchmarks/results/beside_gpboost.md``). With Gaussian noise and many inputs it can rise along the ridge where the
exact evidence falls: on elevators (18 inputs, K = 32) it costs .04 nats per test row.

The difference depends on all that the sites depend on: the kernel, and with Gaussian noise, whose sites are the data,
also the noise and the mean function. With :math:`\theta_0` the parameters at the last solution for the sites, the
objective between solutions is

.. math:: \log Z_\text{obs}(\theta) + [\log Z - \log Z_\text{obs}](\theta_0)
   + (\theta - \theta_0)^\top \nabla [\log Z - \log Z_\text{obs}](\theta_0),

which has the stationary points of log Z once solutions no longer move. Where the difference is large, parameters run
away along the linear term between two solutions, and training goes back and forth. So
:math:`-\sum_i |g_i| (\theta - \theta_0)_i^2 / 2r` with r = 0.5 is added, which changes neither value nor gradient at
:math:`\theta_0`, and so no stationary point.

Cost: the gradient of log Z and one pass over the data, O(N K^3), per call of :meth:`EvidenceExcess.update`.
Symbols: N points, K neighbors, L latent functions, P numbers in the parameters.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.kernels import bind
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.linalg.gaussian_sampling import DENSE_UP_TO
from pyro_nngp.linalg.multifrontal import MultifrontalFactor
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.factored_posterior import FactoredPosterior
from pyro_nngp.variational.factors import prior_factor
from pyro_nngp.variational.latent_evidence import EvidenceGradient, evidence_gradient, latent_log_evidence

_ROWS = 4096  # rows whose conditionals are differentiated at once
_MOVES = 0.1, 1.0  # of a parameter since the last update that call for another: least, and where the slope is small
_RADIUS = 0.5  # move of a parameter at which its part of the linear term is largest
_SMALL = 1e-3  # nats per point of a small slope, summed over the parameters


class EvidenceExcess(nn.Module):
    """Value and gradient of the difference at some parameters, kept as buffers.

    Args:
        parameters: what the evidence depends on, P numbers in total; only their sizes and device are kept.

    Attributes:
        place: the parameters at the last update, (P,).
        slope: the gradient there, (P,).
        value: the difference there. Where it is not computed, it is the line integral of the gradient since the first
            update, so that the losses of one run can be compared.
        due: whether the next call must update, wherever the parameters are.
    """

    trained_buffers = frozenset({"place", "slope", "value", "due"})  # do not identify a run

    place: Tensor
    slope: Tensor
    value: Tensor
    due: Bool[Tensor, ""]

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        device = parameters[0].device if parameters else None
        zero = torch.zeros(sum(param.numel() for param in parameters), dtype=torch.float64, device=device)
        for name, start in (("place", zero), ("slope", zero.clone()), ("value", zero.new_zeros(()))):
            self.register_buffer(name, start)
        self.register_buffer("due", torch.tensor(True, device=device))

    def forward(self, parameters: Sequence[Tensor]) -> Float[Tensor, ""]:
        """The difference at the present parameters, to first order near the last update."""
        move = _flattened(parameters) - self.place if parameters else self.place
        return self.value + move @ self.slope - move.square() @ self.slope.abs() / (2 * _RADIUS)

    @torch.enable_grad()
    def update(
        self, parameters: Sequence[Tensor], find: Callable[[Sequence[Tensor]], "Excess"], num_values: int
    ) -> None:
        """Find value and gradient at the present parameters.

        Beyond 1,000 values the ones of the last update are kept while no parameter has moved by 0.1, or by more if the
        gradient is small: it changes by less than its errors.

        Args:
            parameters: what the evidence depends on.
            find: maps the parameters that are trained to the difference of the evidences.
            num_values: number of latent values.
        """
        free, place = [param for param in parameters if param.requires_grad], _flattened(parameters).detach()
        if not free or not (num_values <= DENSE_UP_TO or self._has_moved(place, num_values)):
            return
        gradient, value = find(free)
        by_param = dict(zip(map(id, free), gradient, strict=True))
        slope = _flattened([by_param.get(id(param), torch.zeros_like(param)) for param in parameters]).detach()
        if value is not None:
            self.value.fill_(value)
        elif self.slope.any():
            self.value += (place - self.place) @ (slope + self.slope) / 2
        self.place.copy_(place)
        self.slope.copy_(slope)
        self.due.fill_(False)

    def _has_moved(self, place: Float[Tensor, " P"], num_values: int) -> bool:
        """Whether the gradient at these parameters may differ from the present one."""
        least = (_SMALL * num_values / self.slope.abs().sum()).clamp(*_MOVES)
        return bool(self.due) or bool((place - self.place).abs().max() >= least)


class Excess(NamedTuple):
    """The gradient of the difference in some parameters, and its value; None beyond 1,000 values without a factor."""

    gradient: Sequence[Tensor]
    value: float | None


def site_excess(
    parameters: Sequence[Tensor],
    kernel: Any,
    graph: NeighborGraph,
    jitter: float,
    target: Float[Tensor, "*L N"],
    precision: Float[Tensor, "*L N"],
    loc: Float[Tensor, "*L N"],
    posterior: FactoredPosterior | None = None,
) -> Excess:
    """The difference for sites of each latent function.

    Args:
        parameters: what kernel and sites depend on, P numbers in total.
        kernel: covariance function.
        graph: the points and their neighbors, whose halo the sites have too on several processes.
        jitter: relative nugget.
        target: sites of u, with gradients where they depend on parameters.
        precision: their precisions.
        loc: posterior means of u.
        posterior: by a sparse factor, for an exact gradient; None has one from draws beyond 1,000 points.
    """
    target, precision, loc = (part.reshape(-1, len(graph.x)) for part in (target, precision, loc))
    with torch.no_grad():
        prior = prior_factor(bind(kernel), graph, jitter)
        own = (part[:, : graph.num_points] for part in (target, loc, precision))
        parts = list(zip(*own, strict=True))
        factors: list[MultifrontalFactor | None] = [None] * len(parts)
        if posterior is not None:
            factors = [posterior.factor(cast(VecchiaFactor, prior), tau) for _, _, tau in parts]
        each = [(t, m, tau, factor) for (t, m, tau), factor in zip(parts, factors, strict=True)]
        gradients = [evidence_gradient(prior, t, m, tau, factor=factor) for t, m, tau, factor in each]
    bound = bind_double(kernel, graph.x.dtype)
    gradient, observed = excess_gradient(parameters, bound, graph, jitter, target, precision, gradients)
    if posterior is None and len(prior) > DENSE_UP_TO:
        return Excess(gradient, None)
    with torch.no_grad():
        value = sum(float(latent_log_evidence(prior, *one)) for one in each)
    return Excess(gradient, value - observed)


def excess_gradient(
    parameters: Sequence[Tensor],
    kernel: Any,
    graph: NeighborGraph,
    jitter: float,
    target: Float[Tensor, "L N"],
    precision: Float[Tensor, "L N"],
    gradients: Sequence[EvidenceGradient],
) -> tuple[list[Tensor], float]:
    """Gradient of log Z less the gradient of the evidence of the observations, and the value of that evidence.

    Args:
        parameters: what kernel and sites depend on, P numbers in total.
        kernel: bound, with values in double precision.
        graph: the points and their neighbors.
        jitter: relative nugget.
        target: sites of each latent function, with gradients where they depend on parameters.
        precision: their precisions.
        gradients: of log Z, for each latent function.
    """
    x, value, count, (w_bar, var_bar, *site_bars) = (
        graph.x.double(),
        0.0,
        graph.num_points,
        zip(*gradients, strict=True),
    )
    w_bar, var_bar, sites = sum(w_bar), sum(var_bar), (target, precision)
    target, precision = (part.detach().double().requires_grad_() for part in sites)
    inputs = [*parameters, target, precision]
    padded = (pad(torch.stack(bars), (0, len(x) - count)) for bars in site_bars)
    totals = [*(torch.zeros_like(part, dtype=torch.float64) for part in parameters), *padded]
    for rows in torch.arange(count, device=x.device).split(_ROWS):
        near, noise = graph.neighbors[rows].long(), 1 / precision
        w, var = graph_conditional(kernel, x[rows], x, near, jitter=jitter)
        latent = (w_bar[rows] * w).sum() + (var_bar[rows] * var).sum()
        w, var = graph_conditional(kernel, x[rows], x, near, noise, jitter)
        spread = var + noise[:, rows]
        error = target[:, rows] - (w * target[:, near.clamp(min=0)]).sum(-1)
        observed = -0.5 * (error.square() / spread + (2 * math.pi * spread).log()).sum()
        parts = torch.autograd.grad(latent - observed, inputs, retain_graph=True, allow_unused=True)
        totals = added(totals, parts)
        value += float(observed.detach())
    *totals, of_target, of_precision = totals
    moving = [
        (site, bar.to(site)) for site, bar in zip(sites, (of_target, of_precision), strict=True) if site.requires_grad
    ]
    if moving:
        parts = torch.autograd.grad(
            [site for site, _ in moving], parameters, [bar for _, bar in moving], retain_graph=True, allow_unused=True
        )
        totals = added(totals, parts)
    *sums, value_of_all = graph.total(torch.cat([_flattened(totals), x.new_tensor([value])])).split(
        [*(part.numel() for part in totals), 1]
    )
    return [total.view_as(part) for total, part in zip(sums, totals, strict=True)], float(value_of_all)


def added(totals: Sequence[Tensor], parts: Sequence[Tensor | None]) -> list[Tensor]:
    """Sums of gradients; None is zero."""
    return [total if part is None else total + part for total, part in zip(totals, parts, strict=True)]


def _flattened(values: Sequence[Tensor]) -> Float[Tensor, " P"]:
    """All numbers of some tensors, in double precision."""
    return torch.cat([value.reshape(-1).double() for value in values])
