"""The Gaussian with a sparse Cholesky factor against dense matrices: divergence, density, moments, marginals."""

import math

import pyro.distributions as dist
import pytest
import torch
from builders import matern, tensor, uniform
from oracles.dense import dense_cholesky, dense_precision, gaussian_kl
from torch.distributions import kl_divergence

from pyro_nngp._memory import block_limit
from pyro_nngp.distributions import NNGP, SparseCholeskyNormal, sparse_cholesky
from pyro_nngp.neighbors.graph import NeighborGraph

F64 = torch.float64


N = 40


def factor(graph, columns=4, batch=()):
    """A random guide on the nearest `columns` neighbors of each point."""
    n, pattern = graph.num_points, graph.neighbors[:, :columns]
    weights = 0.3 * torch.randn(*batch, n, columns, dtype=F64)
    return SparseCholeskyNormal(
        torch.randn(*batch, n, dtype=F64), 0.2 + torch.rand(*batch, n, dtype=F64), weights, pattern
    )


@pytest.mark.parametrize("columns", [0, 4, N - 1])
def test_divergence_agrees_with_the_dense_one(columns):
    graph = NeighborGraph(uniform(N), N - 1 if columns == N - 1 else 6)
    q = (
        factor(graph, columns)
        if columns
        else SparseCholeskyNormal(torch.randn(N, dtype=F64), 0.1 + torch.rand(N, dtype=F64))
    )
    root = dense_cholesky(q)
    want = gaussian_kl(q.loc, root @ root.mT, dense_precision(matern(), graph))
    torch.testing.assert_close(kl_divergence(q, NNGP(matern(), graph)), want, rtol=1e-9, atol=0)


def test_divergence_with_a_pattern_that_is_not_the_graphs():
    x, order = uniform(N), torch.randperm(N)
    prior = NNGP(matern(), NeighborGraph(x, 4, order))
    q = factor(NeighborGraph(x / tensor(0.1, 3.0), 5, order), 5)
    root = dense_cholesky(q)
    want = gaussian_kl(q.loc, root @ root.mT, dense_precision(matern(), prior.graph))
    torch.testing.assert_close(kl_divergence(q, prior), want, rtol=1e-9, atol=0)


def test_divergence_from_a_batch_averages_to_the_whole():
    graph, k = NeighborGraph(uniform(N), 6), matern()
    q = factor(graph, 4, (2,))
    whole = kl_divergence(q, NNGP(k, graph).expand([2]))
    parts = []
    for idx in torch.randperm(N).split(10):
        b = graph.batch(idx)
        local = SparseCholeskyNormal(
            q.loc[:, b.rows], q.scale[:, b.rows], q.weights[:, b.rows], q.pattern[b.rows], b.rows, b.targets
        )
        parts.append(kl_divergence(local, NNGP(k, graph, b).expand([2])) * b.scale)
    assert whole.shape == (2,)
    torch.testing.assert_close(torch.stack(parts).mean(0), whole, rtol=1e-11, atol=0)


def test_divergence_of_a_normal_guide_is_the_mean_field_one():
    graph, loc, scale = NeighborGraph(uniform(N), 6), torch.randn(N, dtype=F64), torch.rand(N, dtype=F64) + 0.1
    prior = NNGP(matern(), graph)
    got = kl_divergence(dist.Normal(loc, scale).to_event(1), prior)
    torch.testing.assert_close(got, kl_divergence(SparseCholeskyNormal(loc, scale), prior), rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match=r"known for Normal"):
        kl_divergence(dist.Laplace(loc, scale).to_event(1), prior)


def test_divergence_needs_the_same_rows():
    graph = NeighborGraph(uniform(N), 6)
    q = SparseCholeskyNormal(torch.zeros(5, dtype=F64), torch.ones(5, dtype=F64), rows=torch.arange(5))
    with pytest.raises(ValueError, match=r"expected q and p on the same rows"):
        kl_divergence(q, NNGP(matern(), graph))


