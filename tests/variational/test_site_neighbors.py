"""Results that are kept until the neighbors change."""

import copy
import pickle
from dataclasses import replace

import torch
from builders import uniform

from pyro_nngp.kernels import Matern32
from pyro_nngp.models import VNNGP
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


def test_pooled_observations_are_kept_while_nothing_changes():
    x = uniform(80)
    gp, cache, noise = (
        VNNGP(x, x[:, 0], Matern32(2, 1.0, 0.5), num_neighbors=4),
        NeighborCache(),
        torch.ones(80).double(),
    )
    pooled = cache.pooled(gp.bound(), gp.graph, noise, 8)
    assert cache.pooled(gp.bound(), gp.graph, noise, 8) is pooled
    assert cache.pooled(gp.bound(), gp.graph, noise, 9) is not pooled
    pooled = cache.pooled(gp.bound(), gp.graph, noise, 8)
    gp.kernel.lengthscale = 0.4
    assert cache.pooled(gp.bound(), gp.graph, noise, 8) is not pooled
    unknown = replace(gp.bound(), versions=None)
    assert cache.pooled(unknown, gp.graph, noise, 8) is not cache.pooled(unknown, gp.graph, noise, 8)
    pooled = cache.pooled(gp.bound(), gp.graph, noise, 8)
    cache.forget()
    assert cache.pooled(gp.bound(), gp.graph, noise, 8) is not pooled
