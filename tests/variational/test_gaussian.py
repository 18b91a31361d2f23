import pyro.distributions as dist
import pytest
import torch
from oracles.dense import dense_cholesky, dense_precision
from torch.distributions import kl_divergence

from pyro_nngp.distributions import NNGP, SparseCholeskyNormal
from pyro_nngp.kernels import Matern52
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.variational.gaussian import LocalGaussian
from pyro_nngp.variational.sparse_factor import FactorLimits, FactorOptimum

F64 = torch.float64
N = 40


def graph_and_prior(num_neighbors):
    graph = NeighborGraph(torch.rand(N, 2, dtype=F64), num_neighbors)
    kernel = Matern52(2, lengthscale=torch.tensor(0.4, dtype=F64))
    w, var = (part.detach() for part in NNGP(kernel, graph).conditionals)
    return graph, w, var, dense_precision(kernel, graph).detach()


def columns_of(graph, columns, given):
    """A pattern of that many columns: the nearest neighbors, or predecessors drawn at random, one of them popular."""
    if not given:
        return graph.neighbors[:, :columns]
    pattern = torch.full((N, columns), -1)
    for position, row in enumerate(graph.order.tolist()):
        drawn = graph.order[:position][torch.randperm(position)[: columns - 1]]
        popular = graph.order[:1] if position and graph.order[0] not in drawn else drawn[:0]
        pattern[row, : len(drawn) + len(popular)] = torch.cat([popular, drawn])
    return pattern


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("columns", [1, 4, 8])
@pytest.mark.parametrize("group_entries", [20, 2**22])
def test_optimal_factor_is_where_the_gradient_vanishes(columns, given, group_entries):
    limits = FactorLimits(group_entries=group_entries)
    graph, w, var, precision = graph_and_prior(8)
    pattern, tau = columns_of(graph, columns, given), 0.1 + 20 * torch.rand(2, N, dtype=F64)
    scale, weights = FactorOptimum(VecchiaFactor(w, var, graph.neighbors), pattern, limits)(tau)
    for i in range(2):
        q = SparseCholeskyNormal(torch.zeros(N, dtype=F64), scale[i], weights[i], pattern)
        root, posterior = dense_cholesky(q), precision + torch.diag(tau[i])
        entries = dense_cholesky(
            SparseCholeskyNormal(q.loc, torch.ones_like(q.scale), torch.ones_like(q.weights), pattern)
        )
        gradient = (torch.diag(1 / root.diagonal()) - posterior @ root) * entries
        assert gradient.abs().max() < 1e-9 * (posterior.abs() @ root.abs()).max()


def test_optimal_factor_of_a_full_pattern_is_the_posterior():
    graph, w, var, precision = graph_and_prior(6)
    full, tau = NeighborGraph(graph.x, N - 1, graph.order), 1 + torch.rand(N, dtype=F64)
    scale, weights = FactorOptimum(VecchiaFactor(w, var, graph.neighbors), full.neighbors)(tau)
    root = dense_cholesky(SparseCholeskyNormal(torch.zeros(N, dtype=F64), scale, weights, full.neighbors))
    want = torch.cholesky_inverse(torch.linalg.cholesky(precision + torch.diag(tau)))
    torch.testing.assert_close(root @ root.mT, want, rtol=1e-8, atol=1e-12)


def test_optimal_factor_without_columns_is_the_mean_field_one():
    graph, w, var, precision = graph_and_prior(6)
    scale, weights = FactorOptimum(VecchiaFactor(w, var, graph.neighbors), graph.neighbors[:, :0])(
        torch.ones(N, dtype=F64)
    )
    torch.testing.assert_close(scale, (precision.diagonal() + 1).rsqrt(), rtol=1e-10, atol=0)
    assert weights.shape == (N, 0)


@pytest.mark.parametrize("num_latents", [None, 3])
@pytest.mark.parametrize("columns", [0, 5])
def test_assigning_a_distribution_gives_it_back(num_latents, columns):
    graph = NeighborGraph(torch.rand(N, 2, dtype=F64), 5)
    pattern = graph.neighbors.clone() if columns else None
    local, latents = LocalGaussian(N, pattern, num_latents, like=graph.x), () if num_latents is None else (num_latents,)
    loc, scale = torch.randn(*latents, N, dtype=F64), 0.1 + torch.rand(*latents, N, dtype=F64)
    weights = torch.randn(*latents, N, 5, dtype=F64) if columns else None
    local.assign(SparseCholeskyNormal(loc, scale, weights, pattern))
    q = local.distribution()
    torch.testing.assert_close(q.loc, loc)
    torch.testing.assert_close(q.scale, scale)
    if columns:
        torch.testing.assert_close(q.weights, torch.where(pattern >= 0, weights, 0.0))
    rows = torch.tensor([7, 3, 20])
    torch.testing.assert_close(local.distribution(rows).weights, q.weights[..., rows, :])


def test_entries_are_relative_to_the_diagonal():
    """Scaling the diagonal of a row scales the row: u / c has the distribution of u with one parameter changed."""
    graph = NeighborGraph(torch.rand(N, 2, dtype=F64), 5)
    local = LocalGaussian(N, graph.neighbors.clone(), like=graph.x)
    torch.nn.init.normal_(local.weights)
    before = local.distribution().variance
    with torch.no_grad():
        local.log_scale.add_(2.0)
    torch.testing.assert_close(local.distribution().variance, before * torch.tensor(4.0, dtype=F64).exp())


def test_divergence_from_independent_values():
    tril = torch.randn(3, 5, 5, dtype=F64).tril() + 3 * torch.eye(5, dtype=F64)
    q = dist.MultivariateNormal(torch.randn(3, 5, dtype=F64), scale_tril=tril)
    loc, scale = torch.randn(5, dtype=F64), torch.rand(5, dtype=F64) + 0.5
    want = kl_divergence(q, dist.MultivariateNormal(loc, scale_tril=scale.diag()))
    torch.testing.assert_close(kl_divergence(q, dist.Normal(loc, scale).to_event(1)), want)
