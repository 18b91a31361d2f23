"""Orderings: permutations, seeds, the greedy maximin ordering against a plain loop, every error."""

import numpy as np
import pytest
import torch

from pyro_nngp.neighbors import NeighborGraph, time_ordering
from pyro_nngp.neighbors.ordering import (
    coordinate_ordering,
    given_ordering,
    make_ordering,
    maximin_ordering,
    principal_ordering,
    random_ordering,
)

F64 = torch.float64


def greedy_maximin(x):
    """The definition, one point at a time: the farthest from all before it, the smaller row at ties."""
    x = x.double().numpy()
    order = [int(((x - x.mean(0)) ** 2).sum(-1).argmin())]
    d2 = ((x - x[order[0]]) ** 2).sum(-1)
    while len(order) < len(x):
        d2[order] = -1
        order.append(int(d2.argmax()))
        d2 = np.minimum(d2, ((x - x[order[-1]]) ** 2).sum(-1))
    return torch.tensor(order)


def point_sets():
    grid = torch.cartesian_prod(torch.arange(17, dtype=F64), torch.arange(23, dtype=F64))
    shuffled = grid[torch.randperm(len(grid))]
    clusters = torch.rand(6, 1, 2, dtype=F64) + 1e-3 * torch.randn(6, 60, 2, dtype=F64)
    return {
        "line": torch.rand(400, 1, dtype=F64),
        "plane": torch.rand(500, 2, dtype=F64),
        "eight dimensions": torch.randn(300, 8, dtype=F64),
        "grid": grid,
        "shuffled grid": shuffled,
        "grid twice": shuffled.repeat(2, 1),
        "clusters": clusters.flatten(0, 1),
        "one place": torch.ones(20, 2, dtype=F64),
        "one point": torch.zeros(1, 3, dtype=F64),
        "float32": torch.rand(300, 2) + 10,
    }


@pytest.mark.parametrize("name", point_sets())
def test_maximin_is_the_greedy_ordering(name, monkeypatch):
    x = point_sets()[name]
    expected = greedy_maximin(x)
    for native in ("1", "0"):
        monkeypatch.setenv("PYRO_NNGP_NATIVE", native)
        assert torch.equal(maximin_ordering(x), expected)


def test_maximin_of_many_points_spreads_them():
    x = torch.rand(20_000, 2, dtype=F64)
    order = maximin_ordering(x)
    assert torch.equal(order.sort().values, torch.arange(len(x)))
    first = x[order[:200]]
    gap = torch.cdist(first, first).fill_diagonal_(torch.inf).min()
    cover = torch.cdist(x, first).min(-1).values.max()
    assert cover <= gap  # a greedy prefix covers within the distance that it keeps


def test_random_is_seeded_and_leaves_the_global_state_alone():
    x = torch.rand(50, 2)
    state = torch.get_rng_state()
    order = random_ordering(x, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(order.sort().values, torch.arange(50))
    assert torch.equal(order, random_ordering(x.double() + 1, seed=3))
    assert not torch.equal(order, random_ordering(x, seed=4))


def test_coordinate_is_by_the_sum_with_ties_by_row():
    x = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert coordinate_ordering(x).tolist() == [3, 1, 0, 2]


def test_principal_is_by_the_longest_axis():
    x = torch.tensor([[3.0, -3.1], [0.0, 0.0], [-1.0, 1.1], [1.0, -0.9]])
    assert principal_ordering(x).tolist() == [0, 3, 1, 2]  # along (-1, 1), whose larger loading is positive
    assert principal_ordering(-x).tolist() == [2, 1, 3, 0]


def test_principal_is_the_component_of_a_singular_value_decomposition():
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(1)) * torch.arange(1.0, 6.0)
    axis = torch.linalg.svd(x.double() - x.double().mean(0)).Vh[0]
    score = (x.double() - x.double().mean(0)) @ (axis * axis[axis.abs().argmax()].sign())
    assert torch.equal(principal_ordering(x), score.argsort(stable=True))


def test_given_keeps_the_rows():
    assert given_ordering(torch.rand(4, 2)).tolist() == [0, 1, 2, 3]


def test_make_ordering_by_name_and_by_permutation():
    x = torch.rand(40, 2)
    assert torch.equal(make_ordering(x, "random", seed=5), random_ordering(x, 5))
    assert torch.equal(make_ordering(x, "maximin"), maximin_ordering(x))
    assert torch.equal(make_ordering(x, "coordinate"), coordinate_ordering(x))
    assert torch.equal(make_ordering(x, "principal"), principal_ordering(x))
    assert torch.equal(make_ordering(x, "given"), torch.arange(40))
    permutation = torch.randperm(40)
    assert torch.equal(make_ordering(x, permutation), permutation)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sorted", r"make_ordering: expected ordering one of .*'maximin'.* or a permutation, got 'sorted'"),
        (torch.arange(3), r"expected ordering to be int64 of shape \(4,\), got torch.int64 of shape \(3,\)"),
        (torch.arange(4.0), r"expected ordering to be int64 of shape \(4,\), got torch.float32"),
        (torch.tensor([0, 1, 1, 3]), r"expected ordering to hold each of 0\.\.3 once"),
        (torch.tensor([1, 2, 3, 4]), r"expected ordering to hold each of 0\.\.3 once"),
    ],
)
def test_wrong_orderings(given, message):
    with pytest.raises(ValueError, match=message):
        make_ordering(torch.rand(4, 2), given)


def test_wrong_points():
    with pytest.raises(ValueError, match=r"make_ordering: expected x to be finite, got 1 NaN"):
        make_ordering(torch.tensor([[0.0], [torch.nan]]), "random")
    with pytest.raises(ValueError, match=r"make_ordering: expected x at most 1e\+150 in size, got 1e\+200"):
        make_ordering(torch.tensor([[1e200], [1.0]], dtype=F64), "maximin")  # squared distances would not be finite


def test_points_in_the_ordering_of_time_have_no_neighbors_from_the_future():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 3, dtype=torch.float64, generator=generator)
    x[:, 1] = (6 * x[:, 1]).floor()  # 50 or so at each time
    graph = NeighborGraph(x, 8, time_ordering(x, 1))
    near, known = graph.neighbors.clamp(min=0), graph.neighbors >= 0
    assert bool((x[near, 1] <= x[:, None, 1])[known].all())
    assert bool((x[near, 1] == x[:, None, 1])[known].any())  # those of the same time count too
    order = time_ordering(x, 1, seed=1)
    assert sorted(order.tolist()) == list(range(300))
    assert torch.equal(order, time_ordering(x, -2, seed=1))
    assert not torch.equal(order, time_ordering(x, 1))
    later = NeighborGraph(
        torch.cat([x, x[:20] + torch.tensor([0.0, 10.0, 0.0])]),
        8,
        torch.cat([time_ordering(x, 1), torch.arange(300, 320)]),
    )
    assert torch.equal(later.neighbors[:300], graph.neighbors)


def test_a_column_of_time_that_does_not_exist_is_refused():
    for column in (2, -3):
        with pytest.raises(ValueError, match=r"time_ordering: expected time_dim in -2\.\.1, got"):
            time_ordering(torch.rand(4, 2), column)
