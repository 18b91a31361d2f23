"""Latent values at the data on several processes: products with the precision, and solutions for q(u) in tables."""

import pytest
import torch

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed import factor as distributed_factor
from pyro_nngp.distributed.factor import ShardedFactor
from pyro_nngp.distributed.table import ShardedGraph, ShardedNeighborhoods
from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.sharded_optimum import ShardedFactorOptimum
from pyro_nngp.variational.sparse_factor import FactorLimits, FactorOptimum
from tests.builders import surface
from tests.oracles.processes import on_processes

N = 200


def values():
    """Two right-hand sides and the precisions of observations, by row."""
    generator = torch.Generator().manual_seed(1)
    m = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    return m, 10 * torch.rand(N, 2, generator=generator, dtype=torch.float64)


def products():
    """Rows, the product with the precision, its diagonal, and posterior means at the own rows."""
    x, y, _ = surface(Gaussian)
    data, kernel = ShardedData(x, y), Matern52(2, 1.0, 0.3).double()
    graph = ShardedGraph(data, 8)
    factor = ShardedFactor(graph, lambda rows, near: graph_conditional(kernel, graph.x[rows], graph.x, near))
    m, precision = (part[data.rows].mT for part in values())
    mean = factor.posterior_mean(m, precision, torch.zeros_like(m), 1e-10)
    assert len(factor) == N
    found = {"rows": data.rows, "product": factor.product(m), "diagonal": factor.diagonal(), "mean": mean}
    return found | {"color": factor.color(m), "whiten": factor.whiten_transposed(m)}


@pytest.mark.parametrize(
    "rows_per_round", [0, pytest.param(1000, marks=pytest.mark.slow)]
)  # of the preconditioners of all rows, and of own rows
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_products_solves_and_posterior_means_are_those_of_one_process(count, rows_per_round, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed_factor, "ROWS_PER_ROUND", rows_per_round)
    x, _, _ = surface(Gaussian)
    factor = NNGP(Matern52(2, 1.0, 0.3).double(), NeighborGraph(x, 8)).factor.prepared()
    dense = factor.dense()
    m, precision = values()
    mean = torch.linalg.solve(dense + torch.diag_embed(precision.mT), (precision * m).mT[..., None])[..., 0]
    for part in on_processes(count, tmp_path, products):
        rows = part["rows"]
        torch.testing.assert_close(part["product"], (dense @ m).mT[:, rows], rtol=1e-9, atol=1e-6)
        torch.testing.assert_close(part["diagonal"], dense.diagonal()[rows], rtol=1e-9, atol=0)
        torch.testing.assert_close(part["mean"], mean[:, rows], rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(part["color"], factor.color(m.mT)[:, rows], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(part["whiten"], factor.whiten_transposed(m.mT)[:, rows], rtol=1e-9, atol=1e-6)


def test_the_preconditioner_of_the_rows_of_one_process_is_that_of_all_where_it_has_all(monkeypatch):
    x, _, _ = surface(Gaussian)
    graph, kernel = ShardedGraph(ShardedData(x, x[:, 0]), 8), Matern52(2, 1.0, 0.3).double()
    m, counts = values()[0].mT, []
    for rows_per_round in (0, 1000):
        monkeypatch.setattr(distributed_factor, "ROWS_PER_ROUND", rows_per_round)
        factor, calls = ShardedFactor(graph, lambda r, near: graph_conditional(kernel, graph.x[r], graph.x, near)), []
        product = factor.product
        monkeypatch.setattr(factor, "product", lambda v, product=product, calls=calls: calls.append(1) or product(v))
        factor.posterior_mean(m, torch.ones_like(m), torch.zeros_like(m), 1e-8)
        counts.append(len(calls))
    assert counts[0] == counts[1] < 60


def test_too_few_iterations_are_reported():
    x, y, _ = surface(Gaussian)
    graph, ones = ShardedGraph(ShardedData(x, y), 1), torch.ones(N, dtype=torch.float64)
    factor = ShardedFactor(graph, lambda rows, near: (0.999999 * ones[:, None], 1e-9 * ones))
    with pytest.warns(UserWarning, match="ShardedFactor: conjugate gradients stopped after 1000 iterations"):
        factor.posterior_mean(y, 1e12 * ones, 0 * ones, 0.0)


WIDTH, LIMITS = 5, FactorLimits(block_entries=2**12, long=12)  # many blocks, and columns of both kinds


def factors():
    """Rows, and the own rows of the best factor, in blocks and by both ways of finding a column."""
    x, y, _ = surface(Gaussian)
    data, kernel = ShardedData(x, y), Matern52(2, 1.0, 0.3).double()
    graph = ShardedNeighborhoods(data, 8, symmetric=False, num_context=0)
    prior = ShardedFactor(graph, lambda rows, near: graph_conditional(kernel, graph.x[rows], graph.x, near))
    optimum = ShardedFactorOptimum(prior, graph.neighbors[: data.num_own, :WIDTH].long(), LIMITS)
    assert data.num_own < len(optimum) <= N
    scale, weights = optimum(values()[1][data.rows].mT)
    return {"rows": data.rows, "scale": scale, "weights": weights}


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_factors_are_those_of_one_process(count, tmp_path):
    x, _, _ = surface(Gaussian)
    graph = NeighborGraph(x, 8)
    prior = NNGP(Matern52(2, 1.0, 0.3).double(), graph).factor
    scale, weights = FactorOptimum(prior, graph.neighbors[:, :WIDTH])(values()[1].mT)
    for part in on_processes(count, tmp_path, factors):
        torch.testing.assert_close(part["scale"], scale[:, part["rows"]], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(part["weights"], weights[:, part["rows"]], rtol=1e-5, atol=1e-6)
