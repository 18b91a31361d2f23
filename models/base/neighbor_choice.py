"""Neighbors in the graph of a method: how many it trains and predicts with, and their search in a new metric.

:func:`refresh_neighbors` and :func:`prediction_neighbors` are methods of the classes that have a graph.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_int
from pyro_nngp.neighbors.choice_of_k import training

USUAL_NEIGHBORS = 32
MOST_NEIGHBORS = 128
MOST_EXACT = 300
"""Most rows that a response model takes all neighbors of by default: one dense factor costs little more than K = 32."""
_TABLE = 2**24  # largest table of neighbors for which K is increased
_CHEAP = 10**7  # largest N K^2 for which K is increased for the sake of f alone


def first_neighbors(
    where: str, num_neighbors: int | None, x: Float[Tensor, "N D"], usual: int = USUAL_NEIGHBORS
) -> int:
    """K of a new graph: the given one, or the usual one, but at most the number of other points.

    Raises:
        ValueError, TypeError: unless a given K is an int >= 1.
    """
    if num_neighbors is None:
        return min(usual, len(x) - 1)
    check_int(where, "num_neighbors", num_neighbors, 1, "It is a number of points.")
    return num_neighbors


@torch.no_grad()
def choose_neighbors(method: Any, most: int = MOST_NEIGHBORS, most_for_f: int = 0) -> None:
    """Double K of a method's graph while that lowers the predictive variance of y, or of f, by more than 10 %.

    For constructors without a given K, at the initial hyperparameters. Smooth functions of many inputs need it: there
    32 neighbors explain little of the variance.

    Under much noise f needs it too, if neighbors are noisy observations: 32 of them say little. The variance of f
    counts while N K^2 is at most 10^7. More rows determine the hyperparameters well enough without it, and predictions
    choose their number of neighbors themselves.

    Args:
        method: its posterior has predictive variances at the data.
        most: the largest K; N K is at most 2^24.
        most_for_f: the largest K for the sake of f alone.
    """
    rows = method.rows.num_rows
    if method.graph.num_neighbors >= rows - 1:
        return  # the exact process, which is cheap
    rules = training(min(most, _TABLE // rows), min(most_for_f, math.isqrt(_CHEAP // rows)))
    enough = method.posterior(method.bound()).worthwhile_neighbors(rules)
    if enough != method.graph.num_neighbors:
        method.graph.resize(enough)
        method._neighbors_changed()


@torch.no_grad()
def refresh_neighbors(method: Any) -> None:
    """Find the neighbors again under the kernel's present lengthscales.

    Kernels without one lengthscale per input keep the Euclidean metric.
    """
    method.graph.refresh(method._neighbor_metric() if method.metric is None else None)
    method._neighbors_changed()


def prediction_neighbors(method: Any) -> int:
    """The default number of neighbors in predictions, at the present hyperparameters."""
    return method.posterior(method.bound()).enough_neighbors()


def typical_noise(precision: Float[Tensor, "*L N"]) -> Float[Tensor, "*L 1"]:
    """The harmonic mean of the variances of Gaussian observations; where the precision is 0 there is none."""
    return (precision > 0).sum(-1, keepdim=True) / precision.sum(-1, keepdim=True)


__all__ = [
    "MOST_EXACT",
    "MOST_NEIGHBORS",
    "USUAL_NEIGHBORS",
    "choose_neighbors",
    "first_neighbors",
    "prediction_neighbors",
    "refresh_neighbors",
    "typical_noise",
]
