"""Orderings of points for nearest-neighbor Gaussian processes: random, maximin, coordinate, principal, given.

An ordering is a permutation: `order[p]` is the row at position p. Under random and maximin orderings the first points
cover the domain, so that later ones find predecessors on all sides, which makes the approximation far better than
under coordinate orderings with the same number of neighbors (Guinness 2018).

Maximin: each point is the one farthest from all points before it, starting from the point nearest to the mean; ties go
to the smaller row. This is the greedy ordering itself, not an approximation of it, but computed many points at a time:
a point can be placed as soon as it is farther from the placed points than every waiting point within that distance of
it, since no point placed before its turn can be nearer to it. Sorting by these distances gives the sequence.

Cost: random and coordinate O(N log N), principal O(N D^2) more. Maximin O(N log^2 N) in low dimension (139,000 points
in the plane: 1 s), more for points in high dimension or clustered on many scales, at most O(N^2 D).

Symbols: x (N, D) points, d2 (N,) squared distance of each point to the nearest placed one, -1 for placed ones.

Reference: Guinness, "Permutation and grouping methods for sharpening Gaussian process approximations", Technometrics 60
(2018). Schaefer, Katzfuss, Owhadi, "Sparse Cholesky factorization by Kullback-Leibler minimization", SISC 43 (2021).
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from pyro_nngp._checks import check_inputs, check_seed, fail

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ORDERINGS = ("random", "maximin", "coordinate", "principal", "given")

_GROWTH = 1.4  # a batch multiplies the number of placed points by about this
MAX_PAIRS = 2_000_000  # directed pairs of points within reach of each other in one batch
_STEPS = 64  # single placements where a batch would hold too many pairs


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
        ValueError, TypeError: if `ordering` is neither a known name nor a permutation.
    """
    where = "make_ordering"
    check_inputs(where, "x", x)
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
    return torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)


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
    if not -x.shape[1] <= time_dim < x.shape[1]:
        expectation = f"in {-x.shape[1]}..{x.shape[1] - 1}"
        fail("time_ordering", "time_dim", expectation, time_dim, "It numbers the columns of x.")
    shuffled = random_ordering(x, seed)
    return shuffled[x[shuffled, time_dim].argsort(stable=True)]


def maximin_ordering(x: Float[Tensor, "N D"]) -> Int[Tensor, " N"]:
    """Greedy farthest-point ordering: each point maximizes the distance to its nearest predecessor; ties by row."""
    points = x.detach().cpu().double().numpy()
    first = int(_squared_distances(points, points.mean(0)).argmin())
    d2 = _squared_distances(points, points[first])
    d2[first] = -1.0  # placed
    placed = [np.array([first])]
    while (top := float(d2.max())) > 0:
        batch = _place_batch(points, d2, top)
        placed.append(_place_singly(points, d2) if batch is None else batch)
    placed.append(np.flatnonzero(d2 == 0))  # duplicates of placed points
    return torch.from_numpy(np.concatenate(placed)).to(x.device)


def _place_singly(points: Floats, d2: Floats) -> Ints:
    """Place the farthest point, several times; d2 is updated."""
    placed = []
    for _ in range(_STEPS):
        far = int(d2.argmax())
        if d2[far] <= 0:
            break
        np.minimum(d2, _squared_distances(points, points[far]), out=d2)
        d2[far] = -1.0
        placed.append(far)
    return np.array(placed)


def _place_batch(points: Floats, d2: Floats, top: float) -> Ints | None:
    """Place all points whose distance at their turn is near the largest; None if that takes too many pairs."""
    floor = top * _GROWTH ** (-2 / points.shape[1])
    near = np.flatnonzero(d2 >= floor)  # only these can be placed here
    radius = top**0.5 * (1 + 1e-12)
    tree = cKDTree(points[near], balanced_tree=False)
    if tree.count_neighbors(tree, radius) > MAX_PAIRS:
        return None
    pairs = tree.query_pairs(radius, output_type="ndarray")
    one, two = np.concatenate([pairs, pairs[:, ::-1]]).T  # each pair in both directions
    gap = _squared_distances(points[near[one]], points[near[two]])
    key = d2[near]  # of waiting points: an upper bound; of taken ones: the squared distance at which their turn comes
    waiting, taken = np.ones(len(near), bool), np.zeros(len(near), bool)
    while waiting.any():
        # Pairs that matter: where `two`, if it is placed first, brings `one` nearer.
        matters = waiting[one] & (waiting | taken)[two] & (gap < key[one])
        one, two, gap = one[matters], two[matters], gap[matters]
        before = (key[two] > key[one]) | ((key[two] == key[one]) & (two < one))
        now = waiting.copy()
        now[one[before]] = False
        taken |= now
        waiting &= ~now
        came = before & taken[two]
        np.minimum.at(key, one[came], gap[came])
        waiting &= key >= floor
    new = near[taken][np.lexsort((near[taken], -key[taken]))]
    _update(points, d2, new, radius)
    return new


def _update(points: Floats, d2: Floats, new: Ints, radius: float) -> None:
    """Lower d2 by the distances to the new points, none of which brings a point nearer than `radius`."""
    d2[new] = -1.0
    rest = np.flatnonzero(d2 > 0)
    if rest.size:
        _, index = cKDTree(points[new], balanced_tree=False).query(
            points[rest], distance_upper_bound=radius, workers=torch.get_num_threads()
        )
        within = index < len(new)
        rest, index = rest[within], index[within]
        d2[rest] = np.minimum(d2[rest], _squared_distances(points[rest], points[new[index]]))


def _squared_distances(a: Floats, b: Floats) -> Floats:
    return sum((p - q) ** 2 for p, q in zip(a.T, b.T, strict=True))
