"""The order of elimination of a program's leaves."""

import torch

from pyro_nngp.inference.autoguide.elimination import EliminationOrder, coordinates


def test_leaves_without_coordinates_lie_among_what_they_stand_with():
    x = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    reads = torch.tensor([[0, 4], [1, 4], [2, 5], [3, 5], [3, 5]])
    near = torch.tensor([[6, 5]])  # a value that no observation reads
    place = coordinates([reads, near], x, 0, 8)
    torch.testing.assert_close(place[:, 0], torch.tensor([0, 1, 10, 11, 0.5, 32 / 3, 32 / 3, 5.5]).double())


def test_coordinates_may_belong_to_later_columns():
    place = coordinates([torch.tensor([[0, 2], [1, 1]])], torch.tensor([[3.0], [4.0]]), 1, 3)
    assert place[:, 0].tolist() == [4.0, 3.0, 4.0]


def test_the_order_is_kept_until_the_tables_change():
    x, order = torch.rand(50, 2), EliminationOrder()
    tables = [torch.arange(50)[:, None], torch.stack([torch.arange(49), torch.arange(1, 50)], -1)]
    plan = order.plan(tables, x, 0, 50)
    assert order.plan([table.clone() for table in tables], x, 0, 50) is plan
    tables[1] = tables[1].flip(0)
    assert order.plan(tables, x, 0, 50) is not plan
