"""Gaussian sites on several processes: solutions, evidence, training and predictions equal those of one."""

import pytest
import torch

from pyro_nngp.distributed import ShardedData, World
from pyro_nngp.distributed.halo import Near
from pyro_nngp.distributed.points import ShardedPoints
from pyro_nngp.distributed.search import ShardedIndex
from pyro_nngp.distributed.table import ShardedGraph
from pyro_nngp.inference import Checkpoint, fit
from pyro_nngp.kernels import Matern32, Matern52, bind
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.means import LinearMean
from pyro_nngp.models import NPVI, VNNGP
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational import PseudoObservations, factored_posterior, latent_evidence
from pyro_nngp.variational.pooling import PooledObservations
from tests.builders import surface
from tests.oracles.processes import check_same, on_processes

CASES = {
    "gaussian": (VNNGP, Gaussian, {}),
    "counts": (VNNGP, Poisson, {}),
    "counts, npvi": (NPVI, Poisson, {"guide": PseudoObservations()}),
    "trend": (VNNGP, Gaussian, {"mean": lambda: LinearMean(2, prior="weak")}),
    "two outputs": (VNNGP, Poisson, {}),
    "weights and offset": (VNNGP, Poisson, {}),
}
SLOW = [pytest.param(case, marks=[] if case == "gaussian" else pytest.mark.slow) for case in CASES]


def build(case, sharded):
    method, likelihood, options = CASES[case]
    options = {name: value() if callable(value) else value for name, value in options.items()}
    x, y, _ = surface(likelihood)
    if case == "two outputs":
        y = torch.stack([y, y.flip(0)], -1)
    by_row = {"offset": x[:, 0], "weights": 1 + (x[:, 1] > 0.5).double()} if case == "weights and offset" else {}
    options |= {"num_neighbors": 8, "likelihood": likelihood()}
    return method(ShardedData(x, y, **by_row), **options) if sharded else method(x, y, **options, **by_row)


def trained(case, sharded):
    """Everything that is found by solving, by training on all rows, and by predictions."""
    gp, new = build(case, sharded), surface(Gaussian)[2]
    gp.solve()
    found = {
        "solved": torch.stack(gp(new)).detach(),
        "excess": gp.q.excess(gp.posterior(gp.bound()).parameters).detach(),
    }
    if case == "trend":  # training draws its coefficients, on each process others
        gp.refresh_neighbors()
        gp.solve()
        found |= {"coefficients": gp.mean.posterior_loc, "covariance": gp.mean.posterior_tril}
    else:
        result = fit(gp, 4, batch_size=200, refresh_every=3, solve_every=2, progress=False)
        found |= {"losses": result.losses, "lengthscale": gp.kernel.lengthscale.detach()}
    found["slope"], found["neighbors"] = gp.q.excess.slope, torch.tensor(gp.prediction_neighbors())
    found["moments"] = torch.stack([*gp(new), gp.predict(new).variance]).detach()
    return found


@pytest.mark.parametrize("case", SLOW)
def test_two_processes_are_one(case, tmp_path, monkeypatch):
    monkeypatch.setattr(factored_posterior, "MOST_OPERATIONS", 0.0)  # of several processes there is no sparse factor
    expected = trained(case, False)
    for found in on_processes(2, tmp_path, trained, case, True):
        check_same(found, expected, 1e-6)


def chosen(sharded):
    """Where the number of neighbors is not given."""
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, kernel = x.sum(-1).cos(), Matern52(8, variance=torch.tensor(3.0), lengthscale=torch.full((8,), 4.0))
    data = [ShardedData(x, y)] if sharded else [x, y]
    gp = VNNGP(*data, kernel=kernel, likelihood=Gaussian(0.001))
    gp.solve()
    return {"neighbors": torch.tensor(gp.graph.num_neighbors), "moments": torch.stack(gp(x[:9] + 0.1)).detach()}


@pytest.mark.slow
def test_two_processes_choose_the_number_of_neighbors_of_one(tmp_path):
    expected = chosen(False)
    assert expected["neighbors"] == 128
    for found in on_processes(2, tmp_path, chosen, True):
        check_same(found, expected, 1e-6)


def evidence(sharded):
    gp = build("gaussian", sharded)
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


class Stop(Exception):
    """Ends a run in the middle."""


def in_minibatches(batch_size, path=None, end=None):
    def stop(step, loss):
        if step == end:
            raise Stop

    gp, checkpoint = build("counts", True), None if path is None else Checkpoint(path / "checkpoint", every=3)
    options = {"refresh_every": 3, "solve_every": 2, "checkpoint": checkpoint, "callback": stop, "progress": False}
    try:
        losses = fit(gp, 8, batch_size=batch_size, **options).losses
    except Stop:
        return {}
    return {"losses": losses, "moments": torch.stack(gp(surface(Poisson)[2])).detach()}


@pytest.mark.slow
def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    for name in ("whole", "begun", "continued"):
        (tmp_path / name).mkdir()
    one, other = on_processes(2, tmp_path / "whole", in_minibatches, 60)
    assert torch.equal(one["losses"], other["losses"])
    on_processes(2, tmp_path / "begun", in_minibatches, 60, tmp_path, 5)
    found = on_processes(2, tmp_path / "continued", in_minibatches, 60, tmp_path)[0]
    for name, value in one.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_another_number_of_processes_continues(before, after, tmp_path):
    for name in ("begun", "continued"):
        (tmp_path / name).mkdir()
    expected = in_minibatches(200)
    on_processes(before, tmp_path / "begun", in_minibatches, 200, tmp_path, 5)
    for found in on_processes(after, tmp_path / "continued", in_minibatches, 200, tmp_path):
        check_same(found, expected, 1e-6)
