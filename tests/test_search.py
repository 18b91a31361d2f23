"""Neighbor search against a float64 brute-force oracle: every backend, ties, duplicates, every order of the points, every error."""

import numpy as np
import pytest
import torch

from pyro_nngp import search, search_backends
from pyro_nngp.search import SearchIndex, nearest, nearest_predecessors, recall

EXACT = ("kdtree", "torch", "faiss")


@pytest.fixture(autouse=True)
def _needs_faiss(request):
    if "faiss" in request.node.name or "ivf" in request.node.name:
        pytest.importorskip("faiss")


def oracle(queries, points, k, limit=None, exclude=None):
    """All distances in float64, summed over the dimensions in order; sorted by (distance, index); -1 where there is no point left."""
    queries, points = queries.double().numpy(), points.double().numpy()
    d2 = np.zeros((len(queries), len(points)))
    for q, p in zip(queries.T, points.T, strict=True):
        d2 += (p - q[:, None]) ** 2
    if limit is not None:
        d2[np.arange(len(points)) >= np.asarray(limit)[:, None]] = np.inf
    if exclude is not None:
        rows = np.flatnonzero(np.asarray(exclude) >= 0)
        d2[rows, np.asarray(exclude)[rows]] = np.inf
    index = np.lexsort((np.broadcast_to(np.arange(len(points)), d2.shape), d2))[:, :k]
    index[np.isinf(np.take_along_axis(d2, index, -1))] = -1
    return torch.from_numpy(np.pad(index, ((0, 0), (0, k - index.shape[1])), constant_values=-1))


def uniform(n, dim, seed=0):
    return torch.rand(n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shuffled(points, seed=0):
    return points[torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))]


def grid(a, b):
    return torch.cartesian_prod(torch.arange(a, dtype=torch.float64), torch.arange(b, dtype=torch.float64))


def datasets():
    clustered = (uniform(8, 2)[:, None] + 1e-4 * uniform(8 * 200, 2, 1).view(8, 200, 2)).flatten(0, 1)
    return {
        **{f"uniform-{dim}d": uniform(1500, dim) for dim in (1, 2, 3, 8, 20)},
        "grid-raster": grid(40, 37),
        "grid-shuffled": shuffled(grid(40, 37)),
        "grid-stretched": shuffled(grid(40, 37)) * torch.tensor([0.37, 1.1], dtype=torch.float64),
        "float32-far-away": (uniform(1500, 3) + 1e3).float(),
        "sorted-1d": torch.arange(1500, dtype=torch.float64)[:, None],
        "coordinate": uniform(1500, 2)[uniform(1500, 2).sum(-1).argsort()],
        "outside-in": uniform(1500, 2)[(uniform(1500, 2) - 0.5).norm(dim=-1).argsort(descending=True)],
        "clusters-in-turn": clustered,
        "few-places": shuffled(grid(5, 5).repeat(60, 1)),
        "few-places-1d": shuffled(torch.tensor([[0.0], [-0.0], [1.0]], dtype=torch.float64).repeat(500, 1)),
        "one-place": torch.ones(1300, 2, dtype=torch.float64),
    }


DATASETS = datasets()


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("name", DATASETS)
def test_predecessors_equal_oracle(name, backend):
    points = DATASETS[name]
    for k in (1, 7, 20):
        expected = oracle(points, points, k, limit=range(len(points)))
        assert torch.equal(nearest_predecessors(points, k, backend=backend), expected)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("name", DATASETS)
def test_nearest_equals_oracle(name, backend):
    points = DATASETS[name]
    rows = torch.arange(0, len(points), 3)
    index = SearchIndex(points, backend=backend)
    for k in (1, 12, 40):
        assert torch.equal(index.nearest(points[rows], k)[0], oracle(points[rows], points, k))
        assert torch.equal(index.nearest(points[rows], k, rows)[0], oracle(points[rows], points, k, exclude=rows))
    elsewhere = points[rows] + 0.5
    assert torch.equal(index.nearest(elsewhere, 12)[0], oracle(elsewhere, points, 12))
