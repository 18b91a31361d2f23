"""Gaussian sites on several processes: choice of K, evidence and pooled observations. Laws are in test_laws."""

import pytest
import torch

from pyro_nngp.distributed import ShardedData, World
from pyro_nngp.distributed.halo import Near
from pyro_nngp.distributed.points import ShardedPoints
from pyro_nngp.distributed.search import ShardedIndex
from pyro_nngp.distributed.table import ShardedGraph
from pyro_nngp.kernels import Matern32, Matern52, bind
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import VNNGP
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational import factored_posterior, latent_evidence
from pyro_nngp.variational.pooling import PooledObservations
from tests.builders import surface
from tests.oracles.processes import check_same, on_processes


def chosen(sharded):
    """Where the number of neighbors is not given."""
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, kernel = x.sum(-1).cos(), Matern52(8, variance=torch.tensor(3.0), lengthscale=torch.full((8,), 4.0))
    data = [ShardedData(x, y)] if sharded else [x, y]
    gp = VNNGP(*data, kernel=kernel, likelihood=Gaussian(0.001))
    gp.solve()
    return {"neighbors": torch.tensor(gp.graph.num_neighbors), "moments": torch.stack(gp(x[:9] + 0.1)).detach()}


def test_a_process_in_no_group_chooses_the_number_of_neighbors_of_plain_rows():
    check_same(chosen(True), chosen(False), 1e-9)


@pytest.mark.slow
def test_two_processes_choose_the_number_of_neighbors_of_one(tmp_path):
    expected = chosen(False)
    assert expected["neighbors"] == 128
    for found in on_processes(2, tmp_path, chosen, True):
        check_same(found, expected, 1e-6)


def evidence(sharded):
    x, y, _ = surface(Gaussian)
    gp = VNNGP(*([ShardedData(x, y)] if sharded else [x, y]), num_neighbors=8)
    gp.solve(tolerance=1e-9)
    return {"slope": gp.q.excess.slope}


@pytest.mark.slow
def test_draws_of_the_evidence_do_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(factored_posterior, "MOST_OPERATIONS", 0.0)
    exact = evidence(False)["slope"]
    for name, value in {"DENSE_UP_TO": 0, "TOLERANCE": 1e-9}.items():
        monkeypatch.setattr(latent_evidence, name, value)
    expected = evidence(False)
    assert (expected["slope"] - exact).abs().max() > 1e-3
    for found in on_processes(3, tmp_path, evidence, True):
        check_same(found, expected, 1e-5)


def pooled(sharded):
    """Variances at the data where noise is so large that observations are pooled twice, at one noise and another."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1500, 2, generator=generator, dtype=torch.float64)
    noise = 5 * (0.5 + torch.rand(len(x), generator=generator, dtype=torch.float64))
    kernel, k = bind(Matern32(2, 1.0, 0.15).double()), 16
    if sharded:
        data = ShardedData(x, x[:, 0])
        graph, x, noise, rows = ShardedGraph(data, 4), data.x, noise[data.rows], data.rows
        near = Near(data, graph.index.nearest(x, k))
    else:
        graph, rows = NeighborGraph(x, 4), torch.arange(len(x))
        near = graph.query(x, k)
    with torch.no_grad():
        found = PooledObservations(kernel, graph, noise, k)
        alone = PooledObservations(kernel, graph, noise, len(rows)).variance(kernel, x, near, noise)
        first = found.variance(kernel, x, near, noise)
        second = found.at_noise(kernel, 2 * noise).variance(kernel, x, near, 2 * noise)
    return {"rows": rows, "alone": alone, "first": first, "second": second}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_pooled_observations_are_those_of_one_process(count, tmp_path):
    expected = pooled(False)
    assert expected["first"].mean() < 0.9 * expected["alone"].mean()
    for found in on_processes(count, tmp_path, pooled, True):
        rows = found.pop("rows")
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name][rows], rtol=1e-10, atol=1e-12)


def found_nearest():
    """The nearest of twelve points that one process has, from places on both."""
    world = World()
    x = torch.arange(24.0, dtype=torch.float64).view(12, 2)
    own = x if world.rank == 1 else x[:0]
    points = ShardedPoints(world, own, torch.arange(len(own)))
    numbers = ShardedIndex(points, torch.ones(2)).nearest(x[:5] + 0.1 * (1 + world.rank), 2)
    (values,) = points.fetch(numbers[:, 0].long(), own)
    return {"numbers": numbers.long(), "values": values, "count": torch.tensor(points.num_rows)}


def test_a_process_may_have_no_points(tmp_path):
    for found in on_processes(2, tmp_path, found_nearest):
        assert found["count"] == 12
        assert found["numbers"][:, 0].tolist() == [0, 1, 2, 3, 4]
        assert found["values"][:, 0].tolist() == [0, 2, 4, 6, 8]
