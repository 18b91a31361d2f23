"""The optimal factor where columns are long, where the precision is worked on in blocks, and what says so."""

import pytest
import torch

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import Matern52
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.neighbors.symmetric import SymmetricGraph
from pyro_nngp.variational.sparse_factor import FactorLimits, FactorOptimum

N = 150


@pytest.fixture
def problem():
    """Half of the points at one place, so that the first of them are parents of all the others there."""
    torch.manual_seed(0)
    x = torch.rand(N, 2, dtype=torch.float64)
    x[::2] = x[0]
    graph = SymmetricGraph(x, 6)
    kernel = Matern52(2, lengthscale=torch.tensor(0.4, dtype=torch.float64)).requires_grad_(False)
    longest = torch.bincount(graph.neighbors[graph.neighbors >= 0]).max()
    assert longest > 60
    factor = VecchiaFactor(*NNGP(kernel, graph).conditionals, graph.neighbors)
    return factor, graph.neighbors, 0.1 + 20 * torch.rand(2, N, dtype=torch.float64)


def value(problem, scale, weights):
    """What the bound owes to R, for each set of sites."""
    prior, pattern, tau = problem
    root = torch.diag_embed(scale)
    real = pattern >= 0
    rows = torch.arange(N)[:, None].expand_as(pattern)[real]
    root[:, rows, pattern[real]] = weights[:, real]
    posterior = prior.dense() + torch.diag_embed(tau)
    return scale.log().sum(-1) - (posterior @ root * root).sum((-1, -2)) / 2


@pytest.mark.parametrize("long", [0, 20])
def test_long_columns_by_conjugate_gradients_reach_the_same_bound(problem, long):
    best = value(problem, *FactorOptimum(*problem[:2])(problem[2]))
    found = value(problem, *FactorOptimum(*problem[:2], FactorLimits(long=long))(problem[2]))
    assert (best - found).max() < 1e-3  # N columns that may be 1e-6 and more off each
    assert (best - found).min() > -1e-9


@pytest.mark.parametrize(
    "limits", [{"block_entries": 3000}, {"block_entries": 1}, {"batch_entries": 500}, {"lookups": 40}]
)
def test_blocks_batches_and_parts_do_not_matter(problem, limits):
    want = FactorOptimum(*problem[:2])(problem[2])
    found = FactorOptimum(*problem[:2], FactorLimits(**limits))(problem[2])
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_a_block_holds_no_more_of_the_precision_than_it_may(monkeypatch):
    graph = SymmetricGraph(torch.rand(N, 1, dtype=torch.float64), 3, "coordinate")
    factor = VecchiaFactor(*NNGP(Matern52(1).double().requires_grad_(False), graph).conditionals, graph.neighbors)
    asked, sparse = [], factor.sparse
    monkeypatch.setattr(factor, "sparse", lambda rows=None: asked.append(sparse(rows)) or asked[-1])
    optimum = FactorOptimum(factor, graph.neighbors, FactorLimits(block_entries=2000))
    optimum(torch.ones(N, dtype=torch.float64))
    assert len(asked) == 2  # near columns are worked on together: rows at the border are made twice, no others
    assert max(part.shape[0] for part in asked) < 0.6 * N


def test_columns_that_are_not_finished_are_counted(problem):
    optimum = FactorOptimum(*problem[:2], FactorLimits(long=20, max_iterations=3))
    with pytest.warns(UserWarning, match=r"columns stopped after 3 iterations of conjugate gradients"):
        optimum(problem[2])
