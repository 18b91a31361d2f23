"""Neighbor graphs against brute force: predecessors, queries, batches, levels, saving, invariances, every error."""

import pytest
import torch
from oracles.neighbors import distances, grid, manhattan, nearest_rows, points, predecessors, same_graphs

from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.neighbors.ordering import make_ordering

F64 = torch.float64


N, K = 300, 9
POINTS = {
    **{f"{dim} dimensions": points(dim=dim) for dim in (1, 2, 3, 8, 20)},
    "grid": grid(),
    "grid twice": grid(10, 15).repeat(2, 1),
    "one place": torch.zeros(N, 2, dtype=F64),
    "float32": points(dtype=torch.float32) + 100,
}


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


@pytest.mark.parametrize("backend", ["kdtree", "torch", "faiss"])
def test_every_backend_gives_the_same_graph(backend):
    if backend == "faiss":
        pytest.importorskip("faiss")
    x = grid()
    want, got = NeighborGraph(x, K), NeighborGraph(x, K, backend=backend, progress=False)
    assert torch.equal(got.neighbors, want.neighbors)
    assert torch.equal(got.query(x[:20] + 0.4), want.query(x[:20] + 0.4))


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_gives_the_same_graph():
    x = grid()
    one, two = NeighborGraph(x, K, "maximin"), NeighborGraph(x.cuda(), K, "maximin")
    assert two.neighbors.is_cuda
    assert torch.equal(one.neighbors, two.neighbors.cpu())
    assert torch.equal(one.query(x[:9] + 0.1), two.query(x[:9].cuda() + 0.1).cpu())
    assert same_graphs(one, two.cpu())


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
        ({"metric": torch.ones(3)}, ValueError, r"expected metric a scalar or of shape \(2,\), got \(3,\)"),
        ({"metric": torch.tensor([1.0, 0.0])}, ValueError, r"expected metric > 0, got 0\.0"),
        ({"metric": torch.tensor([1.0, torch.nan])}, ValueError, r"expected metric to be finite"),
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


@pytest.mark.parametrize("ordering", ["random", "maximin", "coordinate", "given"])
@pytest.mark.parametrize("name", ["2 dimensions", "20 dimensions", "grid twice", "float32"])
def test_appended_points_come_last_and_see_all_before_them(name, ordering):
    x = POINTS[name]
    graph = NeighborGraph(x[:200], K, ordering, metric=torch.full((x.shape[1],), 0.5).to(x))
    old = graph.neighbors
    graph.append(x[200:])
    assert torch.equal(graph.x, x)
    assert torch.equal(graph.neighbors[:200], old)
    assert torch.equal(graph.neighbors, predecessors(x, graph.order, K))
    assert torch.equal(graph.order[200:].sort().values, torch.arange(200, N))
    assert torch.equal(graph.order[200:], torch.arange(200, N)) == (ordering in ("coordinate", "given"))
    new = x[:40] + torch.rand(40, x.shape[1], generator=torch.Generator().manual_seed(0)).to(x)
    assert torch.equal(graph.query(new), nearest_rows(distances(new, x), graph.order, K))


def test_levels_follow_appended_points():
    graph = NeighborGraph(points()[:200], 3)
    before = len(graph.levels())
    graph.append(points()[200:])
    assert sum(map(len, graph.levels())) == N
    assert len(graph.levels()) >= before


def test_a_table_of_all_others_grows_with_its_points():
    x = points()
    graph = NeighborGraph(x[:4], 3, "given")
    graph.append(x[4:20])
    assert torch.equal(graph.neighbors, predecessors(x[:20], graph.order, 19))
    graph.append(x[20:])
    assert torch.equal(graph.neighbors[20:], predecessors(x, graph.order, 32)[20:])
    with pytest.raises(ValueError, match="append: expected x_new with 2 columns"):
        graph.append(points(dim=3))
