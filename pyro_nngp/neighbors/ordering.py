"""Orderings of points for nearest-neighbor Gaussian processes: random, maximin, coordinate, principal, given.

An ordering is a permutation: `order[p]` is the row at position p. Under random and maximin orderings the first points
cover the domain, so that later ones find predecessors on all sides, which makes the approximation far better than
under coordinate orderings with the same number of neighbors (Guinness 2018).

Maximin: each point is the one farthest from all points before it, starting from the point nearest to the mean; ties go
to the smaller row. This is the greedy ordering itself, not an approximation.

Cost: random and coordinate O(N log N), principal O(N D^2) more. Maximin O(N log N) in low
dimension: 2.6 s for 10^6 points in the plane, 3 s for 10^5 in eight dimensions. At most, and without compiled code,
O(N^2 D).

Symbols: x (N, D) points, d2 (N,) squared distance of each point to the nearest placed one.

Reference: Guinness, "Permutation and grouping methods for sharpening Gaussian process approximations", Technometrics 60
(2018). Schaefer, Katzfuss, Owhadi, "Sparse Cholesky factorization by Kullback-Leibler minimization", SISC 43 (2021).
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from pyro_nngp._checks import check_coordinates, check_inputs, check_int, check_seed, fail
from pyro_nngp._random import shuffled
from pyro_nngp.native import search as compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ORDERINGS = ("random", "maximin", "coordinate", "principal", "given")


def make_ordering(x: Float[Tensor, "N D"], ordering: str | Int[Tensor, " N"], seed: int = 0) -> Int[Tensor, " N"]:
    """Make the named ordering, or check and return a given permutation.

    Args:
        x: points, (N, D).
        ordering: "random" | "maximin" | "coordinate" | "principal" | "given" (the rows in their order), or a
            permutation of 0..N-1, (N,) int64.
        seed: seed of the random ordering.

    Returns:
        Permutation (N,), int64, on the device of x.

    Raises:
        ValueError, TypeError: if x is malformed or beyond 1e150 in size, or `ordering` is neither a known name nor a
            permutation.
    """
    where = "make_ordering"
    check_coordinates(where, "x", x)
    if isinstance(ordering, Tensor):
        size = len(x)
        if ordering.shape != (size,) or ordering.dtype != torch.int64:
            actual = f"{ordering.dtype} of shape {tuple(ordering.shape)}"
            fail(where, "ordering", f"to be int64 of shape ({size},)", actual, "Give the row at each position.")
        if not torch.equal(ordering.sort().values, torch.arange(size, device=ordering.device)):
            fail(where, "ordering", f"to hold each of 0..{size - 1} once", "repeats or others", "Give a permutation.")
        return ordering.to(x.device)
    if not isinstance(ordering, str) or ordering not in ORDERINGS:
        error = ValueError if isinstance(ordering, str) else TypeError
        cure = "Use 'random' if in doubt."
        fail(where, "ordering", f"one of {ORDERINGS} or a permutation", f"{ordering!r:.40}", cure, error)
    if ordering == "random":
        return random_ordering(x, seed)
    return {
        "maximin": maximin_ordering,
        "coordinate": coordinate_ordering,
        "principal": principal_ordering,
        "given": given_ordering,
    }[ordering](x)


def random_ordering(x: Float[Tensor, "N D"], seed: int = 0) -> Int[Tensor, " N"]:
    """A uniformly random permutation, the same on every device, without touching the global random state."""
    check_seed("random_ordering", seed)
    return shuffled(len(x), seed, x.device)


def given_ordering(x: Float[Tensor, "N D"]) -> Int[Tensor, " N"]:
    """The rows in their order."""
    return torch.arange(len(x), device=x.device)


def coordinate_ordering(x: Float[Tensor, "N D"]) -> Int[Tensor, " N"]:
    """By the sum of the coordinates; ties by row.

    Coordinates count in proportion to their scale, so bring them to one scale first.
    """
    columns = x.detach().double().unbind(-1)
    return sum(columns[1:], columns[0]).argsort(stable=True)


def principal_ordering(x: Float[Tensor, "N D"]) -> Int[Tensor, " N"]:
    """By the first principal component, computed in float64; ties by row.

    Its largest loading is positive, so that the direction is determined. On a domain as long as it is wide the axis is
    determined by chance alone. Coordinates count in proportion to their scale, so bring them to one scale first.
    """
    centered = x.detach().double() - x.detach().double().mean(0)
    axis = torch.linalg.eigh(centered.mT @ centered).eigenvectors[:, -1]
    return (centered @ (axis * axis[axis.abs().argmax()].sign())).argsort(stable=True)


def time_ordering(x: Float[Tensor, "N D"], time_dim: int, seed: int = 0) -> Int[Tensor, " N"]:
    """By time, and at random within one time: each point is conditioned on the past, and on others of the same time.

    The factors of the density are then predictions from earlier data, and appended rows of later times leave them as
    they are.

    Args:
        x: points, (N, D).
        time_dim: the column of time, in -D..D-1.
        seed: seed of the order of simultaneous points.

    Returns:
        Permutation (N,), int64, for the argument `ordering` of graphs and methods.

    Raises:
        ValueError, TypeError: if x is malformed, or there is no such column.
    """
    check_inputs("time_ordering", "x", x)
    check_int("time_ordering", "time_dim", time_dim)
    if not -x.shape[1] <= time_dim < x.shape[1]:
        expectation = f"in {-x.shape[1]}..{x.shape[1] - 1}"
        fail("time_ordering", "time_dim", expectation, time_dim, "It numbers the columns of x.")
    shuffled = random_ordering(x, seed)
    return shuffled[x[shuffled, time_dim].argsort(stable=True)]


def maximin_ordering(x: Float[Tensor, "N D"]) -> Int[Tensor, " N"]:
    """Greedy farthest-point ordering: each point maximizes the distance to its nearest predecessor; ties by row."""
    points = x.detach().cpu().double().contiguous().numpy()
    first = int(_squared_distances(points, points.mean(0)).argmin())
    farthest = compiled.farthest_points if compiled.supported(len(points)) else _farthest_points
    placed = farthest(points, first)
    waiting = np.ones(len(points), bool)
    waiting[placed] = False
    duplicates = np.flatnonzero(waiting)
    return torch.from_numpy(np.concatenate([placed, duplicates])).to(x.device)


def _farthest_points(points: Floats, first: int) -> Ints:
    """Rows from `first` on, each the farthest from all before it, without those that coincide with others."""
    order, d2 = [first], _squared_distances(points, points[first])
    while d2[far := int(d2.argmax())] > 0:
        order.append(far)
        np.minimum(d2, _squared_distances(points, points[far]), out=d2)
    return np.array(order)


def _squared_distances(a: Floats, b: Floats) -> Floats:
    return sum((p - q) ** 2 for p, q in zip(a.T, b.T, strict=True))
