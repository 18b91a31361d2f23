"""Neighbor search against a float64 oracle: every backend, ties, duplicates, any order of the points, every error."""

import builtins
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import ClassVar

import pytest
import torch
from oracles.neighbors import PLANE, POINTS, N, oracle, uniform
from tqdm.auto import tqdm

from pyro_nngp.neighbors.search import backends as search_backends
from pyro_nngp.neighbors.search import index as search
from pyro_nngp.neighbors.search import on_device
from pyro_nngp.neighbors.search.backends import CompiledTree
from pyro_nngp.neighbors.search.index import SearchIndex, nearest, nearest_predecessors

F64 = torch.float64
EXACT = ("kdtree", "torch", "faiss")


@pytest.fixture(autouse=True)
def _optional_library(request):
    if "faiss" in request.node.name or "backends" in request.node.name:
        pytest.importorskip("faiss")


@pytest.mark.parametrize("name", POINTS)
def test_all_backends_find_the_same_predecessors(name):
    points = POINTS[name]
    expected = oracle(points, points, 20, limit=range(N))
    for backend in EXACT:
        for k in (1, 20):
            assert torch.equal(nearest_predecessors(points, k, backend=backend), expected[:, :k])
    for backend in EXACT:
        for start in (300, N - 3):
            found = nearest_predecessors(points, 7, start=start, backend=backend)
            assert torch.equal(found, expected[start:, :7])


@pytest.mark.parametrize("name", POINTS)
def test_all_backends_find_the_same_points(name):
    points = POINTS[name]
    rows = torch.arange(0, N, 5)
    elsewhere = points[rows] + 0.5
    at, beside = oracle(points[rows], points, 40, exclude=rows), oracle(elsewhere, points, 40)
    for backend in EXACT:
        index = SearchIndex(points, backend=backend)
        for k in (1, 40):
            assert torch.equal(index.nearest(points[rows], k, rows)[0], at[:, :k])
            assert torch.equal(index.nearest(elsewhere, k)[0], beside[:, :k])


@pytest.mark.parametrize("backend", EXACT)
def test_every_point_can_be_asked_for(backend):
    points = POINTS["shuffled grid"][:60]
    assert torch.equal(nearest(points, points, 60, backend=backend), oracle(points, points, 60))
    rows = torch.arange(60)
    assert torch.equal(nearest(points, points, 59, rows, backend=backend), oracle(points, points, 59, exclude=rows))
    more = nearest_predecessors(points, 80, backend=backend)
    assert torch.equal(more, oracle(points, points, 80, limit=rows))
    some = torch.where(rows % 2 == 0, rows, -1)
    mixed = torch.where(some[:, None] < 0, oracle(points, points, 9), oracle(points, points, 9, exclude=rows))
    assert torch.equal(nearest(points, points, 9, some, backend=backend), mixed)


def test_distances_are_exact():
    points = POINTS["uniform in 3-d"]
    index, distance = SearchIndex(points).predecessors(5)
    expected = (points[:, None] - points[index]).square().sum(-1).masked_fill(index < 0, torch.inf)
    torch.testing.assert_close(distance, expected, rtol=1e-14, atol=0)


def test_float32_points_are_compared_in_float64():
    # In float32 both candidates have the squared distance 1, so the first would win; the second is nearer.
    points = torch.tensor([[1.0, 1e-5], [1.0, 0.0], [0.0, 0.0]])
    assert nearest_predecessors(points, 1)[2].item() == 1


