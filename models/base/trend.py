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

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp.bound import Bound
from pyro_nngp.coefficients import condition_coefficients
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.linalg import cholesky, half_solve
from pyro_nngp.linalg.neighbor_products import combined
from pyro_nngp.linalg.vecchia_factor import VecchiaFactor
from pyro_nngp.means import BasisMean
from pyro_nngp.rows import Rows

POINTS = 4096
"""Points that determine the coefficients of a mean without prior."""


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
    condition_coefficients(mean, *normal_equations(posterior, None if mean.has_posterior else POINTS))


def normal_equations(
    posterior: Any, most: int | None = POINTS
) -> tuple[Float[Tensor, "*L p p"], Float[Tensor, "*L p"]]:
    """The likelihood of the coefficients of the mean: precision and linear term, as a normal density.

    Args:
        posterior: of a method that integrates f out, at given hyperparameters.
        most: number of points; None is all.
    """
    low_rank = posterior.bound.low_rank
    columns = basis_and_features(posterior.bound.mean_function.basis, low_rank)
    a, b = whitened_rows(posterior, columns, lambda rows: rows.offset, most)
    precision, linear = a.mT @ a, (a.mT @ b[..., None])[..., 0]
    if low_rank is not None:
        precision, linear = without_low_rank(precision, linear, len(low_rank))
    return precision.expand(*linear.shape, linear.shape[-1]), linear


def basis_and_features(basis: Callable[[Tensor], Tensor] | None, low_rank: Any) -> Callable[[Tensor], Tensor]:
    """The basis functions of a mean and the features of a low-rank part, or one of the two, of inputs with both."""
    if basis is None:
        return low_rank.features_of
    if low_rank is None:
        return basis
    dim = low_rank.inducing.shape[1]
    return lambda inputs: torch.cat([basis(inputs[:, :dim]), low_rank.features_of(inputs)], -1)


class Conditionals(NamedTuple):
    """Observations given preceding ones, of some rows which these precede.

    Attributes:
        factor: weights and variances, in float64.
        data: the rows and others.
        places: the rows among these.
        x: inputs of the rows.
        obs: observations of f at the rows.
    """

    factor: VecchiaFactor
    data: Rows
    places: Int[Tensor, " n"]
    x: Float[Tensor, "n D"]
    obs: Float[Tensor, "*L n"]


def conditionals(posterior: Any, most: int | None = None) -> Conditionals:
    """Observations given preceding ones at the first points of the ordering.

    Args:
        posterior: of a method that integrates f out, at given hyperparameters.
        most: number of points; None is all.
    """
    bound, rows, graph = posterior.bound, posterior.rows, posterior.graph
    part = rows.preceding(graph, rows.num_rows if most is None else min(most, rows.num_rows), graph.metric)
    places, near = part.places, part.graph
    obs, noise = posterior.on(part).observations(places)
    x = bound.inputs(part.rows.x[places])
    w, var = graph_conditional(bound.residual, x, x, near, noise, bound.jitter)
    return Conditionals(VecchiaFactor(w.double(), (var + noise).double(), near), part.rows, places, x, obs)


def whitened_rows(
    posterior: Any, columns: Callable[[Tensor], Tensor], known: Callable[[Rows], Any], most: int | None = None
) -> tuple[Float[Tensor, "*#L n p"], Float[Tensor, "*L n"]]:
    """Columns and observations less the weighted ones at preceding neighbors, per standard deviation, in float64.

    Args:
        posterior: of a method that integrates f out, at given hyperparameters.
        columns: values of basis functions at inputs, (n, p).
        known: what to subtract from the observations, with a row per datum of some rows; None is nothing.
        most: number of points; None is all.
    """
    factor, data, places, x, obs = conditionals(posterior, most)
    subtracted = known(data)
    if subtracted is not None:
        obs = obs - subtracted[places].movedim(0, -1)
    basis, w, near = columns(x).double(), factor.w, factor.neighbors
    a = (basis - _combined(w, basis, near)) * factor.var.rsqrt()[..., None]
    return a, factor.whiten(obs.double())


def _combined(w: Tensor, table: Tensor, near: Tensor) -> Tensor:
    return combined(w, table, near) if w.dim() == 2 else (w[..., None, :] @ table[near.clamp(min=0)])[..., 0, :]


def without_low_rank(
    precision: Float[Tensor, "p p"], linear: Float[Tensor, "*L p"], count: int
) -> tuple[Float[Tensor, "q q"], Float[Tensor, "*L q"]]:
    """The likelihood of the first of some coefficients, the last ones integrated out under standard normal priors."""
    own = precision.shape[-1] - count
    tril = cholesky(precision[own:, own:] + torch.eye(count).to(precision), 0.0)
    cross = half_solve(tril, precision[own:, :own])
    white = half_solve(tril, linear[..., own:, None])
    return precision[:own, :own] - cross.mT @ cross, linear[..., :own] - (cross.mT @ white)[..., 0]


def bound_for_predictions(method: Any) -> Bound:
    """The present hyperparameters, with the coefficients of the mean that predictions integrate over."""
    bound = method.bound()
    if not isinstance(bound.mean_function, BasisMean):
        return bound
    if bound.mean_function.has_posterior:
        return replace(bound, trend=method.posterior(bound).find_trend())
    if not bound.mean_function.is_learned:
        return bound
    trend = method._kept("trend").get(bound.versions, lambda: method.posterior(bound).find_trend())
    if trend is not None and trend.gain is None:
        find = lambda: (method.posterior(method.bound()).find_trend().root,)  # noqa: E731
        trend = replace(trend, root=differentiable(method, (trend.root,), find)[0])
    return replace(bound, trend=trend)


def differentiable(method: Any, values: Sequence[Tensor], find: Callable[[], Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Values that are kept as functions of the parameters of a method, computed again for their gradients.

    Args:
        method: the method.
        values: the values at the present parameters.
        find: computes them.
    """
    parameters = [parameter for parameter in method.parameters() if parameter.requires_grad]
    if not (parameters and torch.is_grad_enabled()):
        return tuple(values)
    return _Recomputed.apply(find, len(values), *values, *parameters)


class _Recomputed(torch.autograd.Function):
    """(find, number of values, *values, *parameters) -> the values, found again for their gradients."""

    @staticmethod
    def forward(ctx: Any, find: Callable[[], Sequence[Tensor]], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.find, ctx.count, ctx.parameters = find, count, tensors[count:]
        return tuple(value.clone() for value in tensors[:count])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            values = ctx.find()
        found = torch.autograd.grad(values, ctx.parameters, gradients, allow_unused=True)
        return None, None, *[None] * ctx.count, *found


__all__ = ["bound_for_predictions", "can_solve_mean", "normal_equations", "solve_mean", "solved_mean"]
