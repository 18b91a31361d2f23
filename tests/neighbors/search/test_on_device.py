"""Search in torch operations: what the tests of all backends leave open. Those check its answers and ties."""

import pytest
import torch
from oracles.neighbors import POINTS, N, oracle
from oracles.pretended_device import DEVICE, pretended_device
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.neighbors.search import on_device
from pyro_nngp.neighbors.search.index import SearchIndex

F64 = torch.float64
NAMES = ("shuffled grid", "uniform in 20-d")


@pytest.mark.parametrize("name", NAMES)
def test_small_blocks_change_nothing(name, monkeypatch):
    points = POINTS[name]
    monkeypatch.setattr(on_device, "CPU_BLOCK", 3000)
    monkeypatch.setattr(on_device, "TILE", 100)
    index, distance = SearchIndex(points, backend="torch").predecessors(12)
    assert torch.equal(index, oracle(points, points, 12, limit=range(N)))
    assert torch.equal(distance, SearchIndex(points, backend="kdtree").predecessors(12)[1])


def test_clusters_far_from_each_other_and_queries_outside():
    """Cells of the first grid hold everything or nothing; a query may lie outside of all cells."""
    tight = 1e-7 * torch.rand(300, 2, dtype=F64)
    points = torch.cat([tight, tight[:100] + 1, torch.rand(100, 2, dtype=F64), torch.tensor([[1e6, 0.0]])])
    points = points[torch.randperm(len(points))]
    queries = torch.cat([points[:40], torch.tensor([[-5.0, 2.0], [2e6, 2e6], [0.5, -1e5]], dtype=F64)])
    rows = torch.cat([torch.arange(40), torch.full((3,), -1)])
    found = SearchIndex(points, backend="torch").nearest(queries, 9, rows)[0]
    assert torch.equal(found, SearchIndex(points, backend="kdtree").nearest(queries, 9, rows)[0])


def test_work_per_query_does_not_grow_with_points_or_clusters(monkeypatch):
    measured, distances = [], on_device.distances
    monkeypatch.setattr(
        on_device, "distances", lambda p, q, index: measured.append(index.numel()) or distances(p, q, index)
    )
    work = []
    for size in (1000, 8000):
        even = torch.rand(size, 2, dtype=F64)
        for points in (even, torch.where(torch.arange(size)[:, None] % 2 == 0, even, 1e-4 * even)):
            measured.clear()
            SearchIndex(points, backend="torch").nearest(points[:500], 10)
            work.append(sum(measured) / 500)
    assert max(work) < 100 * 10


class Transfers(TorchDispatchMode):
    """Sizes of the tensors that come from the pretended device."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device == DEVICE and result.device.type == "cpu":
            self.sizes.append(args[0].numel())
        return result


@pytest.mark.parametrize("dim", [2, 5])
def test_no_points_or_neighbors_leave_the_device(dim):
    points = torch.rand(300, dim)
    here = NeighborGraph(points, 8, "given", backend="torch")
    with pretended_device():
        there = NeighborGraph(points.to(DEVICE), 8, "given", backend="torch")
        index = SearchIndex(points.to(DEVICE), backend="torch")
        with Transfers() as transfers:
            found = index.predecessors(8)[0]
        assert (len(transfers.sizes) > 0) == (dim == 2)
        assert max(transfers.sizes, default=0) <= 300  # numbers of candidates, to cut blocks by
        assert torch.equal(there.neighbors.cpu(), here.neighbors)
        assert torch.equal(found.cpu(), here.neighbors)


def test_grids_are_kept_for_the_next_queries(monkeypatch):
    """A batch must not cost more as points grow."""
    points = torch.rand(2000, 2, dtype=F64)
    index = SearchIndex(points, backend="torch")
    want = index.nearest(points[:50], 8)[0]
    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made = result if isinstance(result, tuple) else (result,)
            largest.extend(each.numel() for each in made if isinstance(each, torch.Tensor))
            return result

    monkeypatch.setattr(on_device, "CPU_BLOCK", 1500)
    with Sizes():
        found = index.nearest(points[:50], 8)[0]
    assert torch.equal(found, want)
    assert max(largest) < 2000
