"""Dependency levels: every row after its neighbors, and no later than it has to be."""

import pytest
import torch

from pyro_nngp.linalg.level_scheduling import dependency_levels


def test_each_row_is_one_level_above_the_highest_of_its_neighbors():
    n, k = 200, 5
    order = torch.randperm(n)
    neighbors = torch.full((n, k), -1)
    for place, row in enumerate(order.tolist()):
        near = order[:place][torch.randperm(place)[:k]]
        neighbors[row, : len(near)] = near
    level = torch.full((n + 1,), -1)  # the last entry is for "no neighbor"
    groups = dependency_levels(neighbors)
    assert torch.equal(torch.cat(groups).sort().values, torch.arange(n))
    for number, rows in enumerate(groups):
        level[rows] = number
    assert torch.equal(level[:n], level[neighbors].amax(-1) + 1)


def test_levels_of_other_patterns():
    assert [g.tolist() for g in dependency_levels(torch.full((3, 2), -1))] == [[0, 1, 2]]
    assert [g.tolist() for g in dependency_levels(torch.empty(2, 0, dtype=torch.int64))] == [[0, 1]]
    assert [g.tolist() for g in dependency_levels(torch.tensor([[2, 1], [-1, 2], [-1, -1]]))] == [[2], [1], [0]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1], [0], [-1]], r"dependency_levels: expected neighbors to form no cycle, got one among 2 rows"),
        ([[0]], r"expected neighbors to form no cycle, got one among 1 rows"),
        ([[-1], [2]], r"dependency_levels: expected neighbors in -1\.\.1, got -1\.\.2"),
        ([[-2]], r"expected neighbors in -1\.\.0, got -2\.\.-2"),
    ],
)
def test_wrong_patterns(rows, message):
    with pytest.raises(ValueError, match=message):
        dependency_levels(torch.tensor(rows))
