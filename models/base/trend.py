r"""Coefficients of the mean function by generalized least squares, given the neighbors, and their uncertainty.

With basis functions b, weights w of preceding neighbors and variances v of the response model,

.. math:: \sum_j a_j a_j^\top \beta / v_j = \sum_j a_j (y_j - w_j^\top y_{n(j)}) / v_j, \qquad
   a_j = b(x_j) - \textstyle\sum_k w_{jk}\, b(x_{n(j)k}),

over the first 4,096 points in a random ordering: later points, with neighbors all around, say almost nothing about the
level. The inverse of the left side is the covariance of the coefficients, which predictions integrate over.
Coefficients with a normal prior have a posterior from all points: the prior's precision is added to the left side
(:mod:`pyro_nngp.coefficients`).

The covariance under a flat prior follows from the hyperparameters. It is computed when a prediction first needs it, and
kept (:class:`~pyro_nngp._versions.Kept`); its gradient in the hyperparameters is computed when it is asked for. With
q(u), which does not follow hyperparameters, it has none.

Cost: O(K^3) for each of these points.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp.bound import Bound
from pyro_nngp.coefficients import Trend, condition_coefficients
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.means import BasisMean

_POINTS = 4096


def can_solve_mean(method: Any) -> bool:
    """Whether :func:`solve_mean` applies: a mean that is linear in its coefficients, and Gaussian data.

    Coefficients with normal priors are solved for with any data, given auxiliary variables.
    """
    mean = method._modules.get("mean")
    if not isinstance(mean, BasisMean):
        return False
    return mean.has_posterior or (isinstance(method.likelihood, Gaussian) and mean.is_learned)


def solved_mean(method: Any) -> list[nn.Parameter]:
    """The parameters that :func:`solve_mean` sets."""
    return method._modules["mean"].solved_parameters() if can_solve_mean(method) else []


@torch.no_grad()
def solve_mean(method: Any) -> None:
    """Set the coefficients of the mean to their generalized least squares estimate, or their posterior.

    Raises:
        ValueError: unless :func:`can_solve_mean`.
    """
    mean: Any = method._modules.get("mean")
    if not can_solve_mean(method):
        where, cure = f"{type(method).__name__}.solve", "Train by gradients."
        expectation = "with Gaussian noise and a ConstantMean or LinearMean without prior, or with a normal one"
        fail(where, "model", expectation, type(mean).__name__, cure)
    posterior = method.posterior(method.bound())
    condition_coefficients(mean, *normal_equations(posterior, None if mean.has_posterior else _POINTS))


def normal_equations(
    posterior: Any, most: int | None = _POINTS
) -> tuple[Float[Tensor, "*L p p"], Float[Tensor, "*L p"]]:
    """The likelihood of the coefficients of the mean: precision and linear term, as a normal density.

    Args:
        posterior: of a method that integrates f out, at given hyperparameters.
        most: number of points; None is all.
    """
    bound, rows, graph = posterior.bound, posterior.rows, posterior.graph
    part = rows.preceding(graph, rows.num_rows if most is None else min(most, rows.num_rows), graph.metric)
    places, near = part.places, part.graph
    data, (obs, noise) = part.rows, posterior.on(part).observations(places)
    if data.offset is not None:
        obs = obs - data.offset[places].movedim(0, -1)
    x = data.x[places]
    w, var = graph_conditional(bound.covariance, x, x, near, noise, bound.jitter)
    near, scale = near.clamp(min=0), (var + noise).double().rsqrt()
    basis, w = bound.mean_function.basis(x).double(), w.double()
    a = (basis - (w[..., None, :] @ basis[near])[..., 0, :]) * scale[..., None]
    b = (obs - (w * obs[..., near]).sum(-1)).double() * scale
    right = (a.mT @ b[..., None])[..., 0]
    return (a.mT @ a).expand(*right.shape, a.shape[-1]), right


def bound_for_predictions(method: Any) -> Bound:
    """The present hyperparameters, with the coefficients of the mean that predictions integrate over."""
    bound = method.bound()
    if not isinstance(bound.mean_function, BasisMean):
        return bound
    if bound.mean_function.has_posterior:
        return replace(bound, trend=method.posterior(bound).find_trend())
    if not bound.mean_function.is_learned:
        return bound
    trend = method.kept("trend").get(bound.versions, lambda: _found(method, bound))
    if trend is not None and trend.gain is None and torch.is_grad_enabled():
        parameters = [parameter for parameter in method.parameters() if parameter.requires_grad]
        trend = replace(trend, root=_Recomputed.apply(method, trend.root, *parameters))
    return replace(bound, trend=trend)


@torch.inference_mode(False)  # later predictions need what is kept
@torch.no_grad()
def _found(method: Any, bound: Bound) -> Trend | None:
    return method.posterior(bound).find_trend()


class _Recomputed(torch.autograd.Function):
    """The root of a trend as a function of the parameters, computed again for its gradient."""

    @staticmethod
    def forward(ctx: Any, method: Any, root: Tensor, *parameters: Tensor) -> Tensor:
        ctx.method, ctx.parameters = method, parameters
        return root.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            root = ctx.method.posterior(ctx.method.bound()).find_trend().root
        return None, None, *torch.autograd.grad(root, ctx.parameters, gradient, allow_unused=True)


__all__ = ["bound_for_predictions", "can_solve_mean", "normal_equations", "solve_mean", "solved_mean"]
