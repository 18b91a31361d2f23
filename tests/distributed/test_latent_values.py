"""Latent values at the data on several processes: products with the precision, and solutions for q(u) in tables."""

import pytest
import torch

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed import factor as distributed_factor
from pyro_nngp.distributed.factor import ShardedFactor
from pyro_nngp.distributed.table import ShardedGraph, ShardedNeighborhoods
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import Checkpoint, Schedule, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.models import NPVI, VNNGP
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational import MeanField, SparseCholesky
from pyro_nngp.variational.sharded_optimum import ShardedFactorOptimum
from pyro_nngp.variational.sparse_factor import FactorLimits, FactorOptimum
from tests.builders import surface
from tests.oracles.processes import check_same, on_processes

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


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_factors_are_those_of_one_process(count, tmp_path):
    x, _, _ = surface(Gaussian)
    graph = NeighborGraph(x, 8)
    prior = NNGP(Matern52(2, 1.0, 0.3).double(), graph).factor
    scale, weights = FactorOptimum(prior, graph.neighbors[:, :WIDTH])(values()[1].mT)
    for part in on_processes(count, tmp_path, factors):
        torch.testing.assert_close(part["scale"], scale[:, part["rows"]], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(part["weights"], weights[:, part["rows"]], rtol=1e-5, atol=1e-6)


CASES = {
    "mean-field": (VNNGP, {"guide": MeanField()}),
    "factor": (VNNGP, {"guide": SparseCholesky(5)}),
    "npvi": (NPVI, {}),
}


def build(case, likelihood, sharded):
    (x, y, _), (method, options) = surface(likelihood), CASES[case]
    options = {"kernel": Matern52(2, 1.0, 0.3), "num_neighbors": 8, **options}
    options["likelihood"] = likelihood() if likelihood is Poisson else likelihood(0.1)
    return method(ShardedData(x, y), **options) if sharded else method(x, y, **options)


def solved(case, likelihood, sharded):
    """Predictions after solving, with other neighbors, and after solving again; and the bound of all rows."""
    gp, new = build(case, likelihood, sharded), surface(likelihood)[2]
    gp.solve(tolerance=1e-9)
    gp.kernel.lengthscale = torch.tensor([0.2, 0.4], dtype=torch.float64)
    gp.refresh_neighbors()
    found = {"refreshed": torch.stack(gp(new)).detach()}
    gp.solve(tolerance=1e-9)
    options = {"lr": 1e-30, "schedule": Schedule(()), "refresh_every": 0, "solve_every": 10**6, "progress": False}
    losses = fit(gp, 1, batch_size=N, **options).losses
    return found | {"moments": torch.stack(gp(new)).detach(), "losses": losses}


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [Gaussian, Poisson])
@pytest.mark.parametrize("case", CASES)
def test_solutions_are_those_of_one_process(case, likelihood, tmp_path):
    expected = solved(case, likelihood, False)
    for found in on_processes(2, tmp_path, solved, case, likelihood, True):
        for name, value in expected.items():
            rtol = 1e-5 if name == "losses" else 1e-6
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol)


class Stop(Exception):
    """Ends a run in the middle."""


def trained(case, likelihood, sharded, batch_size=N, path=None, end=None):
    def stop(step, loss):
        if step == end:
            raise Stop

    gp, checkpoint = (
        build(case, likelihood, sharded),
        None if path is None else Checkpoint(path / "checkpoint", every=3),
    )
    options = {"refresh_every": 3, "solve_every": 2, "checkpoint": checkpoint, "callback": stop, "progress": False}
    try:
        losses = fit(gp, 8, batch_size=batch_size, **options).losses
    except Stop:
        return {}
    moments = torch.stack(gp(surface(likelihood)[2])).detach()
    return {"losses": losses, "moments": moments, "lengthscale": gp.kernel.lengthscale.detach()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("likelihood", [Gaussian, Poisson])
def test_training_is_that_of_one_process(case, likelihood, tmp_path):
    expected = trained(case, likelihood, False)
    for found in on_processes(2, tmp_path, trained, case, likelihood, True):
        check_same(found, expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_continues_bit_for_bit(case, tmp_path):
    for name in ("whole", "begun", "continued"):
        (tmp_path / name).mkdir()
    expected = on_processes(2, tmp_path / "whole", trained, case, Poisson, True, 60)[0]
    on_processes(2, tmp_path / "begun", trained, case, Poisson, True, 60, tmp_path, 5)
    found = on_processes(2, tmp_path / "continued", trained, case, Poisson, True, 60, tmp_path)[0]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_another_number_of_processes_continues(before, after, tmp_path):
    for name in ("begun", "continued"):
        (tmp_path / name).mkdir()
    expected = trained("npvi", Poisson, True)
    on_processes(before, tmp_path / "begun", trained, "npvi", Poisson, True, N, tmp_path, 5)
    for found in on_processes(after, tmp_path / "continued", trained, "npvi", Poisson, True, N, tmp_path):
        check_same(found, expected, 1e-6)