def test_an_index_that_another_thread_builds_is_not_used_before_it_is_ready(monkeypatch):
    index, building, answered = SearchIndex(PLANE), Event(), Event()

    class Slow(CompiledTree):
        def __init__(self, points):
            if not building.is_set():
                building.set()
                assert answered.wait(10)
            super().__init__(points)

    monkeypatch.setattr(search, "CompiledTree", Slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(index.nearest, PLANE, 3)
        assert building.wait(10)
        try:
            second = index.nearest(PLANE, 3)[0]
        finally:
            answered.set()
        assert torch.equal(first.result()[0], second)


def test_places_that_many_points_share_are_searched_once(monkeypatch):
    sizes, points = [], POINTS["few places"]
    monkeypatch.setattr(search, "CompiledTree", lambda points: sizes.append(len(points)) or CompiledTree(points))
    index = SearchIndex(points, backend="kdtree")
    for k in (3, 12, 3):
        index.nearest(points[:5], k)
    assert sizes == [25 * 4, 25 * 13]


@pytest.mark.slow
def test_small_blocks_and_threads_change_nothing(monkeypatch):
    points = POINTS["shuffled grid"]
    expected = oracle(points, points, 12, limit=range(N))
    monkeypatch.setattr(search_backends, "BLOCK", 500)
    torch.set_num_threads(3)
    try:
        for backend in ("kdtree", "faiss"):
            assert torch.equal(nearest_predecessors(points, 12, backend=backend), expected)
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(on_device, "TILE", 100)
    constant = nearest_predecessors(points, 12, metric=lambda a, b: a.new_zeros(len(a), len(b)))
    assert torch.equal(constant[20:], torch.arange(12).expand(N - 20, 12))


# a metric of the user's


def test_own_metric():
    points = POINTS["shuffled grid"]

    def manhattan(a, b):
        return (a[:, None] - b).abs().sum(-1)

    distance = manhattan(points, points).masked_fill(torch.ones(N, N).triu().bool(), torch.inf)
    expected = distance.argsort(dim=-1, stable=True)[:, :9]
    expected = expected.masked_fill(distance.gather(-1, expected).isinf(), -1)
    assert torch.equal(nearest_predecessors(points, 9, metric=manhattan), expected)
    rows = torch.arange(N)
    distance = manhattan(points, points).fill_diagonal_(torch.inf)
    expected = distance.argsort(dim=-1, stable=True)[:, :9]
    assert torch.equal(nearest(points, points, 9, rows, metric=manhattan), expected)


def test_own_metric_sees_the_dtype_of_the_points_and_needs_no_gradient():
    scale = torch.nn.Parameter(torch.ones(()))

    def metric(a, b):
        assert a.dtype == b.dtype == torch.float32
        return -(a @ b.T) * scale  # negative, as a correlation is turned into a distance

    points = torch.nn.functional.normalize(torch.randn(50, 3))
    angle = (points @ points.T).argsort(dim=-1, descending=True, stable=True)[:, :4]
    assert torch.equal(nearest(points, points, 4, metric=metric), angle)


def test_own_metric_may_return_what_it_keeps():
    points = uniform(30, 2)
    table = torch.cdist(points, points)
    kept = table.clone()
    nearest(points, points, 3, torch.arange(30), metric=lambda a, b: table)
    assert torch.equal(table, kept)


def test_infinitely_far_points_are_never_neighbors():
    points = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=F64)

    def within_halves(a, b):
        apart = (a[:, None, 0] < 1.5) != (b[:, 0] < 1.5)
        return torch.cdist(a, b).masked_fill(apart, torch.inf)

    assert nearest(points, points, 3, metric=within_halves).tolist() == [[0, 1, -1], [1, 0, -1], [2, 3, -1], [3, 2, -1]]


@pytest.mark.parametrize(
    ("metric", "error", "message"),
    [
        (lambda a, b: a @ b.T @ b, ValueError, r"expected metric to return a tensor of shape \(5, 5\), got \(5, 2\)"),
        (lambda a, b: 0.0, ValueError, r"expected metric to return a tensor of shape \(5, 5\), got float"),
        (lambda a, b: torch.cdist(a, b) / 0 * 0, ValueError, r"expected metric to return numbers, got NaN"),
        ("cosine", TypeError, r"expected metric to be callable, got str"),
    ],
)
def test_wrong_metrics(metric, error, message):
    points = uniform(5, 2)
    with pytest.raises(error, match=message):
        nearest(points, points, 2, metric=metric)


def test_own_metric_goes_by_torch_only():
    with pytest.raises(ValueError, match=r"expected backend 'auto' or 'torch' with a metric, got 'kdtree'"):
        SearchIndex(PLANE, backend="kdtree", metric=torch.cdist)


# backends


@pytest.fixture
def without_faiss(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)


@pytest.fixture
def without_compiled_code(monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "0")


@pytest.mark.parametrize("dim", [2, 20])
def test_without_faiss_and_compiled_code_search_is_exact(without_faiss, without_compiled_code, dim):
    points = POINTS[f"uniform in {dim}-d"]
    assert torch.equal(nearest_predecessors(points, 6), oracle(points, points, 6, limit=range(N)))
    assert SearchIndex(points).backend == "torch"
    with pytest.raises(ImportError, match=r"FAISS to be installed for backend 'faiss'.*pyro-nngp\[cpu\]"):
        SearchIndex(points, backend="faiss")
    with pytest.raises(ValueError, match=r"expected compiled code for backend 'kdtree', got none for 900 points"):
        SearchIndex(points, backend="kdtree")


def test_a_library_that_does_not_import_counts_as_absent(monkeypatch, without_compiled_code):
    original = builtins.__import__

    def broken(name, *args, **kwargs):
        if name == "faiss":
            raise ImportError("libcublas.so.12: cannot open shared object file")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken)
    assert SearchIndex(POINTS["uniform in 20-d"]).backend == "torch"


def test_automatic_choice_uses_faiss_in_high_dimension_except_on_macos(monkeypatch, without_compiled_code):
    pytest.importorskip("faiss")
    assert SearchIndex(POINTS["uniform in 3-d"]).backend == "torch"
    assert SearchIndex(POINTS["uniform in 8-d"]).backend == "faiss"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert SearchIndex(POINTS["uniform in 8-d"]).backend == "torch"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["shuffled grid", "uniform in 20-d", "float32, far away", "few places"])
