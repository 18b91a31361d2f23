"""Neighbor graphs against brute force: predecessors, queries, batches, levels, saving, invariances, every error."""

import copy
import io
import pickle

import pytest
import torch

from pyro_nngp.neighbors import table as neighbor_table
from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.neighbors.ordering import make_ordering, random_ordering
from pyro_nngp.neighbors.search import backends as search_backends
from pyro_nngp.neighbors.table import NeighborTable

F64 = torch.float64
N, K = 300, 9


def points(n=N, dim=2, dtype=F64):
    return torch.rand(n, dim, generator=torch.Generator().manual_seed(1), dtype=F64).to(dtype)


def grid(a=15, b=20):
    return torch.cartesian_prod(torch.arange(a, dtype=F64), torch.arange(b, dtype=F64))


POINTS = {
    **{f"{dim} dimensions": points(dim=dim) for dim in (1, 2, 3, 8, 20)},
    "grid": grid(),
    "grid twice": grid(10, 15).repeat(2, 1),
    "one place": torch.zeros(N, 2, dtype=F64),
    "float32": points(dtype=torch.float32) + 100,
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


@pytest.mark.parametrize("ordering", ["random", "maximin", "coordinate", "given"])
@pytest.mark.parametrize("name", POINTS)
def test_neighbors_are_the_nearest_predecessors(name, ordering):
    x = POINTS[name]
    graph = NeighborGraph(x, K, ordering, seed=2)
    assert torch.equal(graph.order, make_ordering(x, ordering, seed=2))
    assert torch.equal(graph.neighbors, predecessors(x, graph.order, K))
    assert (graph.num_points, graph.num_neighbors) == (N, K)


@pytest.mark.parametrize("name", POINTS)
def test_queries_find_the_nearest_of_all_points(name):
    x = POINTS[name]
    graph = NeighborGraph(x, K, "maximin")
    new = x[:40] + torch.rand(40, x.shape[1]).to(x)
    assert torch.equal(graph.query(new), nearest_rows(distances(new, x), graph.order, K))
    assert torch.equal(graph.query(new, N), nearest_rows(distances(new, x), graph.order, N))
    idx = torch.tensor([5, 1, 298, 5])
    far = distances(x[idx], x)
    far[torch.arange(4), idx] = torch.inf
    others = nearest_rows(far, graph.order, N - 1)
    assert torch.equal(graph.others(N - 1, idx), others)
    assert torch.equal(graph.others(idx=idx), others[:, :K])
    assert torch.equal(graph.query(x[idx], 4, exclude=idx), others[:, :4])
    assert torch.equal(graph.others(3)[idx], others[:, :3])


def test_queries_may_leave_out_nothing():
    x = points()
    graph = NeighborGraph(x, K)
    exclude = torch.tensor([-1, 7])
    want = torch.stack([graph.query(x[:1])[0], graph.others(idx=torch.tensor([7]))[0]])
    assert torch.equal(graph.query(x[[0, 7]], exclude=exclude), want)


@pytest.mark.parametrize("metric", [torch.tensor([0.3, 7.0], dtype=F64), torch.tensor(0.2, dtype=F64)])
def test_lengthscales_divide_the_inputs(metric):
    x = points()
    graph = NeighborGraph(x, K, metric=metric)
    assert torch.equal(graph.neighbors, predecessors(x / metric, graph.order, K))
    new = points(20) + 0.1
    assert torch.equal(graph.query(new), nearest_rows(distances(new / metric, x / metric), graph.order, K))
    assert torch.equal(graph.lengthscale, metric.expand(2))
    ordered = NeighborGraph(x, K, "coordinate", metric=metric)
    assert torch.equal(ordered.order, (x / metric).sum(-1).argsort(stable=True))


def test_lengthscales_divide_in_float64():
    x, metric = 0.1 * grid().float(), torch.tensor([0.3, 0.7])
    graph = NeighborGraph(x, K, metric=metric)
    assert torch.equal(graph.neighbors, predecessors(x.double() / metric.double(), graph.order, K))


def test_refresh_follows_lengthscales_and_points():
    x = points()
    graph = NeighborGraph(x, K)
    before, buffer, order = graph.neighbors.clone(), graph.neighbors, graph.order.clone()
    graph.query(x[:3])
    graph.levels()
    lengthscale = torch.tensor([0.1, 3.0], dtype=F64, requires_grad=True)
    graph.refresh(lengthscale)
    assert graph.neighbors is buffer
    assert torch.equal(graph.order, order)
    assert not torch.equal(graph.neighbors, before)
    fresh = NeighborGraph(x, K, metric=lengthscale.detach())
    assert torch.equal(graph.neighbors, fresh.neighbors)
    assert torch.equal(graph.query(x[:3] + 0.1), fresh.query(x[:3] + 0.1))
    assert all(map(torch.equal, graph.levels(), fresh.levels()))
    graph.refresh(torch.tensor(1.0, dtype=F64))
    assert torch.equal(graph.neighbors, before)
    moved = x.flip(0)
    graph.x.copy_(moved)
    graph.refresh()
    assert torch.equal(graph.neighbors, predecessors(moved, order, K))
    assert torch.equal(x, points())  # the user's own tensor stays as it was


def manhattan(a, b):
    return (a[:, None] - b).abs().sum(-1)


def test_own_metric_everywhere():
    x, new = grid(), grid(4, 5) + 0.5
    graph = NeighborGraph(x, K, metric=manhattan)
    rank = graph.order.argsort()
    far = manhattan(x, x)
    past = far.masked_fill(rank[None] >= rank[:, None], torch.inf)
    assert torch.equal(graph.neighbors, nearest_rows(past, graph.order, K))
    assert torch.equal(graph.query(new), nearest_rows(manhattan(new, x), graph.order, K))
    assert torch.equal(graph.others(), nearest_rows(far.fill_diagonal_(torch.inf), graph.order, K))
    scale = [1.0]
    changing = NeighborGraph(x, K, metric=lambda a, b: manhattan(a * torch.tensor([1.0, scale[0]]).to(a), b))
    old = changing.neighbors.clone()
    scale[0] = 0.0
    changing.refresh()
    assert not torch.equal(old, changing.neighbors)


def test_points_out_of_reach_are_no_neighbors():
    x = torch.tensor([[0.0], [1.0], [5.0], [6.0]], dtype=F64)
    graph = NeighborGraph(
        x, 2, "given", metric=lambda a, b: manhattan(a, b).masked_fill(manhattan(a, b) > 2, torch.inf)
    )
    assert graph.neighbors.tolist() == [[-1, -1], [0, -1], [-1, -1], [2, -1]]
    assert graph.query(x[:1] + 5, 3).tolist() == [[2, 3, -1]]


@pytest.mark.parametrize("backend", ["kdtree", "torch", "faiss", "ivf"])
def test_every_backend_gives_the_same_graph(backend):
    if backend in ("faiss", "ivf"):
        pytest.importorskip("faiss")
    x = grid()
    want, got = NeighborGraph(x, K), NeighborGraph(x, K, backend=backend, nprobe=1000, progress=False)
    assert torch.equal(got.neighbors, want.neighbors)
    assert torch.equal(got.query(x[:20] + 0.4), want.query(x[:20] + 0.4))


# invariances


@pytest.mark.parametrize("x", [points(), grid(), grid(10, 15).repeat(2, 1)], ids=["scattered", "grid", "duplicates"])
def test_row_order_does_not_matter(x):
    order, shuffle = torch.randperm(N), torch.randperm(N)
    back = shuffle.argsort()  # row i of x is row back[i] of x[shuffle]
    one, two = NeighborGraph(x, K, order), NeighborGraph(x[shuffle], K, back[order])

    def translated(rows):
        return torch.where(rows < 0, -1, back[rows])

    assert torch.equal(translated(one.neighbors), two.neighbors[back])
    new = points(30) * 10
    assert torch.equal(translated(one.query(new)), two.query(new))
    assert torch.equal(translated(one.others(4)), two.others(4)[back])


def test_translation_and_scaling_do_not_matter():
    x, order = points(), torch.randperm(N)
    graph = NeighborGraph(x, K, order)
    for other in (x + 1e3, x * 1e-8, -x):
        assert torch.equal(NeighborGraph(other, K, order).neighbors, graph.neighbors)


def test_threads_do_not_matter(monkeypatch):
    x = grid(40, 50)
    one = NeighborGraph(x, K)
    for tree in (search_backends.KDTree, search_backends.CompiledTree):
        monkeypatch.setattr(tree, "threads", lambda self: 3)
    assert torch.equal(NeighborGraph(x, K).neighbors, one.neighbors)


# the user's own neighbors


def test_own_neighbors_are_kept():
    x, order = points(5), torch.tensor([3, 1, 0, 4, 2])
    rows = torch.tensor([[3, -1], [3, -1], [4, 3], [-1, -1], [1, 3]])
    graph = NeighborGraph(x, 2, order, neighbors=rows)
    assert torch.equal(graph.neighbors, rows)
    graph.neighbors[0, 0] = 1
    assert rows[0, 0] == 3
    with pytest.raises(ValueError, match=r"NeighborGraph: expected neighbors to come from a search"):
        graph.refresh()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[-1, -1], [0, -1]], r"expected neighbors to be int64 of shape \(3, 2\), got torch.int64 of shape \(2, 2\)"),
        ([[-1.0, -1.0], [0.0, -1.0], [0.0, 1.0]], r"expected neighbors to be int64 of shape \(3, 2\), got torch.float"),
        ([[-1, -1], [0, -1], [0, 3]], r"expected neighbors in 0\.\.2 with -1 at the end"),
        ([[-1, -1], [0, -1], [0, -2]], r"expected neighbors in 0\.\.2 with -1 at the end"),
        ([[-1, -1], [-1, 0], [0, 1]], r"expected neighbors in 0\.\.2 with -1 at the end"),
        (
            [[-1, -1], [2, -1], [0, 1]],
            r"expected neighbors to precede their point in the ordering, got others in row 1",
        ),
        ([[0, -1], [0, -1], [0, 1]], r"expected neighbors to precede their point in the ordering, got others in row 0"),
        ([[-1, -1], [0, -1], [0, 0]], r"expected neighbors without repeats in a row"),
    ],
)
def test_wrong_neighbors(rows, message):
    with pytest.raises(ValueError, match=message):
        NeighborGraph(points(3), 2, "given", neighbors=torch.tensor(rows))


