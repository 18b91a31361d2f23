"""Tables of neighbors: batches, extension by new points, state, and distinct rows."""

import copy
import io
import pickle

import pytest
import torch
from oracles.neighbors import distances, grid, manhattan, nearest_rows, points, predecessors, same_graphs

from pyro_nngp.neighbors import table as neighbor_table
from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.neighbors.ordering import random_ordering
from pyro_nngp.neighbors.table import NeighborTable

F64 = torch.float64


N, K = 300, 9


def test_a_batch_holds_its_points_and_their_neighbors():
    graph = NeighborGraph(points(), K)
    idx = torch.tensor([17, int(graph.order[0]), 3, 250])
    extra = torch.tensor([[5, -1], [17, 299]])
    for more in (None, extra, extra[:0], torch.full((2,), -1)):
        batch = graph.batch(idx, more)
        wanted = torch.cat([idx, graph.neighbors[idx].flatten()] + ([] if more is None else [more.flatten()]))
        assert torch.equal(batch.rows, wanted[wanted >= 0].unique())
        assert torch.equal(batch.rows[batch.targets], idx)
        for there, here in [(graph.neighbors[idx], batch.neighbors)] + ([] if more is None else [(more, batch.extra)]):
            assert here.shape == there.shape
            assert torch.equal(torch.where(here < 0, -1, batch.rows[here]), there)
        assert batch.scale == N / 4
    assert graph.batch(idx).extra is None
    with pytest.raises(AttributeError):
        batch.scale = 1.0


def test_a_batch_of_points_with_all_neighbors_needs_no_padding():
    graph = NeighborGraph(points(), K)
    batch = graph.batch(graph.order[-2:])
    assert batch.rows.min() >= 0
    assert torch.equal(batch.rows[batch.neighbors], graph.neighbors[graph.order[-2:]])


def test_the_batch_of_all_points_is_the_graph():
    graph, extra = NeighborGraph(points(), K), torch.tensor([[4], [-1]])
    batch = graph.batch(extra=extra)
    assert torch.equal(batch.rows, torch.arange(N))
    assert torch.equal(batch.targets, torch.arange(N))
    assert batch.neighbors is graph.neighbors
    assert batch.scale == 1
    assert torch.equal(batch.extra, extra)


def test_batch_work_does_not_grow_with_the_points():
    """Count the elements of every tensor that making a batch creates."""

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, (tuple, list)) else [out]:
                largest[-1] = max(largest[-1], each.numel() if isinstance(each, torch.Tensor) else 0)
            return out

    largest = []
    for n in (300, 6000):
        graph = NeighborGraph(points(n), K)
        largest.append(0)
        with Sizes():
            graph.batch(torch.arange(10), extra=torch.arange(20))
    assert largest[0] == largest[1] <= 1 + 10 + 10 * K + 20


@pytest.mark.parametrize(
    ("idx", "error", "message"),
    [
        ([1, 2], TypeError, r"NeighborGraph.batch: expected idx to be a torch.Tensor, got list"),
        (torch.tensor([1.0]), TypeError, r"expected idx of dtype torch.int64, got torch.float32"),
        (torch.tensor([True, False]), TypeError, r"expected idx of dtype torch.int64, got torch.bool"),
        (torch.tensor(3), ValueError, r"expected idx of shape \(B,\) with B >= 1, got \(\)"),
        (torch.zeros(0, dtype=torch.int64), ValueError, r"expected idx of shape \(B,\) with B >= 1, got \(0,\)"),
        (torch.tensor([0, N]), ValueError, r"expected idx in 0\.\.299, got 0\.\.300"),
        (torch.tensor([-1, 4]), ValueError, r"expected idx in 0\.\.299, got -1\.\.4"),
        (torch.tensor([4, 7, 4]), ValueError, r"expected idx without repeats, got 1 repeats"),
    ],
)
def test_wrong_batches(idx, error, message):
    graph = NeighborGraph(points(), K)
    with pytest.raises(error, match=message):
        graph.batch(idx)


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (torch.tensor([[N]]), ValueError, r"expected extra in -1\.\.299, got 300\.\.300"),
        (torch.tensor([-2]), ValueError, r"expected extra in -1\.\.299, got -2\.\.-2"),
        (torch.tensor([1.0]), TypeError, r"expected extra of dtype torch.int64"),
    ],
)
def test_wrong_extra_rows(extra, error, message):
    graph = NeighborGraph(points(), K)
    for idx in (None, torch.tensor([1, 2])):
        with pytest.raises(error, match=message):
            graph.batch(idx, extra)


