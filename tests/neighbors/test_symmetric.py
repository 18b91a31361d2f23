"""The graph with edges in both directions against its rule, by hand."""

import pytest
import torch

from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.neighbors.symmetric import SymmetricGraph

F64 = torch.float64


def parents_by_hand(x, order, k):
    """The rule of the paper, point by point, in rows of x."""
    rank = {row: place for place, row in enumerate(order)}

    def distance(i, j):
        return float((x[i] - x[j]).square().sum())

    def nearest(i, rows):
        return sorted(rows, key=lambda j: (distance(i, j), rank[j]))

    edges = {frozenset((i, j)) for i in order for j in nearest(i, set(order) - {i})[:k]}
    table = []
    for i in range(len(x)):
        before = [j for j in order if rank[j] < rank[i]]
        parents = [j for j in before if frozenset((i, j)) in edges][:k]  # the latest go first
        further = nearest(i, set(before) - set(parents))
        parents += further[: min(k, rank[i]) - len(parents)]
        table.append(nearest(i, parents) + [-1] * (k - len(parents)))
    return torch.tensor(table)


@pytest.mark.parametrize("ordering", ["random", "maximin", "coordinate", "given"])
@pytest.mark.parametrize("k", [1, 4, 39])
def test_graph_follows_the_rule_of_the_paper(ordering, k):
    x = torch.rand(40, 2, dtype=F64)
    graph = SymmetricGraph(x, k, ordering)
    assert torch.equal(graph.neighbors, parents_by_hand(x, graph.order.tolist(), k))
    place = torch.argsort(graph.order)
    assert torch.equal((graph.neighbors >= 0).sum(-1), place.clamp(max=k))


def test_graph_of_a_grid_with_ties_and_duplicates():
    grid = torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0)).double()
    x = torch.cat([grid, grid[:6]])
    graph = SymmetricGraph(x, 3)
    assert torch.equal(graph.neighbors, parents_by_hand(x, graph.order.tolist(), 3))


def test_graph_is_refreshed_by_the_same_rule():
    x = torch.rand(40, 2, dtype=F64)
    graph, lengthscale = SymmetricGraph(x, 4), torch.tensor([0.1, 2.0], dtype=F64)
    graph.refresh(lengthscale)
    assert torch.equal(graph.neighbors, parents_by_hand(x / lengthscale, graph.order.tolist(), 4))


def test_more_pairs_of_near_points_are_joined_than_by_predecessors_alone():
    x = torch.rand(400, 2, dtype=F64)
    graph, order = SymmetricGraph(x, 6), SymmetricGraph(x, 6).order
    wanted = {frozenset((i, int(j))) for i, row in enumerate(graph.others()) for j in row}
    joined = [
        len(wanted & {frozenset((i, int(j))) for i, row in enumerate(table) for j in row if j >= 0})
        for table in (graph.neighbors, NeighborGraph(x, 6, order).neighbors)
    ]
    assert joined[0] > joined[1]


def test_parents_of_appended_points_follow_the_rule():
    x = torch.rand(40, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    graph = SymmetricGraph(x[:25], 4)
    old = graph.neighbors
    graph.append(x[25:])
    assert torch.equal(graph.neighbors[:25], old)
    assert torch.equal(graph.neighbors[25:], parents_by_hand(x, graph.order.tolist(), 4)[25:])
