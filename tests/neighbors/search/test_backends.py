"""Backends of the search: candidates, exact distances and floors against all distances; builds of FAISS."""

import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from oracles.neighbors import POINTS, oracle

from pyro_nngp.neighbors.search import backends as search_backends
from pyro_nngp.neighbors.search import index as search
from pyro_nngp.neighbors.search.index import nearest


def rough_faiss(error, calls):
    """A stand-in for a GPU build of FAISS, whose distances have a relative error."""

    def knn_gpu(resources, queries, points, k):
        calls.append(resources)
        distance = ((queries[:, None] - points) ** 2).sum(-1)
        distance *= 1 + error * np.sin(1e4 * distance)
        index = np.argsort(distance, -1, kind="stable")[:, :k]
        return np.take_along_axis(distance, index, -1), index

    return types.SimpleNamespace(StandardGpuResources=lambda: "resources", get_num_gpus=lambda: 1, knn_gpu=knn_gpu)


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_rough_arithmetic_of_a_gpu_build_is_found_out(monkeypatch, error):
    points, calls = POINTS["uniform in 3-d"][:300], []
    monkeypatch.setitem(sys.modules, "faiss", rough_faiss(error, calls))
    assert search_backends.has_gpu_faiss()
    monkeypatch.setattr(search, "FlatFaiss", lambda array, on_gpu: search_backends.FlatFaiss(array, True))
    assert torch.equal(nearest(points, points, 6, backend="faiss"), oracle(points, points, 6))
    assert set(calls) == {"resources"}


def test_faiss_built_for_the_cpu_is_not_taken_for_a_gpu_build(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", types.SimpleNamespace())
    assert not search_backends.has_gpu_faiss()


def test_a_gpu_build_that_a_package_for_cpus_has_replaced_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", types.SimpleNamespace())
    monkeypatch.setattr(search_backends, "version", lambda package: "1.15.1")
    with pytest.warns(UserWarning, match="faiss-cpu has replaced the module of faiss-gpu.* pip uninstall -y faiss-cpu"):
        assert not search_backends.has_gpu_faiss()


@pytest.mark.slow
def test_faiss_and_torch_run_in_one_process_whichever_comes_first():
    program = (
        "import faiss, torch; torch.set_num_threads(2); faiss.omp_set_num_threads(2)\n"
        "from pyro_nngp.neighbors.search.index import nearest_predecessors as search\n"
        "x, m = torch.rand(800, 20), torch.rand(300, 300)\n"
        "for _ in range(2):\n"
        "    a, b = search(x, 9, backend='faiss'), search(x, 9, backend='torch')\n"
        "    assert torch.equal(a, b) and torch.equal(m @ m.T, (m @ m.T).T)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def make(name, points):
    """A backend over all points but the last hundred, in the prefix."""
    cpu, last = torch.device("cpu"), len(points) - 100
    makers = {
        "kdtree": lambda: search_backends.KDTree(points),
        "brute force": lambda: search_backends.BruteForce(points, cpu, torch.float64, None),
        "metric": lambda: search_backends.BruteForce(points, cpu, torch.float64, squared_metric),
        "faiss": lambda: search_backends.FlatFaiss(points, False),
        "ivf": lambda: search_backends.InvertedFile(points, 10_000, False),
    }
    backend = makers[name]()
    backend.prefix(last)
    return backend, last


def squared_metric(a, b):
    return (a[:, None] - b).square().sum(-1)


@pytest.mark.parametrize("place", ["uniform in 3-d", "uniform in 20-d", "float32, far away", "few places"])
@pytest.mark.parametrize("name", ["kdtree", "brute force", "metric", "faiss"])
def test_no_point_that_was_left_out_is_nearer_than_the_floor(name, place):
    if name == "faiss":
        pytest.importorskip("faiss")
    points = POINTS[place].double().numpy()
    backend, last = make(name, points)
    queries = points[::9] + 0.03
    limit, exclude = np.full(len(queries), last), np.full(len(queries), -1)
    found = backend.candidates(queries, 15, limit, exclude)
    distance = ((queries[:, None] - points[:last]) ** 2).sum(-1)
    np.testing.assert_allclose(found.value, np.take_along_axis(distance, found.ids, -1), rtol=1e-12)
    np.put_along_axis(distance, found.ids, np.inf, -1)
    assert (distance.min(-1) >= found.floor * (1 - 1e-12)).all()
    if place.startswith("uniform"):  # and the floor is of use: it is not far below the last candidate
        assert (found.floor > 0.99 * np.sort(found.value, -1)[:, -1]).all()


@pytest.mark.parametrize("name", ["brute force", "metric"])
def test_brute_force_leaves_out_what_is_not_wanted(name):
    points = POINTS["uniform in 3-d"].numpy()
    backend, last = make(name, points)
    rows = np.arange(5, last, 7)
    found = backend.candidates(points[rows], 5, rows, rows - 1)
    distance = ((points[rows][:, None] - points) ** 2).sum(-1)
    distance[np.arange(len(points)) >= rows[:, None]] = np.inf
    distance[np.arange(len(rows)), rows - 1] = np.inf
    wanted = np.isfinite(np.take_along_axis(distance, found.ids, -1))
    expected = np.argsort(distance, -1)[:, :5]
    assert (wanted.sum(-1) == np.minimum(rows - 1, 5)).all()
    assert all(set(a[w]) == set(b[: w.sum()]) for a, b, w in zip(found.ids, expected, wanted, strict=True))


def test_an_inverted_file_that_probes_every_list_finds_the_nearest():
    pytest.importorskip("faiss")
    points = POINTS["uniform in 3-d"].numpy()
    backend, last = make("ivf", points)
    queries, anything = points[:40] + 0.1, np.full(40, last)
    found = backend.candidates(queries, 6, anything, np.full(40, -1))
    nearest_ones = np.argsort(((queries[:, None] - points[:last]) ** 2).sum(-1), -1)[:, :6]
    assert (np.sort(found.ids, -1) == np.sort(nearest_ones, -1)).all()
    assert np.isinf(found.floor).all()  # whatever it finds is accepted


@pytest.mark.parametrize("name", ["kdtree", "faiss"])
def test_queries_are_visited_once_each(name):
    if name == "faiss":
        pytest.importorskip("faiss")
    points = POINTS["shuffled grid"].numpy()
    order = make(name, points)[0].visiting_order(points[:77])
    assert sorted(order) == list(range(77))
