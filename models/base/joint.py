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

from pyro_nngp._rows import repeats
from pyro_nngp.linalg import in_blocks
from pyro_nngp.linalg.cholesky import cholesky


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
        added = near.diagonal(dim1=-2, dim2=-1) * jitter + flat_noise[part]
        tril = cholesky(near + torch.diag_embed(torch.where(exists, added, 1.0)), 0.0)
        half = torch.linalg.solve_triangular(tril, torch.where(exists[..., None], cross, 0.0), upper=False)
        own = kernel(flat_x[part], flat_x[part])
        nugget = torch.diag_embed(own.diagonal(dim1=-2, dim2=-1) * jitter)
        return torch.linalg.solve_triangular(tril.mT, half, upper=True), own + nugget - half.mT @ half

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
    tril = cholesky(cov[..., q:, q:] + torch.diag_embed(noise), 0.0)
    half = torch.linalg.solve_triangular(tril, cov[..., q:, :q], upper=False)
    weights = torch.linalg.solve_triangular(tril.mT, half, upper=True).mT
    return loc[..., :q] + (weights @ (y - loc[..., q:])[..., None])[..., 0], cov[..., :q, :q] - half.mT @ half
