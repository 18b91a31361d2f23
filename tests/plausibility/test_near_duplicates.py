"""Near duplicates of rows are the nearest others before the first gap of distances."""

import torch

from pyro_nngp.neighbors import NearestOthers
from pyro_nngp.plausibility.near_duplicates import find_near_duplicates

F64 = torch.float64
GRID = torch.cartesian_prod(torch.arange(5.0, dtype=F64), torch.arange(4.0, dtype=F64))  # no gap among neighbors


def test_the_rows_before_the_first_gap_are_near_duplicates():
    x = torch.cat([GRID, GRID[:2] + 1e-3, GRID[:1] - 1e-3])  # rows 0, 20 and 22 are near, and rows 1 and 21
    table = NearestOthers(x, 6)
    rows = torch.tensor([5, 0, 1, 21])
    found = find_near_duplicates(table, rows)
    assert found.rows.tolist() == [False, True, True, True]
    near = [set(row[mask].tolist()) for row, mask in zip(found.near, found.among, strict=True)]
    assert near == [{20, 22}, {21}, {1}]


def test_distances_are_those_of_the_metric():
    x = torch.cat([GRID, GRID[:1] + torch.tensor([0.0, 0.05])])
    rows = torch.tensor([0, 20])
    assert find_near_duplicates(NearestOthers(x, 6, metric=torch.ones(2, dtype=F64)), rows).rows.all()
    stretched = torch.tensor([1.0, 0.05], dtype=F64)  # one unit between the two
    assert find_near_duplicates(NearestOthers(x, 6, metric=stretched), rows) is None


def test_none_without_gaps_or_lengthscales():
    rows = torch.arange(20)
    assert find_near_duplicates(NearestOthers(GRID, 6), rows) is None

    def metric(a, b):
        return (a[:, None] - b).norm(dim=-1)

    x = torch.cat([GRID, GRID[:1] + 1e-3])
    assert find_near_duplicates(NearestOthers(x, 6, metric=metric), torch.tensor([0])) is None
