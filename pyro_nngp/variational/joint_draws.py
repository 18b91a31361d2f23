"""Joint draws of f at new points given Gaussian observations near them.

Coefficients of the mean that predictions integrate over are drawn first: a change of them moves the observations less
the mean function, and the mean function at the new points.

Cost: O(P K^3) once for each set of noises, then O(P K) per draw. Symbols: N observations, P new points, K neighbors, S
draws.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from pyro_nngp.bound import Bound
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions.nngp import draw_appended


def draws_given_observations(
    bound: Bound,
    x: Float[Tensor, "N D"],
    x_new: Float[Tensor, "P D"],
    near: Int[Tensor, "P K"],
    residual: Float[Tensor, "... N"],
    noise: Float[Tensor, "... N"],
    count: int,
) -> Float[Tensor, "S ..."]:
    """Joint draws at new points less the mean function, each given nearby observations and earlier new values.

    Args:
        bound: the hyperparameters.
        x: the observed points.
        x_new: new points.
        near: from :meth:`~pyro_nngp.neighbors.graph.NeighborGraph.extend`.
        residual: observations minus the mean function; one set for each latent function, or for all.
        noise: their noise variances.
        count: S.
    """
    n, p = len(x), len(near)
    x, x_new = bound.inputs(x), bound.inputs(x_new)
    points, noise = torch.cat([x, x_new]), pad(noise, (0, p))
    w, var = graph_conditional(bound.at_data, x_new, points, near, noise, bound.jitter)
    loc = (w * pad(residual, (0, p))[..., near.clamp(min=0)]).sum(-1)  # 0 at new points
    loc = loc.expand(count, *torch.broadcast_shapes(loc.shape, (*bound.latent_shape, p)))
    if bound.trend is None:
        return draw_appended(w, var, near, loc, n)
    change = bound.trend.draws(count, bound.latent_shape).to(loc)
    basis = pad(bound.trend.basis(x).to(w), (0, 0, 0, p))  # new values are less the mean function
    rest = bound.trend.combined(w, near, basis) @ change
    return draw_appended(w, var, near, loc - rest[..., 0], n) + (bound.trend.basis(x_new).to(w) @ change)[..., 0]


__all__ = ["draws_given_observations"]
