"""Results that are kept until the neighbors change."""

import copy
import pickle

import torch

from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational import site_neighbors
from pyro_nngp.variational.site_neighbors import NeighborCache


def test_an_order_that_does_not_exist_is_sought_once_for_graphs_of_a_size(monkeypatch):
    sought, allowed = [], []

    def found(graph, num_coupled, larger):
        assert num_coupled is None
        allowed.append(larger)
        sought.append(tuple(graph.neighbors.shape))
        return None if graph.num_points == 12 else "order"

    monkeypatch.setattr(site_neighbors, "elimination_of", found)
    cache, x = NeighborCache(), torch.rand(12, 2)
    graphs = [NeighborGraph(x[:n], k) for n, k in ((12, 3), (12, 3), (12, 4), (10, 3), (10, 3))]
    plans = []
    for graph in graphs:
        cache.forget()
        plans += [cache.plan(graph), cache.plan(graph)]
    assert plans == [None] * 6 + ["order"] * 4
    assert sought == [(12, 3), (12, 4), (10, 3), (10, 3)]  # an order is another one for another graph
    assert allowed[:3] == [1.0] * 3
    assert allowed[3] > 1  # another graph may take more
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert copied.plan(graphs[0]) is None
