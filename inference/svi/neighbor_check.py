r"""A check that K neighbors are enough: predictions from K and 8 K neighbors, halfway between 200 pairs of points.

If the kernel is right, the two means differ by :math:`v_K - v_{8K}` in mean square, less than the predictive variance
:math:`v_K` of f. A root mean square beyond 1.5 standard deviations means that the kernel does not fit the data, or
that neighbor covariances are too ill-conditioned for their nugget or dtype; predictive intervals are then too narrow.

Cost: 200 predictions from 8 K neighbors, about 0.05 s for K = 32.
"""

import inspect
import warnings
from typing import Any

import torch

from pyro_nngp.inference.svi.result import ConvergenceWarning
from pyro_nngp.linalg import NotPositiveDefiniteError, quiet_nuggets

_POINTS, _FACTOR, _LIMIT = 200, 8, 1.5


@torch.no_grad()
def neighbor_disagreement(method: Any, seed: int = 0) -> float | None:
    """Root mean square difference of predictive means of f from K and from 8 K neighbors, in standard deviations.

    Args:
        method: a method that predicts from the nearest points of a graph.
        seed: seed of the choice of points.

    Returns:
        The difference; None for other methods, for fewer than 2 K + 1 points, and if predictions from 8 K neighbors
        fail.
    """
    graph: Any = getattr(method, "graph", None)
    if not hasattr(graph, "others") or "num_neighbors" not in inspect.signature(type(method).forward).parameters:
        return None
    few, most = graph.num_neighbors, graph.num_points - 1
    if most < 2 * few:
        return None
    rows = torch.randperm(most + 1, generator=torch.Generator().manual_seed(seed))[:_POINTS].to(graph.x.device)
    places = (graph.x[rows] + graph.x[graph.others(1, rows)[:, 0]]) / 2
    try:
        loc, var = method(places, num_neighbors=few)
        with quiet_nuggets():  # the user did not ask for that many neighbors
            more, _ = method(places, num_neighbors=min(_FACTOR * few, most))
    except NotPositiveDefiniteError:
        return None
    return float(((loc - more).square() / var.clamp(min=torch.finfo(var.dtype).tiny)).mean().sqrt())


def check_neighbors(method: Any, stacklevel: int) -> None:
    """Warn if the number of neighbors changes the predictions of a trained method."""
    size = neighbor_disagreement(method)
    if size is None or not size > _LIMIT:
        return
    k = method.graph.num_neighbors
    warnings.warn(
        f"fit: expected predictions from {k} and from up to {_FACTOR * k} neighbors to agree within {_LIMIT} standard "
        f"deviations of f, got a root mean square difference of {size:.2g}. compare_to_exact shows what is lost, on a "
        "subset; cures are a larger num_neighbors, another kernel, float64 or a larger jitter.",
        ConvergenceWarning,
        stacklevel=stacklevel + 1,
    )
