"""The compiled nearest-neighbor search against all distances, bit for bit, for every instruction set."""

import copy
import pickle
import time

import numpy as np
import pytest
import torch
from oracles.compiled import LEVELS, needs_library

from pyro_nngp import native
from pyro_nngp.native import search as compiled
from pyro_nngp.neighbors.search import backends as search_backends
from pyro_nngp.neighbors.search import index as search
from pyro_nngp.neighbors.search.index import SearchIndex, nearest_predecessors

pytestmark = needs_library
RNG = np.random.default_rng(0)


def oracle(points, places, k, limit, exclude):
    """Numbers and distances of the k nearest, by (distance, number); -1 and infinity where none is left."""
    every = np.broadcast_to(np.arange(len(points)), (len(places), len(points)))
    value = search_backends.squared_distances(places, points, every)
    value[(every >= limit[:, None]) | (every == exclude[:, None])] = np.inf
    value = np.pad(value, ((0, 0), (0, max(0, k - len(points)))), constant_values=np.inf)
    index = np.argsort(value, kind="stable")[:, :k]
    value = np.take_along_axis(value, index, -1)
    return np.where(np.isinf(value), -1, index), value


def found(points, places, k, limit, exclude, level=None):
    index, value = np.empty((len(places), k), np.int64), np.empty((len(places), k))
    rows = compiled.spatial_order(places)
    compiled.Tree(points).nearest(rows, places, limit, exclude, index, value, level)
    return index, value


def check(points, places=None, ks=(1, 7, 40), level=None, limit=None, exclude=None):
    places = points if places is None else places
    limit = np.full(len(places), len(points)) if limit is None else limit
    exclude = np.full(len(places), -1) if exclude is None else exclude
    for k in ks:
        index, value = found(points, places, k, limit, exclude, level)
        wanted_index, wanted_value = oracle(points, places, k, limit, exclude)
        np.testing.assert_array_equal(index, wanted_index)
        np.testing.assert_array_equal(value, wanted_value)


def grid(side, dim):
    return np.stack(np.meshgrid(*[np.arange(float(side))] * dim), -1).reshape(-1, dim)


def nested(n, dim, ratio):
    """Clusters around one place, each `ratio` times as wide as the next."""
    return (RNG.random((n, dim)) - 0.3) * ratio ** -RNG.integers(0, 6, n)[:, None].astype(float)


POINTS = {
    "grid": RNG.permutation(grid(30, 2)),
    "grid in 4-d": RNG.permutation(grid(6, 4)),
    "ascending": np.arange(900.0)[:, None],
    "far from the origin": RNG.random((800, 3)) + 1e9,
    "very far from the origin": RNG.random((800, 3)) + 1e15,  # a lattice of doubles
    "tiny": RNG.random((800, 3)) * 1e-30,
    "squares that underflow": RNG.random((800, 3)) * 1e-160,
    "squares of which some underflow": RNG.random((800, 1)) * 10.0 ** RNG.integers(-164, -150, 800)[:, None],
    "subnormal": RNG.integers(0, 40, (800, 2)) * 5e-324,
    "huge": (RNG.random((800, 3)) - 0.5) * 2e150,
    "clusters in clusters": nested(900, 3, 1e3),
    "clusters in clusters in 1-d": nested(900, 1, 1e8),
    "one point far off": np.concatenate([RNG.random((800, 2)) * 1e-7, [[1e6, -1e6]]]),
    "one column wide": RNG.random((800, 6)) * [1e-9, 1, 1e-3, 1e5, 0, 1],
    "few places": RNG.permutation(np.repeat(grid(5, 2), 36, 0)),
    "one place": np.full((900, 3), 0.1),
    "two signs of zero": RNG.choice([0.0, -0.0], (300, 2)),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 9, 17, 20])
def test_every_instruction_set_and_dimension(level, dim):
    points = RNG.random((700, dim))
    check(points, RNG.random((83, dim)), level=level)
    check(points, points[:99], level=level, exclude=np.arange(99))


@pytest.mark.parametrize("name", POINTS)
def test_ties_and_scales(name):
    points = POINTS[name]
    rows = np.arange(0, len(points), 7)
    check(points, points[rows], exclude=rows)
    check(points, points[rows] + points.std(0) * RNG.standard_normal((len(rows), points.shape[1])), ks=(12,))


@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_on_ties_and_clusters(level):
    for name in ("grid in 4-d", "clusters in clusters", "few places"):
        check(POINTS[name], POINTS[name][::9], ks=(20,), level=level)


@pytest.mark.parametrize("size", [1, 2, 15, 63, 64, 65, 128, 129, 1000])
def test_any_number_of_points_and_neighbors(size):
    points = RNG.random((size, 3))
    check(points, RNG.random((17, 3)), ks=(1, size, size + 30))


