r"""Check of the number of neighbors: predictions from K and 8 K neighbors, halfway between 200 pairs of points.

If the kernel is right, the two means differ by :math:`v_K - v_{8K}` in mean square, less than the predictive variance
:math:`v_K` of f. A root mean square beyond 1.5 standard deviations means that the kernel does not fit the data, or
that neighbor covariances are too ill-conditioned for their nugget or dtype; predictive intervals are then too narrow.

A lengthscale that starts far below the distances between points stays there: no point is correlated with another,
predictions away from the points are the mean function, and the gradient of the lengthscale is zero. Correlations at the
the same 200 points show it. They are near zero too where y has no structure at these distances.

Cost: 200 predictions from 8 K neighbors, about 0.05 s for K = 32.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import warn
from pyro_nngp._random import shuffled
from pyro_nngp.inference.protocols import Bounded, Checked, Induced, graph_of, offers, shard_of
from pyro_nngp.inference.svi.result import ConvergenceWarning
from pyro_nngp.kernels import Covariance
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.linalg.nuggets import quiet_nuggets

_POINTS, _FACTOR, _LIMIT, _LEAST_CORRELATION = 200, 8, 1.5, 0.01


@torch.no_grad()
def neighbor_disagreement(method: Any) -> float | None:
    """Root mean square difference of predictive means of f from K and from 8 K neighbors, in standard deviations.

    Args:
        method: a method that predicts from the nearest points of a graph.

    Returns:
        The difference; None for other methods, for fewer than 2 K + 1 points, and if predictions from 8 K neighbors
        fail.
    """
    graph = graph_of(method)
    if graph is None or shard_of(method) is not None or not offers(method, Bounded):
        return None
    few, most = graph.num_neighbors, graph.num_points - 1
    if most < 2 * few:
        return None
    rows = some_rows(graph.x, _POINTS)
    places = (graph.x[rows] + graph.x[graph.others(1, rows)[:, 0]]) / 2
    try:
        loc, var = moments_at(method, places, few)
        with quiet_nuggets():  # the user did not ask for that many neighbors
            more, _ = moments_at(method, places, min(_FACTOR * few, most))
    except NotPositiveDefiniteError:
        return None
    return float(((loc - more).square() / var.clamp(min=torch.finfo(var.dtype).tiny)).mean().sqrt())


def moments_at(method: Bounded, x: Float[Tensor, "P D"], num_neighbors: int | None = None) -> tuple[Tensor, Tensor]:
    """Means and variances of f at some points, (*L, P), without the warnings of a user's predictions."""
    posterior = method.posterior(method.bound())
    return posterior.moments(x, posterior.neighbors(x, num_neighbors))


@torch.no_grad()
def nearest_correlation(method: Any) -> float | None:
    """Median prior correlation of f at points with f at their nearest other point, or inducing point.

    Args:
        method: a method with a kernel, or several, of which the one with the longest reach counts.

    Returns:
        The correlation; None for other methods.
    """
    if shard_of(method) is not None or not offers(method, Bounded):
        return None
    graph = graph_of(method)
    if graph is not None:
        rows = some_rows(graph.x, _POINTS)
        x, others = graph.x[rows], graph.x[graph.others(1, rows)]
    elif offers(method, Induced):
        x, others = method.x[some_rows(method.x, _POINTS)], method.z
    else:
        return None
    return max(median_correlation(cov, x, others) for cov in method.bound().covariances)


def median_correlation(covariance: Covariance, x: Float[Tensor, "B D"], others: Float[Tensor, "*B M D"]) -> float:
    """Median over points of the largest prior correlation of f there with f at some other points.

    Args:
        covariance: covariance function.
        x: the points.
        others: the other points, of each point or the same ones for all.
    """
    x = x[:, None]
    scale = covariance.diag(x).sqrt() * covariance.diag(others).sqrt()
    return float((covariance(x, others)[:, 0] / scale).abs().amax(-1).median())


def check_neighbors(method: Any) -> None:
    """Warn if points of a trained method are not correlated, or more neighbors change its predictions."""
    correlation = nearest_correlation(method) if offers(method, Checked) else None
    if correlation is not None and correlation < _LEAST_CORRELATION:
        cure = "Leave the lengthscale unset: it then starts from the data."
        if any(name.endswith("lengthscale") for name in method.started_hyperparameters):
            cure = "y shows no structure at the distances between points: rows are too few, or hold only noise."
        warn(
            "fit: expected points to be correlated with the nearest ones, got a median correlation of "
            f"{correlation:.2g}: the kernel is noise, predictions away from the data points are the mean function, and "
            f"the gradient of the lengthscale is near zero. {cure}",
            ConvergenceWarning,
        )
        return
    size = neighbor_disagreement(method)
    if size is None or not size > _LIMIT:
        return
    k = method.graph.num_neighbors
    warn(
        f"fit: expected predictions from {k} and from up to {_FACTOR * k} neighbors to agree within {_LIMIT} standard "
        f"deviations of f, got a root mean square difference of {size:.2g}. compare_to_exact shows what is lost, on a "
        "subset; cures are a larger num_neighbors, another kernel, float64 or a larger jitter.",
        ConvergenceWarning,
    )


def some_rows(x: torch.Tensor, most: int) -> torch.Tensor:
    """At most `most` rows, drawn at random, the same at each call."""
    return shuffled(len(x), 0, x.device)[:most]