@pytest.mark.parametrize("k", [None, 1, 40])
@pytest.mark.parametrize(
    ("x", "new"),
    [(points(), points(60) + 0.02), (grid(), grid(10, 4)), (points()[:30], points(60) + 2.0)],
    ids=["scattered", "duplicates of old points", "elsewhere"],
)
def test_new_points_are_appended_to_the_ordering(x, new, k):
    graph = NeighborGraph(x, K)
    order, found = graph.extend(new, k, seed=4)
    assert torch.equal(order, random_ordering(new, seed=4))
    together, whole = torch.cat([x, new]), torch.cat([graph.order, len(x) + order])
    assert torch.equal(found, predecessors(together, whole, k or K)[len(x) :])


def test_new_points_with_lengthscales_a_metric_and_more_neighbors_than_points():
    x, new = points(10), points(7) + 0.05
    for metric in (torch.tensor([0.1, 5.0], dtype=F64), manhattan):
        graph = NeighborGraph(x, 4, metric=metric)
        order, found = graph.extend(new, 16)
        together, whole = torch.cat([x, new]), torch.cat([graph.order, 10 + order])
        rank = whole.argsort()
        far = manhattan(together, together) if callable(metric) else distances(together / metric, together / metric)
        want = nearest_rows(far.masked_fill(rank[None] >= rank[:, None], torch.inf), whole, 16)
        assert torch.equal(found, want[10:])


def test_state_round_trip_into_another_graph():
    graph = NeighborGraph(points(), K, "maximin", metric=torch.tensor([0.2, 1.0], dtype=F64))
    other = NeighborGraph(points() + 5, K)
    assert not same_graphs(graph, other)
    other.levels()
    assert set(graph.state_dict()) == {"x", "order", "neighbors", "lengthscale"}
    other.load_state_dict(graph.state_dict())
    assert same_graphs(graph, other)
    assert all(map(torch.equal, graph.levels(), other.levels()))
    holder = torch.nn.ModuleDict({"graph": NeighborGraph(points() + 5, K)})
    holder["graph"].query(points(2))
    holder.load_state_dict({f"graph.{key}": value for key, value in graph.state_dict().items()})
    assert same_graphs(graph, holder["graph"])


def test_loading_does_not_write_into_the_users_tensors():
    x, order = points(), torch.randperm(N)
    kept = x.clone(), order.clone()
    NeighborGraph(x, K, order).load_state_dict(NeighborGraph(x + 1, K, seed=5).state_dict())
    assert torch.equal(x, kept[0])
    assert torch.equal(order, kept[1])


def test_copies_and_pickles():
    graph = NeighborGraph(points(), K)
    graph.levels()
    file = io.BytesIO()
    torch.save(graph, file)
    file.seek(0)
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), torch.load(file, weights_only=False)):
        assert same_graphs(graph, other)
        assert all(map(torch.equal, graph.levels(), other.levels()))


def test_dtype_moves_with_the_module():
    graph = NeighborGraph(points(), K)
    graph.query(graph.x[:2])
    single = copy.deepcopy(graph).float()
    assert single.x.dtype == single.lengthscale.dtype == torch.float32
    assert single.order.dtype == single.neighbors.dtype == torch.int64
    assert torch.equal(single.query(single.x[:9], 1)[:, 0], torch.arange(9))


def test_the_search_index_is_kept_between_queries(monkeypatch):
    made = []
    index = neighbor_table.SearchIndex
    monkeypatch.setattr(neighbor_table, "SearchIndex", lambda *args, **kwargs: made.append(1) or index(*args, **kwargs))
    graph = NeighborGraph(points(), K)
    for _ in range(3):
        graph.query(graph.x[:2])
        graph.others(2, torch.tensor([1]))
    assert len(made) == 1
    graph.double().query(graph.x[:2])
    assert len(made) == 2
    graph.load_state_dict(graph.state_dict())
    graph.query(graph.x[:2])
    assert len(made) == 3
    graph.refresh()
    graph.query(graph.x[:2])
    assert len(made) == 4


def test_distinct_rows():
    rows = torch.tensor([[2**31 - 1, 3], [-1, 3], [0, 5]])
    found, places = neighbor_table.distinct_rows(rows)
    assert found.tolist() == [-1, 0, 3, 5, 2**31 - 1]
    assert found.dtype == places.dtype == torch.int64
    assert torch.equal(found[places], rows)


def test_a_table_without_a_search_is_told_so():
    class Bare(NeighborTable):
        pass

    match = r"Bare: expected find_neighbors to be defined by the subclass, got nothing\. Return the k neighbors"
    with pytest.raises(NotImplementedError, match=match):
        Bare(points(), 3).find_neighbors(3)
