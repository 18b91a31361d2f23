r"""The evidence of sites of several outputs under nearest-neighbor priors of latent values, and its gradient.

As for one function (:mod:`pyro_nngp.variational.latent_evidence`): sites :math:`t_{pi}` of the outputs
:math:`f_{pi} = a_{pi}^\top u(x_i)` with precisions :math:`\tau_{pi}` have the evidence

.. math:: \log Z = -\tfrac12 \Big[ \log|P| - \sum_l \log|\Lambda_l| + \sum_{p,i} \big( \tau_{pi}\, t_{pi}
   (t_{pi} - \bar f_{pi}) - \log \tau_{pi} + \log 2\pi \big) \Big], \qquad
   P = \mathrm{blockdiag}_l \Lambda_l + \mathrm{blockdiag}_i\, A_i^\top \mathrm{diag}(\tau_i) A_i ,

with the posterior mean m of u and :math:`\bar f = A m`. Under :math:`q(u) = N(m, P^{-1})` with the covariances
:math:`C_i` at a point, the gradients in the conditionals of each latent function are as for one function, and

.. math:: \frac{\partial \log Z}{\partial t} = -\tau (t - \bar f), \quad
   \frac{\partial \log Z}{\partial \tau} = \tfrac12 \big( \tau^{-1} - (t - \bar f)^2 - a^\top C a \big), \quad
   \frac{\partial \log Z}{\partial a} = \tau \big( (t - \bar f)\, m - C a \big)

at each output and point. Outputs that are missing have the precision 0 and add nothing.

Cost: a sparse factorization with its moments, or up to 3,000 latent values O((N L)^3); elsewhere 2 to 32 solutions by
conjugate gradients, O(N L (K + T)) per iteration. Symbols: N points, K neighbors, T outputs, L latent functions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions.coregionalized import CoregionalizedPosterior
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.evidence_excess import Excess, added
from pyro_nngp.variational.latent_evidence import (
    TOLERANCE,
    Moments,
    controlled,
    moments_of_covariance,
    moments_of_products,
    number_of_draws,
    prior_gradient,
)

_ROWS = 1024  # rows whose conditionals are differentiated at once


class CoregionalizedGradient(NamedTuple):
    """Gradient of log Z: in weights (N, K) and variances (N,) of each latent function, in sites and loadings."""

    w: list[Tensor]
    var: list[Tensor]
    target: Float[Tensor, "T N"]
    precision: Float[Tensor, "T N"]
    loading: Float[Tensor, "N T L"]


class _Central(NamedTuple):
    """Central moments under q(u): of each latent function; covariances of outputs and latent values; variances."""

    each: list[Moments]
    cross: Float[Tensor, "N T L"]
    variance: Float[Tensor, "T N"]


def coregionalized_gradient(
    posterior: CoupledPosterior, target: Float[Tensor, "T N"], loc: Float[Tensor, "L N"], seed: int = 0
) -> CoregionalizedGradient:
    """The gradient of log Z.

    Args:
        posterior: priors, loadings and precisions of the sites.
        target: t, 0 where an output is missing.
        loc: posterior mean m of the latent values.
        seed: of the draws.
    """
    target, loc, precision = target.double(), loc.double(), posterior.precision
    central = _exact(posterior) if posterior.is_direct else _drawn(posterior, seed)
    of_prior = [prior_gradient(*parts) for parts in zip(posterior.factors, loc, central.each, strict=True)]
    seen = precision > 0
    error = (target - posterior.at(loc)) * seen
    in_precision = (1 / torch.where(seen, precision, 1.0) - error.square() - central.variance) / 2 * seen
    in_loading = precision.mT[..., None] * (error.mT[..., None] * loc.mT[:, None] - central.cross)
    w, var = ([*parts] for parts in zip(*of_prior, strict=True))
    return CoregionalizedGradient(w, var, -precision * error, in_precision, in_loading)


def coregionalized_log_evidence(
    posterior: CoupledPosterior, target: Float[Tensor, "T N"], loc: Float[Tensor, "L N"]
) -> Float[Tensor, ""]:
    """log Z by a factor of the posterior precision; arguments as of :func:`coregionalized_gradient`."""
    target, loc, precision = target.double(), loc.double(), posterior.precision
    seen = precision > 0
    log_det = posterior.log_det() - sum(factor.log_det() for factor in posterior.factors)
    quadratic = (precision * target * (target - posterior.at(loc))).sum()
    constants = seen.sum() * math.log(2 * math.pi) - torch.where(seen, precision, 1.0).log().sum()
    return -(log_det + quadratic + constants) / 2


class ExactCoregionalizedEvidence(torch.autograd.Function):
    """log Z as a differentiable function of loadings, pseudo-observations and the priors' conditionals.

    Arguments: a function that maps factors of the priors, loadings and precisions to the posterior; neighbors (N, K);
    loadings (N, T, L), targets (T, N) and precisions (T, N); weights (N, K) and variances (N,) of each latent function.
    """

    @staticmethod
    def forward(
        ctx: Any,
        posterior_at: Callable[[Sequence[VecchiaFactor], Tensor, Tensor], CoupledPosterior],
        neighbors: Tensor,
        loading: Tensor,
        target: Tensor,
        precision: Tensor,
        *conditionals: Tensor,
    ) -> Tensor:
        pairs = zip(conditionals[::2], conditionals[1::2], strict=True)
        factors = [VecchiaFactor(w.detach().double(), var.detach().double(), neighbors) for w, var in pairs]
        posterior = posterior_at(factors, loading.detach(), precision.detach())
        loc = posterior.mean(target.detach(), target.new_zeros(len(factors), len(neighbors)))
        if any(ctx.needs_input_grad):
            found = coregionalized_gradient(posterior, target.detach(), loc)
            of_conditionals = [part for pair in zip(found.w, found.var, strict=True) for part in pair]
            ctx.save_for_backward(found.loading, found.target, found.precision, *of_conditionals)
        return coregionalized_log_evidence(posterior, target.detach(), loc)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad * part for part in ctx.saved_tensors)


def coregionalized_excess(
    parameters: Sequence[Tensor],
    posterior_at: Callable[[Tensor | None], CoregionalizedPosterior],
    coupled: Callable[[Sequence[VecchiaFactor], Tensor, Tensor], CoupledPosterior] | None = None,
) -> Excess:
    """By how much log Z exceeds the evidence of the sites as observations, and its gradient.

    Args:
        parameters: what kernels, loadings and sites depend on.
        posterior_at: returns q(u) for some rows and their neighbors (None: all), with gradients, without an offset.
        coupled: maps factors of the priors, loadings and precisions to the posterior of all values, for one with a
            factor at hand; None makes a new one.
    """
    with torch.no_grad():
        whole = posterior_at(None)
        posterior = (coupled or CoupledPosterior)(whole.prior.factors(), whole.loading, whole.precision)
        of_evidence = coregionalized_gradient(posterior, whole.target, whole.loc)
    gradient, value = [torch.zeros_like(part, dtype=torch.float64) for part in parameters], 0.0
    for rows in torch.arange(len(of_evidence.loading), device=whole.loc.device).split(_ROWS):
        q = posterior_at(rows)
        observed = q.log_evidence(q.prior).sum()
        difference = _along(of_evidence, q, rows) - observed
        gradient = added(gradient, torch.autograd.grad(difference, parameters, retain_graph=True, allow_unused=True))
        value += float(observed.detach())
    if not posterior.is_direct:
        return Excess(gradient, None)
    with torch.no_grad():
        return Excess(gradient, float(coregionalized_log_evidence(posterior, whole.target, whole.loc)) - value)


def _along(gradient: CoregionalizedGradient, q: CoregionalizedPosterior, rows: Tensor) -> Tensor:
    """The inner product of a gradient with conditionals, sites and loadings of some rows."""
    targets, graph, jitter = q.prior.batch.targets, q.prior.priors[0].graph, q.prior.priors[0].jitter
    total = (gradient.target[:, rows] * q.target[:, targets]).sum()
    total = total + (gradient.precision[:, rows] * q.precision[:, targets]).sum()
    total = total + (gradient.loading[rows] * q.loading[targets]).sum()
    kernels = [prior.kernel for prior in q.prior.priors]
    return total + _along_conditionals(list(zip(gradient.w, gradient.var, strict=True)), kernels, graph, jitter, rows)


def _along_conditionals(
    gradient: Sequence[tuple[Tensor, Tensor]], kernels: Sequence[Any], graph: NeighborGraph, jitter: float, rows: Tensor
) -> Tensor:
    """The inner product of a gradient with the conditionals of some rows, of each function or of one kernel for all."""
    if len(kernels) == 1:
        w_bars, var_bars = zip(*gradient, strict=True)
        gradient = [(torch.stack(w_bars).sum(0), torch.stack(var_bars).sum(0))]
    x, near, total = graph.x.double(), graph.neighbors[rows], gradient[0][1].new_zeros(())
    for kernel, (w_bar, var_bar) in zip(kernels, gradient, strict=True):
        w, var = graph_conditional(bind_double(kernel, graph.x.dtype), x[rows], x, near, jitter=jitter)
        total = total + (w_bar[rows] * w).sum() + (var_bar[rows] * var).sum()
    return total


def parameters_gradient(
    parameters: Sequence[Tensor],
    gradient: Sequence[tuple[Float[Tensor, "N K"], Float[Tensor, " N"]]],
    kernels: Sequence[Any],
    graph: NeighborGraph,
    jitter: float,
) -> list[Tensor]:
    """Gradient in parameters of kernels from the one in weights and variances of each latent function's conditionals.

    Args:
        parameters: of the kernels, and others.
        gradient: in the conditionals.
        kernels: bound, with gradients; one for each latent function or one for all.
        graph: the points and their neighbors.
        jitter: relative nugget.
    """
    total = [torch.zeros_like(part, dtype=torch.float64) for part in parameters]
    for rows in torch.arange(graph.num_points, device=graph.x.device).split(_ROWS):
        with torch.enable_grad():
            value = _along_conditionals(gradient, kernels, graph, jitter, rows)
        total = added(total, torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True))
    return total


def _exact(posterior: CoupledPosterior) -> _Central:
    factors, a = posterior.factors, posterior.loading
    if posterior.is_dense:
        cov = posterior.dense_covariance
        each = [moments_of_covariance(factor, cov[i, :, i]) for i, factor in enumerate(factors)]
    else:
        products = posterior.sparse.moments[1][:-1]
        each = [moments_of_products(*parts) for parts in zip(factors, products, strict=True)]
    at_points = posterior.covariances()
    return _Central(each, a @ at_points, torch.einsum("ntl,nlk,ntk->tn", a, at_points, a))


def _drawn(posterior: CoupledPosterior, seed: int) -> _Central:
    """Averages over draws; control variates as of one function."""
    a, precision, size = posterior.loading, posterior.precision, len(posterior.factors)
    generator, count = torch.Generator().manual_seed(seed), number_of_draws(size * len(a))

    def white(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float64).to(precision.device)

    of_data, of_prior = white(count, *precision.shape), white(count, size, len(a))
    draws = posterior.central_draws(of_data, of_prior, TOLERANCE)
    own = torch.stack([factor.var for factor in posterior.factors])
    strength = own * posterior.gram.diagonal(dim1=-2, dim2=-1).mT
    each = [controlled(f, draws[:, i], of_prior[:, i], strength[i]) for i, f in enumerate(posterior.factors)]
    outputs = torch.einsum("ntl,sln->stn", a, draws)
    at_data = precision * torch.einsum("ntl,ln->tn", a.square(), own)
    weight, seen = (at_data / (1 + at_data)).square(), precision > 0
    excess = (of_data.square().mean(0) - 1) / torch.where(seen, precision, 1.0)
    variance = outputs.square().mean(0) - weight * excess
    return _Central(each, torch.einsum("stn,sln->ntl", outputs, draws) / count, variance)