# batches


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
    assert largest == [10 + 10 * K + 20] * 2


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


# levels


def naive_levels(rows, order):
    level = {}
    for i in order.tolist():
        level[i] = 1 + max((level[j] for j in rows[i].tolist() if j >= 0), default=-1)
    return [[i for i in sorted(level) if level[i] == depth] for depth in range(max(level.values()) + 1)]


@pytest.mark.parametrize("ordering", ["random", "coordinate"])
def test_levels_come_one_above_their_highest_neighbor(ordering):
    graph = NeighborGraph(points(), 3, ordering)
    levels = graph.levels()
    assert [level.tolist() for level in levels] == naive_levels(graph.neighbors, graph.order)
    assert all(level.dtype == torch.int64 for level in levels)
    assert graph.levels() is levels


# new points


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


# the module


def same(one, two):
    probe = points(5) + 0.1
    return torch.equal(one.neighbors, two.neighbors) and torch.equal(
        one.query(probe.to(one.x)), two.query(probe.to(two.x))
    )


def test_state_round_trip_into_another_graph():
    graph = NeighborGraph(points(), K, "maximin", metric=torch.tensor([0.2, 1.0], dtype=F64))
    other = NeighborGraph(points() + 5, K)
    assert not same(graph, other)
    other.levels()
    assert set(graph.state_dict()) == {"x", "order", "neighbors", "lengthscale"}
    other.load_state_dict(graph.state_dict())
    assert same(graph, other)
    assert all(map(torch.equal, graph.levels(), other.levels()))
    holder = torch.nn.ModuleDict({"graph": NeighborGraph(points() + 5, K)})
    holder["graph"].query(points(2))
    holder.load_state_dict({f"graph.{key}": value for key, value in graph.state_dict().items()})
    assert same(graph, holder["graph"])


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
        assert same(graph, other)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_gives_the_same_graph():
    x = grid()
    one, two = NeighborGraph(x, K, "maximin"), NeighborGraph(x.cuda(), K, "maximin")
    assert two.neighbors.is_cuda
    assert torch.equal(one.neighbors, two.neighbors.cpu())
    assert torch.equal(one.query(x[:9] + 0.1), two.query(x[:9].cuda() + 0.1).cpu())
    assert same(one, two.cpu())


