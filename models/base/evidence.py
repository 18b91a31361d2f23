"""Log densities of Gaussian observations given their neighbors: the log evidence that a bound is compared to.

Symbols: B rows, R points, K neighbors.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Normal

from pyro_nngp._indexing import values_at
from pyro_nngp._random import shuffled
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.linalg import in_blocks


def has_evidence(method: Any) -> bool:
    """Whether the log evidence has a closed form up to K neighbors, and is implemented.

    For Gaussian noise; not for several outputs, weights, priors on hyperparameters, or data on several processes.
    """
    gaussian = method.likelihood is not None and method.likelihood.is_gaussian
    plain = method.rows.is_whole and not method.latent_shape and method.weights is None
    return gaussian and plain and not method.hyper_guide.has_sites


def log_density_given(
    kernel: Any,
    points: Float[Tensor, "R D"],
    rows: Int[Tensor, " B"],
    neighbors: Int[Tensor, "B K"],
    residual: Float[Tensor, " R"],
    noise: Float[Tensor, " R"],
    jitter: float,
) -> Float[Tensor, " B"]:
    """Log densities of residuals at some rows given those at their neighbors, rows too, -1 padded; O(B K^3)."""
    w, var = graph_conditional(kernel, points[rows], points, neighbors, noise, jitter)
    loc = (w * values_at(residual, neighbors)).sum(-1)
    return Normal(loc, (var + noise[rows]).sqrt()).log_prob(residual[rows])


def correlated_predecessors(
    kernel: Any, x: Float[Tensor, "N D"], rows: Int[Tensor, " B"], num_neighbors: int, seed: int
) -> Int[Tensor, "B K"]:
    """For each of some rows, the K that correlate most with it among those before it in a random order, -1 padded.

    Cost: O(B N), where a graph of all rows takes a search for each of them.
    """
    rank = shuffled(len(x), seed, x.device)
    spread = kernel.diag(x).sqrt()

    def block(part: slice) -> tuple[Tensor]:
        correlation = kernel(x[rows[part]], x).abs() / spread
        later = rank >= rank[rows[part], None]
        closest = correlation.masked_fill(later, -1.0).topk(num_neighbors)
        return (torch.where(closest.values >= 0, closest.indices, -1),)

    return in_blocks(block, len(rows), len(x), 0)[0]
