r"""The joint posterior of f at a few points, exact given the observations nearest to any of them.

.. math:: f(X) \mid \tilde y_U \sim N\big(\mu(X) + K_{XU} C^{-1} (\tilde y_U - \mu_U),\;
   K_{XX} - K_{XU} C^{-1} K_{UX}\big), \qquad C = K_{UU} + \mathrm{diag}(\delta),

U the union of the nearest neighbors of the q points X. It is then conditioned on observations that are not among the
data (fantasies). With all data as neighbors it is the posterior of the exact Gaussian process. Means and covariances
are differentiable in X, and in the fantasies; where a neighbor changes they jump by what its replacement changes.

Cost: O((q K)^3 + p^3) for each batch member. Symbols: B batch dimensions, q points, p fantasies, U observations, S
batches of fantasized values.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import check_tensor, fail
from pyro_nngp._indexing import repeats
from pyro_nngp._kinds import check_kind
from pyro_nngp.bound import Bound
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.linalg import add_diagonal, cholesky, half_solve, in_blocks
from pyro_nngp.models.base.predictions import posterior_near
from pyro_nngp.neighbors.table import distinct_rows


class Fantasies(NamedTuple):
    r"""Observations beyond the data.

    Attributes:
        x: their places, (\*B, p, D).
        y: their values, with the noise of the likelihood, (\*S, \*B, p).
    """

    x: Float[Tensor, "... p D"]
    y: Float[Tensor, "... p"]


def union_of(rows: Int[Tensor, "... n"]) -> Int[Tensor, "... U"]:
    """The distinct row numbers in each set, -1 padded to the longest."""
    ordered = rows.sort(-1).values
    repeated = repeats(ordered)
    first = repeated.to(torch.int8).argsort(dim=-1, stable=True)
    distinct = torch.where(repeated, -1, ordered).gather(-1, first)
    return distinct[..., : int((distinct >= 0).sum(-1).max())]


def joint_posterior(
    kernel: Any,
    x: Float[Tensor, "... q D"],
    points: Float[Tensor, "... U D"],
    noise: Float[Tensor, "... U"],
    real: Tensor,
    jitter: float,
) -> tuple[Float[Tensor, "... q U"], Float[Tensor, "... q q"]]:
    """Weights of the observations less the mean function in the mean of f at x, and covariances of f there.

    Args:
        kernel: a kernel that is bound to its hyperparameters.
        x: the points.
        points: places of the observations, with the same batch dimensions.
        noise: their variances.
        real: which observations exist, (..., U).
        jitter: relative nugget.
    """
    batch, (q, d), u = x.shape[:-2], x.shape[-2:], points.shape[-2]
    flat_x, flat_points = x.reshape(-1, q, d), points.reshape(-1, u, d)
    flat_noise, flat_real = (value.expand(*batch, u).reshape(-1, u) for value in (noise, real))

    def block(part: slice) -> tuple[Tensor, Tensor]:
        exists = flat_real[part]
        near, cross = kernel(flat_points[part], flat_points[part]), kernel(flat_points[part], flat_x[part])
        near = torch.where(exists[:, :, None] & exists[:, None, :], near, 0.0)
        added = kernel.nugget(flat_points[part]) * jitter + flat_noise[part]
        tril = cholesky(add_diagonal(near, torch.where(exists, added, 1.0)), 0.0)
        half = half_solve(tril, torch.where(exists[..., None], cross, 0.0))
        own = kernel(flat_x[part], flat_x[part])
        own = add_diagonal(own, kernel.nugget(flat_x[part]) * jitter)
        return half_solve(tril, half, transposed=True), own - half.mT @ half

    weights, cov = in_blocks(block, len(flat_x), 4 * u * u)
    return weights.mT.reshape(*batch, q, u), cov.reshape(*batch, q, q)


def condition_on_last(
    loc: Float[Tensor, "... n"], cov: Float[Tensor, "... n n"], y: Float[Tensor, "... p"], noise: Float[Tensor, "... p"]
) -> tuple[Float[Tensor, "... q"], Float[Tensor, "... q q"]]:
    """Moments of the first q = n - p of normal variables, given observations of the last p.

    Args:
        loc: means.
        cov: covariances.
        y: the observations; may have further batch dimensions.
        noise: their variances.
    """
    q = loc.shape[-1] - y.shape[-1]
    tril = cholesky(add_diagonal(cov[..., q:, q:], noise), 0.0)
    half = half_solve(tril, cov[..., q:, :q])
    weights = half_solve(tril, half, transposed=True).mT
    return loc[..., :q] + (weights @ (y - loc[..., q:])[..., None])[..., 0], cov[..., :q, :q] - half.mT @ half


def joint_moments(
    method: Any, x_new: Float[Tensor, "... q D"], num_neighbors: int | None, fantasies: Fantasies | None
) -> tuple[Float[Tensor, "... q"], Float[Tensor, "... q q"]]:
    """Means and covariances of f at sets of points; see :meth:`~pyro_nngp.models.base.Method.joint`."""
    where = f"{type(method).__name__}.joint"
    if method.latent_shape:
        fail(where, "method", "with one output", method.latent_shape, "Build one model per output.")
    if fantasies is not None and not isinstance(method.likelihood, Gaussian):
        cure = "Condition on one set of observations: condition_on."
        fail(where, "fantasies", "of a Gaussian likelihood", type(method.likelihood).__name__, cure, TypeError)
    check_tensor(where, "x_new", x_new)
    if x_new.dim() < 2:
        fail(where, "x_new", "of shape (..., q, D)", tuple(x_new.shape), "Use x_new[None] for a single point.")
    flat = x_new.flatten(0, -2)
    method._check_new("joint", flat)
    if fantasies is not None:
        check_kind(where, "fantasies", fantasies, Fantasies, "Fantasies", "Pass Fantasies(x, y).")
    posterior, _, k = posterior_near(method, flat, num_neighbors, None)
    bound: Bound = posterior.bound
    near = posterior.neighbors(flat.detach(), k)
    if not isinstance(near, Tensor):
        posterior.observations_of_u(near)  # raises
    near = union_of(near.reshape(*x_new.shape[:-2], -1))
    rows, places = distinct_rows(near.clamp(min=0))
    residual, noise = (value.expand(len(rows))[places] for value in posterior.observations_of_u(rows))
    points, real = posterior.rows.x[near.clamp(min=0)], near >= 0
    if fantasies is not None:
        batch = torch.broadcast_shapes(x_new.shape[:-2], fantasies.x.shape[:-2])
        x_new, more = (v.expand(*batch, *v.shape[-2:]) for v in (x_new, fantasies.x))
        x_new, points = torch.cat([x_new, more], -2), points.expand(*batch, *points.shape[-2:])

    def at_sets(function: Any, x: Tensor) -> Tensor:
        values = function(x.reshape(-1, x.shape[-1]))
        return values.reshape(*x.shape[:-1], *values.shape[1:])

    loc, x_new, points = at_sets(bound.mean, x_new), bound.inputs(x_new), bound.inputs(points)
    weights, cov = joint_posterior(bound.residual, x_new, points, noise, real, bound.jitter)
    loc = loc + (weights @ residual[..., None])[..., 0]
    if bound.trend is not None:
        basis = at_sets(bound.trend.basis, x_new) - weights @ at_sets(bound.trend.basis, points)
        root = basis.to(loc) @ bound.trend.root.to(loc)
        cov = cov + root @ root.mT
    if fantasies is None:
        return loc, cov
    added = bound.likelihood.variance.to(loc).expand(fantasies.x.shape[:-1])
    return condition_on_last(loc, cov, fantasies.y, added)
