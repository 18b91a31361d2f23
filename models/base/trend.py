r"""Coefficients of the mean function by generalized least squares, given the neighbors.

With basis functions b, weights w of preceding neighbors and variances v of the response model,

.. math:: \sum_j a_j a_j^\top \beta / v_j = \sum_j a_j (y_j - w_j^\top y_{n(j)}) / v_j, \qquad
   a_j = b(x_j) - \textstyle\sum_k w_{jk}\, b(x_{n(j)k}),

over the first 4,096 points in a random ordering: later points, with neighbors all around, say almost nothing about the
level. Coefficients with a normal prior get their posterior instead, from all points: the prior's precision is added to
the left side, whose inverse is the covariance.

Cost: O(K^3) for each of these points.
"""

from typing import Any

import torch
from torch import nn

from pyro_nngp._checks import fail
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.linalg import cholesky, factor_solve
from pyro_nngp.means import BasisMean, condition_coefficients

_POINTS = 4096


def can_solve_mean(method: Any) -> bool:
    """Whether :func:`solve_mean` applies: a mean that is linear in its coefficients, and Gaussian data.

    Coefficients with normal priors are solved for with any data, given auxiliary variables.
    """
    mean = method._modules.get("mean")
    if not isinstance(mean, BasisMean):
        return False
    return mean.has_posterior or (isinstance(method.likelihood, Gaussian) and mean.is_free)


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
    bound, rows = method.bound(), method.rows
    count = rows.num_rows if mean.has_posterior else min(_POINTS, rows.num_rows)
    part = rows.preceding(method.graph, count, method.neighbor_metric(bound))
    places, near = part.places, part.graph
    posterior = method.posterior(bound, None, part)
    x, (obs, noise) = part.rows.x[places], posterior.observations(places)
    if part.rows.offset is not None:
        obs = obs - part.rows.offset[places].movedim(0, -1)
    w, var = graph_conditional(bound.covariance, x, x, near, noise, bound.jitter)
    near, scale = near.clamp(min=0), (var + noise).double().rsqrt()
    basis, w = mean.basis(x).double(), w.double()
    a = (basis - (w[..., None, :] @ basis[near])[..., 0, :]) * scale[..., None]
    b = (obs - (w * obs[..., near]).sum(-1)).double() * scale
    normal, right = a.mT @ a, (a.mT @ b[..., None])[..., 0]  # (*L, p, p), (*L, p)
    normal = normal.expand(*right.shape, normal.shape[-1])
    if mean.has_posterior:
        condition_coefficients(mean, normal, right)
        return
    if right.dim() > 1 and mean.num_functions is None:  # all outputs have the same mean
        normal, right = normal.sum(0), right.sum(0)
    size = normal.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(torch.float32).tiny).rsqrt()
    tril = cholesky(normal * size[..., None] * size[..., None, :], 1e-9)
    solution = size * factor_solve(tril, (size * right)[..., None])[..., 0]
    mean.assign(torch.atleast_2d(solution).mT)


__all__ = ["can_solve_mean", "solve_mean", "solved_mean"]
