"""Minibatches and subsamples: which rows a step uses."""

import itertools
import math

import torch

from pyro_nngp.inference.svi.batches import Minibatches, Subsample
from pyro_nngp.neighbors import NeighborGraph


def test_minibatches_do_not_follow_a_random_ordering_of_the_same_seed():
    graph = NeighborGraph(torch.rand(1000, 2), 3, seed=7)
    place = torch.empty(1000, dtype=torch.long).index_copy_(0, graph.order, torch.arange(1000))
    for batches in (Minibatches(1000, 100, 7), Subsample(1000, 100, 7)):
        places = place[batches.next(torch.device("cpu"))].double()
        assert abs(places.mean() - 499.5) < 6 * 1000 / math.sqrt(12 * 100)


def test_subsamples_are_nested_and_end_at_the_largest():
    rows = Subsample(10_000, 6_400, 0, 300)
    seen = [rows.next(torch.device("cpu"))]
    while not rows.grown:
        rows.grow()
        seen.append(rows.next(torch.device("cpu")))
    assert [len(part) for part in seen] == [400, 1600, 6400]
    assert all(torch.equal(small, large[: len(small)]) for small, large in itertools.pairwise(seen))
    assert len(seen[-1].unique()) == 6400
    assert Subsample(500, None, 0, 300).next(torch.device("cpu")) is None
