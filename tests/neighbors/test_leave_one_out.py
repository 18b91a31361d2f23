"""The nearest other points: searched when a batch asks for them, ties in random order."""

import pytest
import torch
from builders import matern, waves

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli
from pyro_nngp.models import LOO
from pyro_nngp.neighbors.leave_one_out import NearestOthers

F64 = torch.float64


N = 40


def test_neighbors_are_the_nearest_others_and_searched_when_asked_for():
    x, _ = waves(N)
    table = NearestOthers(x, 4)
    assert (table.neighbors == -1).all()
    table.batch(torch.tensor([5, 2]))
    assert (table.neighbors >= 0).all()
    lengthscale = torch.tensor([0.1, 2.0], dtype=F64)
    table.refresh(lengthscale)
    assert (table.neighbors == -1).all()
    table.batch()
    distance = torch.cdist(x / lengthscale, x / lengthscale).fill_diagonal_(torch.inf)
    assert torch.equal(table.neighbors, distance.argsort(-1)[:, :4])
    with pytest.raises(TypeError, match=r"expected graph to be a NeighborGraph, got NearestOthers"):
        NNGP(matern(), table)


def test_large_tables_are_searched_row_by_row_until_an_eighth_is_known(monkeypatch):
    monkeypatch.setattr("pyro_nngp.neighbors.leave_one_out.QUICK", 0)
    x, _ = waves(N)
    table, quick = NearestOthers(x, 4), NearestOthers(x, 4)
    table.batch(torch.tensor([5, 2]))
    assert ((table.neighbors >= 0).all(-1).nonzero()[:, 0]).tolist() == [2, 5]
    table.batch(torch.tensor([2, 7, 9]))
    assert (table.neighbors[:, 0] >= 0).sum() == 4
    table.batch(torch.tensor([11]))  # the fifth of 40
    monkeypatch.undo()
    quick.batch(torch.tensor([0]))
    assert torch.equal(table.neighbors, quick.neighbors)
    assert (quick.neighbors >= 0).all()


def test_ties_do_not_follow_the_order_of_the_file():
    """Of many rows at one place, sorted by label, the neighbors hold both labels."""
    y = torch.arange(200) >= 100
    gp = LOO(torch.zeros(200, 1, dtype=F64), y, Matern52(1), Bernoulli(), num_neighbors=20)
    gp.model()
    assert 3 < gp.y[gp.graph.neighbors[0]].sum() < 17
