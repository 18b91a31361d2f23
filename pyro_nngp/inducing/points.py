"""Inducing points: initial positions by k-means, and search for those nearest to given points."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.cluster.vq import kmeans2
from torch import Tensor, nn

from pyro_nngp._checks import check_inputs, check_int, check_num_neighbors, check_same_kind, check_seed, fail
from pyro_nngp._kinds import check_flags
from pyro_nngp._tape import operation
from pyro_nngp.hyperparameters import scaled
from pyro_nngp.kernels.metric import column_scale
from pyro_nngp.neighbors import nearest
from pyro_nngp.neighbors.search.correlation import CorrelationIndex

_SAMPLE_PER_CENTER = 64


def kmeans(x: Float[Tensor, "N D"], num_centers: int, seed: int = 0) -> Float[Tensor, "M D"]:
    """Centers of k-means, started by k-means++, on inputs scaled to unit variance.

    Args:
        x: inputs, of which at most 64 rows per center, drawn at random, are used.
        num_centers: M, at most N.
        seed: seed of the subsample and of the start.

    Returns:
        Centers, in the units of `x`.

    Cost: O(M^2 D) for the start and per iteration, independent of N beyond the subsample.
    """
    check_inputs("kmeans", "x", x)
    check_num_neighbors("kmeans", num_centers, len(x), "num_centers")
    check_int("kmeans", "seed", seed, 0)
    rng = np.random.default_rng(seed)
    values = x.detach().cpu().double().numpy()
    if len(values) > num_centers * _SAMPLE_PER_CENTER:
        values = values[rng.choice(len(values), num_centers * _SAMPLE_PER_CENTER, replace=False)]
    origin = values.mean(0)
    values = values - origin
    spread = values.std(0)
    spread[spread == 0] = 1
    values = values / spread
    centers, _ = kmeans2(values, _spread_out(values, num_centers, rng), minit="matrix", missing="warn")
    return torch.as_tensor(centers * spread + origin).to(x)


def inducing_points(
    where: str, x: Float[Tensor, "N D"], inducing: int | Float[Tensor, "M D"] | None, seed: int = 0, usual: int = 512
) -> Float[Tensor, "M D"]:
    """Inducing points from the user's argument, which is a number of k-means centers or the points themselves.

    Args:
        where: name of the caller, for the error message.
        x: inputs of the data.
        inducing: M in 2..N, or the points; None is the usual M, but at most N.
        seed: seed of k-means.
        usual: M where none is given.

    Raises:
        ValueError, TypeError: for too many or too few points, or points of another shape, dtype or device than `x`.
    """
    check_seed(where, seed)
    inducing = min(usual, len(x)) if inducing is None else inducing
    if isinstance(inducing, int):
        if not 1 < inducing <= len(x):
            fail(where, "inducing", f"in 2..{len(x)}", inducing, "There can't be more centers than data points.")
        return kmeans(x, inducing, seed)
    check_inputs(where, "inducing", inducing)
    check_same_kind(where, x=x, inducing=inducing)
    if inducing.shape[1] != x.shape[1]:
        fail(where, "inducing", f"of shape (M, {x.shape[1]})", tuple(inducing.shape), "Same inputs as x.")
    return inducing


def place_inducing(owner: nn.Module, z: Float[Tensor, "M D"], x: Float[Tensor, "N D"], learn: bool) -> None:
    """Make inducing points the attribute ``z`` of a module: a parameter in units of the columns of x, or a buffer."""
    check_flags(type(owner).__name__, learn_inducing=learn)
    if learn:
        owner.z = scaled(z, column_scale(x))
    else:
        owner.register_buffer("z", z.detach().clone())


@torch.no_grad()
def nearest_inducing(
    x: Float[Tensor, "B D"],
    z: Float[Tensor, "M D"],
    num_neighbors: int,
    metric: Any = None,
) -> Int[Tensor, "B H"]:
    """Rows of the H inducing points nearest to each x, nearest first.

    Args:
        x: query points.
        z: inducing points.
        num_neighbors: H, 1..M.
        metric: lengthscales that divide the inputs, a :class:`~pyro_nngp.kernels.KernelMetric`, or a function of
            distances; None is the Euclidean metric.

    Cost: building a search index over M points, and one search.
    """
    z = z.detach()
    if hasattr(metric, "features"):
        return CorrelationIndex(z, metric, progress=False).nearest(x, num_neighbors)[0]
    if metric is None or isinstance(metric, Tensor):
        return _nearest_scaled(x, z, num_neighbors, metric)
    return nearest(x, z, num_neighbors, metric=metric, progress=False)


@operation
def _nearest_scaled(x: Tensor, z: Tensor, num_neighbors: int, metric: Tensor | None) -> Tensor:
    scale = 1.0 if metric is None else metric.double()
    return nearest(x.double() / scale, z.double() / scale, num_neighbors, progress=False)


def _spread_out(values: np.ndarray, num_centers: int, rng: np.random.Generator) -> np.ndarray:
    """Initial centers by k-means++: each is drawn in proportion to its squared distance from the ones before it.

    SciPy's implementation takes O(M^3 D).
    """
    centers = np.empty((num_centers, values.shape[1]))
    distance = np.ones(len(values))
    for i in range(num_centers):
        total = np.cumsum(distance)
        if total[-1] > 0:
            row = np.searchsorted(total, rng.random() * total[-1], side="right")
        else:  # every row is a center already
            row = rng.integers(len(values))
        centers[i] = values[min(row, len(values) - 1)]
        square = np.square(values - centers[i]).sum(1)
        distance = np.minimum(distance, square) if i else square
    return centers