# wrong input


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_neighbors": 0}, ValueError, r"NeighborGraph: expected num_neighbors in 1\.\.4, got 0"),
        ({"num_neighbors": 5}, ValueError, r"NeighborGraph: expected num_neighbors in 1\.\.4, got 5"),
        ({"num_neighbors": 2.0}, TypeError, r"expected num_neighbors to be an int"),
        ({"x": torch.full((5, 2), torch.nan)}, ValueError, r"NeighborGraph: expected x to be finite"),
        ({"x": torch.full((5, 2), torch.inf)}, ValueError, r"NeighborGraph: expected x to be finite"),
        ({"x": torch.rand(5)}, ValueError, r"expected x of shape \(N, D\)"),
        ({"x": torch.ones(5, 2, dtype=torch.int64)}, TypeError, r"expected x of a floating-point dtype"),
        ({"x": [[0.0, 1.0]]}, TypeError, r"expected x to be a torch.Tensor"),
        ({"ordering": "sorted"}, ValueError, r"expected ordering one of"),
        ({"ordering": torch.tensor([0, 0, 1, 2, 3])}, ValueError, r"expected ordering to hold each of 0\.\.4 once"),
        ({"metric": torch.ones(3)}, ValueError, r"expected lengthscale a scalar or of shape \(2,\), got \(3,\)"),
        ({"metric": torch.tensor([1.0, 0.0])}, ValueError, r"expected lengthscale > 0, got 0\.0"),
        ({"metric": torch.tensor([1.0, torch.nan])}, ValueError, r"expected lengthscale to be finite"),
        ({"metric": "cosine"}, TypeError, r"expected metric to be callable, got str"),
        ({"backend": "annoy"}, ValueError, r"expected backend to be 'auto' or .*, got 'annoy'"),
        ({"num_neighbours": 2}, TypeError, r"unexpected keyword argument 'num_neighbours'"),
    ],
)
def test_wrong_input(change, error, message):
    with pytest.raises(error, match=message):
        NeighborGraph(**{"x": torch.rand(5, 2), "num_neighbors": 2} | change)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.query(g.x, 0), ValueError, r"NeighborGraph.query: expected k in 1\.\.300, got 0"),
        (lambda g: g.query(g.x, N + 1), ValueError, r"NeighborGraph.query: expected k in 1\.\.300, got 301"),
        (lambda g: g.others(N), ValueError, r"expected k in 1\.\.299, got 300"),
        (lambda g: g.query(g.x.float()), TypeError, r"NeighborGraph.query: expected x_new of the dtype of x"),
        (lambda g: g.query(g.x[:, :1]), ValueError, r"expected x_new with 2 columns, as x has, got 1"),
        (lambda g: g.query(g.x[0]), ValueError, r"expected x_new of shape \(N, D\)"),
        (lambda g: g.query(g.x / 0), ValueError, r"expected x_new to be finite"),
        (
            lambda g: g.query(g.x[:2], exclude=torch.tensor([0])),
            ValueError,
            r"expected exclude of shape \(2,\), got \(1,",
        ),
        (lambda g: g.query(g.x[:1], exclude=torch.tensor([N])), ValueError, r"expected exclude in -1\.\.299, got 300"),
        (lambda g: g.query(g.x[:1], exclude=[3]), TypeError, r"expected exclude to be a torch.Tensor, got list"),
        (lambda g: g.others(idx=torch.tensor([N])), ValueError, r"NeighborGraph.others: expected idx in 0\.\.299"),
        (lambda g: g.others(idx=torch.tensor([-1])), ValueError, r"NeighborGraph.others: expected idx in 0\.\.299"),
        (lambda g: g.extend(g.x[:5], 305), ValueError, r"NeighborGraph.extend: expected k in 1\.\.304, got 305"),
        (lambda g: g.extend(g.x[:, :1]), ValueError, r"NeighborGraph.extend: expected x_new with 2 columns"),
        (lambda g: g.extend(g.x.float()), TypeError, r"NeighborGraph.extend: expected x_new of the dtype of x"),
        (lambda g: g.refresh(2.0), TypeError, r"expected lengthscale to be a torch.Tensor, got float"),
        (lambda g: g.refresh(torch.ones(3)), ValueError, r"expected lengthscale a scalar or of shape \(2,\)"),
        (lambda g: g.refresh(torch.tensor(-1.0)), ValueError, r"expected lengthscale > 0, got -1\.0"),
    ],
)
def test_wrong_calls(call, error, message):
    graph = NeighborGraph(points(), K)
    with pytest.raises(error, match=message):
        call(graph)


def test_a_metric_of_ones_own_takes_no_lengthscales():
    graph = NeighborGraph(points(20), 3, metric=manhattan)
    with pytest.raises(ValueError, match=r"expected lengthscale to be None with a metric function"):
        graph.refresh(torch.ones(2, dtype=F64))


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