def test_gpu_finds_the_same_predecessors(name):
    points = POINTS[name]
    found = nearest_predecessors(points.cuda(), 12)
    assert found.is_cuda
    assert torch.equal(found.cpu(), nearest_predecessors(points, 12))


# progress


class Bar(tqdm):
    """A progress bar that can be looked at afterwards."""

    made: ClassVar = []
    changed: ClassVar = {}

    def __init__(self, **options):
        super().__init__(**options | self.changed)
        self.made.append(self)


@pytest.fixture
def bar(monkeypatch):
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(search, "tqdm", Bar)
    return Bar


def test_progress_counts_every_point_once_and_stays_silent_in_a_quick_search(bar, capsys):
    points = POINTS["shuffled grid"]
    index = SearchIndex(points)
    index.predecessors(12)
    index.nearest(points[:70], 3)
    assert [(b.n, b.total) for b in bar.made] == [(N, N), (70, 70)]
    assert capsys.readouterr().err == ""


def test_progress_shows_in_a_slow_search_only_if_wanted(bar, capsys, monkeypatch):
    monkeypatch.setattr(Bar, "changed", {"delay": 0, "mininterval": 0})
    nearest_predecessors(POINTS["shuffled grid"], 3, progress=False)
    assert capsys.readouterr().err == ""
    nearest_predecessors(POINTS["shuffled grid"], 3)
    assert "nearest neighbors: 100%" in capsys.readouterr().err


# wrong input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: nearest(x, x, 0), ValueError, r"nearest: expected k in 1\.\.5, got 0"),
        (lambda x: nearest(x, x, 6), ValueError, r"nearest: expected k in 1\.\.5, got 6"),
        (lambda x: nearest(x, x, 5, torch.arange(5)), ValueError, r"nearest: expected k in 1\.\.4, got 5"),
        (lambda x: nearest(x, x, 2.0), TypeError, r"nearest: expected k to be an int, got float"),
        (lambda x: nearest_predecessors(x, 0), ValueError, r"nearest_predecessors: expected k in 1"),
        (lambda x: nearest_predecessors(x, 2, 5), ValueError, r"expected start in 0\.\.4, got 5"),
        (lambda x: nearest_predecessors(x, 2, -1), ValueError, r"expected start in 0\.\.4, got -1"),
        (lambda x: nearest(x[:, :1], x, 2), ValueError, r"expected queries with 2 columns, as points have, got 1"),
        (lambda x: nearest(x.float(), x, 2), TypeError, r"expected queries of the dtype of points"),
        (lambda x: nearest(x[0], x, 2), ValueError, r"expected queries of shape \(N, D\)"),
        (lambda x: nearest(x.numpy(), x, 2), TypeError, r"expected queries to be a torch.Tensor, got ndarray"),
        (lambda x: nearest(x / 0, x, 2), ValueError, r"expected queries to be finite"),
        (lambda x: nearest(x, x.log() / 0, 2), ValueError, r"expected points to be finite"),
        (lambda x: nearest(x, x.long(), 2), TypeError, r"expected points of a floating-point dtype"),
        (lambda x: nearest(x, x * 1e200, 2), ValueError, r"expected points at most 1e\+150 in size"),
        (lambda x: nearest(x * 1e200, x, 2), ValueError, r"expected queries at most 1e\+150 in size"),
        (lambda x: nearest(x, x, 2, [0, 1, 2, 3, 4]), TypeError, r"expected exclude to be a torch.Tensor, got list"),
        (lambda x: nearest(x, x, 2, torch.arange(3)), ValueError, r"expected exclude to be int64 of shape \(5,\)"),
        (lambda x: nearest(x, x, 2, torch.zeros(5)), ValueError, r"expected exclude to be int64 .* got torch.float32"),
        (lambda x: nearest(x, x, 2, torch.arange(5) + 1), ValueError, r"expected exclude in -1\.\.4, got 1\.\.5"),
        (lambda x: nearest(x, x, 2, torch.arange(5) - 2), ValueError, r"expected exclude in -1\.\.4, got -2\.\.2"),
        (lambda x: nearest(x, x, 2, backend="annoy"), ValueError, r"expected backend to be 'auto' or .*, got 'annoy'"),
        (lambda x: nearest(x, x, 2, workers=3), TypeError, r"unexpected keyword argument 'workers'"),
    ],
)
def test_wrong_input(call, error, message):
    with pytest.raises(error, match=message):
        call(uniform(5, 2) + 1)


def test_answers_that_do_not_fit_into_memory_name_k():
    with pytest.raises(MemoryError, match=r"nearest_predecessors: expected the computation to fit into .* Lower k\."):
        nearest_predecessors(uniform(5, 2), 10**14)
