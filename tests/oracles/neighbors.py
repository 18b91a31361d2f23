"""Nearest neighbors by all distances in double precision, and sets of points that are hard to search."""

import numpy as np
import torch

F64 = torch.float64


def oracle(queries, points, k, limit=None, exclude=None):
    """All distances, summed over the dimensions in order; sorted by (distance, index); -1 where no point is left."""
    queries, points = queries.double().numpy(), points.double().numpy()
    d2 = np.zeros((len(queries), len(points)))
    for q, p in zip(queries.T, points.T, strict=True):
        d2 += (p - q[:, None]) ** 2
    if limit is not None:
        d2[np.arange(len(points)) >= np.asarray(limit)[:, None]] = np.inf
    if exclude is not None:
        d2[np.arange(len(queries)), exclude] = np.inf
    index = np.argsort(d2, kind="stable")[:, :k]
    index[np.isinf(np.take_along_axis(d2, index, -1))] = -1
    return torch.from_numpy(np.pad(index, ((0, 0), (0, k - index.shape[1])), constant_values=-1))


def uniform(n, dim, seed=0):
    return torch.rand(n, dim, dtype=F64, generator=torch.Generator().manual_seed(seed))


def shuffled(points, seed=0):
    return points[torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))]


def grid(a, b):
    return torch.cartesian_prod(torch.arange(a, dtype=F64), torch.arange(b, dtype=F64))


N = 900
PLANE = uniform(N, 2)
POINTS = {
    **{f"uniform in {dim}-d": uniform(N, dim) for dim in (1, 2, 3, 8, 20)},
    "grid": grid(30, 30),
    "shuffled grid": shuffled(grid(30, 30)),
    "stretched grid": shuffled(grid(30, 30)) * torch.tensor([0.37, 1.1], dtype=F64),
    "float32, far away": (uniform(N, 3) + 1e3).float(),
    "ascending": torch.arange(N, dtype=F64)[:, None],
    "by coordinate": PLANE[PLANE.sum(-1).argsort()],
    "from outside": PLANE[(PLANE - 0.5).norm(dim=-1).argsort(descending=True)],
    "clusters in turn": (uniform(9, 2)[:, None] + 1e-4 * uniform(N, 2, 1).view(9, 100, 2)).flatten(0, 1),
    "few places": shuffled(grid(5, 5).repeat(36, 1)),
    "two places": shuffled(torch.tensor([[0.0], [-0.0], [1.0]], dtype=F64).repeat(300, 1)),
    "one place": torch.ones(N, 2, dtype=F64),
}


def distances(a, b):
    """Squared distances in float64, summed over the dimensions in order."""
    return sum((p[:, None] - q).square() for p, q in zip(a.double().unbind(-1), b.double().unbind(-1), strict=True))


def nearest_rows(far, order, k):
    """The k rows of smallest finite distance, ties by place in the ordering, -1 padded."""
    places = far[:, order].argsort(dim=-1, stable=True)[:, :k]
    rows = order[places]
    return rows.masked_fill(far.gather(-1, rows).isinf(), -1)


def predecessors(x, order, k):
    """Brute force for the neighbors of a graph."""
    rank = order.argsort()
    later = rank[None] >= rank[:, None]
    return nearest_rows(distances(x, x).masked_fill(later, torch.inf), order, k)


def manhattan(a, b):
    return (a[:, None] - b).abs().sum(-1)


def points(n=300, dim=2, dtype=F64):
    return torch.rand(n, dim, generator=torch.Generator().manual_seed(1), dtype=F64).to(dtype)


def grid(a=15, b=20):
    return torch.cartesian_prod(torch.arange(a, dtype=F64), torch.arange(b, dtype=F64))


def same_graphs(one, two):
    """Whether two graphs have the same neighbors, and find the same ones of new points."""
    probe = points(5) + 0.1
    found = (graph.query(probe.to(graph.x)) for graph in (one, two))
    return torch.equal(one.neighbors, two.neighbors) and torch.equal(*found)