def test_limits_and_exclusions():
    points = RNG.random((1500, 2))
    rows = np.arange(1500)
    check(points, ks=(9,), limit=rows)
    check(points, ks=(9,), limit=rows, exclude=np.maximum(rows - 1, -1))
    check(points[np.argsort(points.sum(-1))], ks=(9,), limit=rows)
    check(points, ks=(9,), limit=np.zeros(1500, np.int64))
    check(POINTS["grid"], ks=(9,), limit=np.arange(900) // 2)


@pytest.mark.parametrize("distance", [1e3, 1e12, 1e40, 1e150])
def test_queries_far_from_all_points(distance):
    check(RNG.random((500, 3)), distance * RNG.standard_normal((40, 3)).clip(-1, 1), ks=(5,))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("far", [0.0, 1e3, 1e7])  # another point, which makes single precision coarser
def test_distances_that_single_precision_cannot_tell_apart(level, far):
    directions = RNG.standard_normal((700, 3))
    points = directions / np.linalg.norm(directions, axis=-1, keepdims=True) * (1 + 1e-9 * RNG.random((700, 1)))
    points = np.concatenate([points, [[far, far, -far]]])
    check(points, 1e-12 * RNG.random((30, 3)), level=level)


def test_large_k():
    check(RNG.random((3000, 3)), RNG.random((20, 3)), ks=(300, 2999))


def test_only_the_rows_asked_for_are_written():
    points, places = RNG.random((300, 2)), RNG.random((50, 2))
    index, value = np.full((50, 4), 99), np.full((50, 4), -2.0)
    limit, exclude, rows = np.full(50, 300), np.full(50, -1), np.array([40, 3, 17])
    compiled.Tree(points).nearest(rows, places, limit, exclude, index, value)
    wanted = oracle(points, places, 4, limit, exclude)
    np.testing.assert_array_equal(index[rows], wanted[0][rows])
    others = np.setdiff1d(np.arange(50), rows)
    assert (index[others] == 99).all()
    assert (value[others] == -2).all()


def test_any_layout_of_memory():
    points, places = np.asfortranarray(RNG.random((300, 3))), RNG.random((80, 6))[::2, ::2]
    check(points, places)


def test_spatial_order_brings_neighbors_together():
    points = RNG.random((4000, 3))
    order = compiled.spatial_order(points)
    np.testing.assert_array_equal(np.sort(order), np.arange(4000))
    steps = np.linalg.norm(np.diff(points[order], axis=0), axis=-1)
    assert steps.mean() < 0.3 * np.linalg.norm(np.diff(points, axis=0), axis=-1).mean()


def test_one_far_point_does_not_slow_down_the_rest():
    def seconds(points):
        index = SearchIndex(torch.from_numpy(points), backend="kdtree")
        index.nearest(torch.from_numpy(points[:16]), 8)
        start = time.perf_counter()
        index.nearest(torch.from_numpy(points[:2000]), 8)
        return time.perf_counter() - start

    close = RNG.random((20_000, 2)) * 1e-9
    with_far = np.concatenate([close, [[1.0, 1.0]]])
    assert min(seconds(with_far) for _ in range(5)) < 15 * min(seconds(close) for _ in range(5))  # else a hundredfold


# behind SearchIndex


def test_threads_change_nothing():
    points = torch.from_numpy(RNG.random((3000, 4)))
    wanted = SearchIndex(points, backend="kdtree").predecessors(12)
    torch.set_num_threads(3)
    try:
        got = SearchIndex(points, backend="kdtree").predecessors(12)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_without_it_torch_finds_the_same(monkeypatch):
    points = torch.from_numpy(POINTS["grid"])
    wanted = nearest_predecessors(points, 12, backend="kdtree")
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "0")
    assert torch.equal(nearest_predecessors(points, 12), wanted)
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "1")
    monkeypatch.setattr(compiled, "MAX_POINTS", 899)
    assert SearchIndex(points).backend == "torch"
    assert torch.equal(nearest_predecessors(points, 12), wanted)


def test_automatic_choice_takes_it_up_to_where_flat_search_is_faster(monkeypatch):
    pytest.importorskip("faiss")
    for dim, with_faiss, without in ((2, "kdtree", "kdtree"), (40, "kdtree", "kdtree"), (41, "faiss", "kdtree")):
        points = torch.from_numpy(RNG.random((50, dim)))
        assert SearchIndex(points).backend == with_faiss
        with monkeypatch.context() as patch:
            patch.setattr(search, "find_faiss", lambda: None)
            assert SearchIndex(points).backend == without


def test_an_index_can_be_copied_and_pickled():
    points = torch.from_numpy(RNG.random((500, 3)))
    index = SearchIndex(points, backend="kdtree")
    wanted = index.nearest(points[:30], 5)[0]
    for again in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        assert torch.equal(again.nearest(points[:30], 5)[0], wanted)


@pytest.mark.parametrize("function", ["nn_search_build", "nn_search_order", "nn_search_run"])
def test_lack_of_memory_is_an_error(function, monkeypatch):
    monkeypatch.setattr(native.library(), function, lambda *_: 1)
    points = torch.from_numpy(RNG.random((50, 3)))
    with pytest.raises(MemoryError, match="no memory for a tree of points or the candidates of queries"):
        SearchIndex(points, backend="kdtree").nearest(points, 3)


def test_orders_of_farthest_points_check_what_they_are_given(monkeypatch):
    with pytest.raises(ValueError, match=r"nn_farthest_points: expected first in 0\.\.3, got 4"):
        compiled.farthest_points(RNG.random((4, 2)), 4)
    with pytest.raises(ValueError, match=r"nn_search: expected points with finite squared distances, got 9"):
        compiled.farthest_points(1e200 * RNG.random((24, 2)), 0)
    monkeypatch.setattr(native.library(), "nn_farthest_points", lambda *_: -1)
    with pytest.raises(MemoryError, match="no memory for a tree of points"):
        compiled.farthest_points(RNG.random((4, 2)), 0)
