"""FAISS: candidates that single precision cannot order, builds of it, and its place beside torch."""

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


@pytest.mark.parametrize(("error", "most"), [(0.0, 15), (0.5, 15), (0.0, 14)])
def test_rough_arithmetic_of_a_gpu_build_is_found_out_and_its_limit_kept(monkeypatch, error, most):
    points, calls = POINTS["uniform in 3-d"][:300], []
    monkeypatch.setitem(sys.modules, "faiss", rough_faiss(error, calls))
    monkeypatch.setattr(search_backends, "MOST_ON_GPU", most)
    assert search_backends.has_gpu_faiss()
    monkeypatch.setattr(search, "FlatFaiss", lambda array, on_gpu: search_backends.FlatFaiss(array, True))
    assert torch.equal(nearest(points, points, 6, backend="faiss"), oracle(points, points, 6))
    assert calls == (["resources"] if most == 15 else [])


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


def test_single_precision_is_not_trusted_with_points_that_are_equally_far():
    pytest.importorskip("faiss")
    points = torch.nn.functional.normalize(torch.randn(300, 20, dtype=torch.float64))
    points = points * (1 + 1e-9 * torch.rand(300, 1, dtype=torch.float64))
    middle = torch.zeros(1, 20, dtype=torch.float64)
    assert torch.equal(nearest(middle, points, 6, backend="faiss"), oracle(middle, points, 6))
