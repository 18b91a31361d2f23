"""Search in the metric of a kernel against the correlations of all pairs."""

import pytest
import torch
from builders import tensor
from oracles.neighbors import shuffled, uniform

from pyro_nngp.kernels import KernelMetric, Matern32, Matern52, Periodic
from pyro_nngp.neighbors.search.correlation import CorrelationIndex

F64 = torch.float64
X = shuffled(uniform(240, 2))


def separable():
    """A product whose correlation is a monotone function of one distance, that of its feature space."""
    return Matern52(2, lengthscale=tensor(0.2, 1.5))


def two_scales():
    """Long in one column each, so that one distance cannot rank it."""
    return Matern32(2, lengthscale=tensor(0.1, 1.5)) + Matern32(2, lengthscale=tensor(1.5, 0.1))


def seasonal():
    return Periodic(1, period=tensor(0.3)[0], active_dims=[0]) * Matern32(1, lengthscale=tensor(0.4), active_dims=[1])


def ranked(kernel, queries, points, k, unwanted):
    """All points by falling correlation, ties by number; -1 where no point is left."""
    corr = kernel(queries, points).detach().abs()
    corr = corr / (kernel(queries, diag=True)[:, None] * kernel(points, diag=True)).sqrt().detach()
    corr = corr.masked_fill(unwanted, -torch.inf)
    value, order = corr.sort(dim=-1, descending=True, stable=True)
    return order[:, :k].masked_fill(value[:, :k].isinf(), -1), 1 - value[:, :k]


def agreement(found, expected):
    """The share of the expected neighbors that were found."""
    hits = (found[:, :, None] == expected[:, None, :]) & (expected >= 0)[:, None, :]
    return (hits.sum() / (expected >= 0).sum()).item()


def test_where_one_distance_ranks_neighbors_are_exactly_the_most_correlated():
    kernel, rows = separable(), torch.arange(len(X))
    index = CorrelationIndex(X, KernelMetric(kernel, X), progress=False)
    expected, distance = ranked(kernel, X, X, 7, torch.eye(len(X), dtype=torch.bool))
    got, got_distance = index.nearest(X, 7, rows)
    assert torch.equal(got, expected)
    torch.testing.assert_close(got_distance, distance, rtol=0, atol=1e-12)
    expected, distance = ranked(kernel, X, X, 7, rows >= rows[:, None])
    got, got_distance = index.predecessors(7)
    assert torch.equal(got, expected)
    torch.testing.assert_close(got_distance, distance.masked_fill(expected < 0, torch.inf), rtol=0, atol=1e-12)
    assert torch.equal(index.predecessors(7, start=100)[0], expected[100:])


@pytest.mark.parametrize("kernel", [two_scales, seasonal])
def test_other_kernels_find_most_of_their_neighbors_and_rank_them_by_correlation(kernel):
    kernel, elsewhere = kernel(), uniform(60, 2, seed=3)
    found, distance = CorrelationIndex(X, KernelMetric(kernel, X), progress=False).nearest(elsewhere, 8)
    nothing = torch.zeros(60, len(X), dtype=torch.bool)
    expected, _ = ranked(kernel, elsewhere, X, 8, nothing)
    assert agreement(found, expected) > 0.9
    every = 1 - ranked(kernel, elsewhere, X, len(X), nothing)[1]
    places = ranked(kernel, elsewhere, X, len(X), nothing)[0].argsort(-1)
    torch.testing.assert_close(1 - distance, every.gather(-1, places.gather(-1, found)), rtol=0, atol=1e-12)
    assert (distance.diff(dim=-1) >= 0).all()
    assert all(len(row.unique()) == 8 for row in found)  # candidates of several feature spaces count once


def test_all_points_are_candidates_where_all_are_wanted():
    kernel, few = two_scales(), X[:9]
    index = CorrelationIndex(few, KernelMetric(kernel, few), progress=False)
    expected, _ = ranked(kernel, few, few, 8, torch.eye(9, dtype=torch.bool))
    assert torch.equal(index.nearest(few, 8, torch.arange(9))[0], expected)


def test_missing_predecessors_are_padded():
    index = CorrelationIndex(X[:3], KernelMetric(two_scales(), X), progress=False)
    found, distance = index.predecessors(12)
    assert found.shape == distance.shape == (3, 12)
    assert (found >= 0).sum(-1).tolist() == [0, 1, 2]
    assert (distance.isinf() == (found < 0)).all()
