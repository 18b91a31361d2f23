"""Minibatches and subsamples: which rows a step uses."""

import itertools
import math
from types import SimpleNamespace

import torch

from pyro_nngp.inference.svi.batches import LocalSubsample, Minibatches, Subsample
from pyro_nngp.neighbors import NeighborGraph

CPU = torch.device("cpu")


def test_minibatches_do_not_follow_a_random_ordering_of_the_same_seed():
    graph = NeighborGraph(torch.rand(1000, 2), 3, seed=7)
    place = torch.empty(1000, dtype=torch.long).index_copy_(0, graph.order, torch.arange(1000))
    for batches in (Minibatches(1000, 100, 7), Subsample(1000, 100, 7)):
        places = place[batches.next(CPU)].double()
        assert abs(places.mean() - 499.5) < 6 * 1000 / math.sqrt(12 * 100)


def test_subsamples_are_nested_and_end_at_the_largest():
    rows = Subsample(10_000, 6_400, 0, 300)
    seen = [rows.next(CPU)]
    while not rows.grown:
        rows.grow()
        seen.append(rows.next(CPU))
    assert [len(part) for part in seen] == [400, 1600, 6400]
    assert all(torch.equal(small, large[: len(small)]) for small, large in itertools.pairwise(seen))
    assert len(seen[-1].unique()) == 6400
    assert Subsample(500, None, 0, 300).next(CPU) is None
    assert Subsample(250, None, 0, 100).sizes == [100, 250]


def test_minibatches_continue_with_the_draws_that_others_took_from_their_generator():
    rows, again = Minibatches(9, 3, 0), Minibatches(9, 3, 1)
    rows.next(CPU)
    torch.rand(5, generator=rows.generator)
    again.load(rows.state())
    for _ in range(4):  # into the next epoch
        assert torch.equal(again.next(CPU), rows.next(CPU))


def test_means_over_local_rows_with_their_weights_add_up_to_the_mean_of_the_subsample():
    values, places = torch.rand(60), torch.arange(60) % 3 == 0
    whole = Subsample(60, None, 0, 20)
    shards = [
        SimpleNamespace(rows=mine.nonzero()[:, 0], num_own=int(mine.sum()), num_rows=60) for mine in (places, ~places)
    ]
    parts = [LocalSubsample(whole, shard) for shard in shards]
    # a method scales the sum over a batch by the number of local rows per row of the batch, and fit divides by N
    sums = [
        part.weight * values[shard.rows[part.next(CPU)]].mean() * shard.num_own / 60
        for part, shard in zip(parts, shards, strict=True)
    ]
    torch.testing.assert_close(sum(sums), values[whole.next(CPU)].mean())