@pytest.mark.parametrize("columns", [0, 4])
def test_guide_density_and_moments_agree_with_the_dense_normal(columns):
    graph = NeighborGraph(uniform(N), 6)
    q = (
        factor(graph, columns)
        if columns
        else SparseCholeskyNormal(torch.randn(N, dtype=F64), 0.1 + torch.rand(N, dtype=F64))
    )
    root = dense_cholesky(q)
    exact, value = dist.MultivariateNormal(q.loc, root @ root.mT), torch.randn(2, N, dtype=F64)
    torch.testing.assert_close(q.log_prob(value), exact.log_prob(value), rtol=1e-9, atol=0)
    torch.testing.assert_close(q.variance, exact.variance, rtol=1e-12, atol=0)
    drawn = q.rsample()
    torch.testing.assert_close(q.log_prob(drawn), exact.log_prob(drawn), rtol=1e-9, atol=0)
    draws = q.sample((20_000,))
    want = exact.covariance_matrix
    error = ((want.diagonal()[:, None] * want.diagonal() + want.square()) / 20_000).sqrt()
    assert ((draws.mT.cov() - want).abs() < 6 * error).all()


@pytest.mark.parametrize("batch", [(), (3,)])
def test_combinations_are_computed_in_blocks_of_bounded_size(batch, monkeypatch):
    graph = NeighborGraph(uniform(N), 5)
    q = factor(graph, columns=4, batch=batch)
    coefficients, positions = torch.randn(50, 6, dtype=F64), torch.rand(50, N).argsort(-1)[:, :6]
    whole, sizes, align = q.combined_rows(coefficients, positions), [], sparse_cholesky.align
    monkeypatch.setattr(sparse_cholesky, "align", lambda columns: sizes.append(columns.shape) or align(columns))
    with block_limit(20 * 6 * 5 * (10 + 2 * math.prod(batch))):
        assert torch.equal(q.combined_rows(coefficients, positions), whole)
    assert sizes == [(20, 30), (20, 30), (10, 30)]


def test_guide_on_some_rows_is_the_marginal():
    graph = NeighborGraph(uniform(N), 6)
    q, rows = factor(graph), torch.tensor([3, 8, 21, 30])
    part = SparseCholeskyNormal(
        q.loc[rows], q.scale[rows], q.weights[rows], q.pattern[rows], rows, torch.tensor([0, 2])
    )
    root = dense_cholesky(q)
    want = (root @ root.mT)[rows][:, rows]
    draws = part.sample((20_000,))
    error = ((want.diagonal()[:, None] * want.diagonal() + want.square()) / 20_000).sqrt()
    assert ((draws.mT.cov() - want).abs() < 6 * error).all()
    drawn = part.rsample()
    assert part.log_prob(drawn).isfinite()
    with pytest.raises(ValueError, match=r"expected value to be the last draw of these rows"):
        part.log_prob(drawn + 1)


def test_guide_rejects_wrong_shapes():
    one = torch.ones(4)
    for args, message in [
        ((one, torch.ones(3)), r"expected loc, scale of one shape"),
        ((one, one, torch.ones(4, 2)), r"expected weights, pattern together"),
        ((one, one, torch.ones(4, 2), torch.zeros(4, 3, dtype=torch.long)), r"expected weights of shape \(4, 3\)"),
        ((one, one, None, None, torch.arange(3)), r"expected loc to have 3 entries"),
    ]:
        with pytest.raises(ValueError, match=message):
            SparseCholeskyNormal(*args)


@pytest.mark.parametrize(("width", "dtype"), [(1, torch.int64), (7, torch.int64), (8, torch.int32), (90, torch.int64)])
def test_equal_columns_come_together_in_slots_of_their_own(width, dtype):
    columns = torch.randint(-1, 5 if width < 90 else 10**9, (40, width), generator=torch.Generator().manual_seed(0))
    order, slots = sparse_cholesky.align(columns.to(dtype))
    for row, place, slot in zip(columns, order, slots, strict=True):
        assert sorted(place.tolist()) == list(range(width))
        _, expected = row.unique(return_inverse=True)
        assert torch.equal(slot, expected[place])
    assert torch.equal(order, columns.sort(dim=-1, stable=True).indices)  # as on other devices
