"""q(u) by an encoder on several processes: batches with the neighbors of their neighbors."""

import pytest
import torch

from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.table import ShardedNeighborhoods
from pyro_nngp.inference import Checkpoint, Schedule, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.models import NPVI, VNNGP
from pyro_nngp.neighbors import SymmetricGraph
from pyro_nngp.variational import Amortized
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder, SiteEncoder
from tests.oracles.processes import on_processes

N = 240
SCALE = torch.tensor([1.0, 0.3], dtype=torch.float64)
CASES = {
    "npvi": (NPVI, Poisson, ConditionalEncoder),
    "npvi, paper": (NPVI, Gaussian, GraphConvolutionEncoder),
    "npvi, sites": (NPVI, Gaussian, SiteEncoder),
    "vnngp": (VNNGP, Poisson, ConditionalEncoder),
}


def problem(likelihood):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(N, 2, generator=generator, dtype=torch.float64)
    x[:40] = (6 * x[:40]).round() / 6  # coincident points
    f = torch.sin(6 * x[:, 0]) * torch.cos(5 * x[:, 1])
    y = f + 0.1 * torch.randn(N, generator=generator, dtype=torch.float64)
    y = torch.poisson((f + 1).exp(), generator=generator) if likelihood is Poisson else y
    return x, y, torch.rand(9, 2, generator=generator, dtype=torch.float64)


def parents():
    """Parents of own rows in the numbers of the source, and those of the rows of the halo that they need."""
    x, y, _ = problem(Gaussian)
    data = ShardedData(x, y)
    graph = ShardedNeighborhoods(data, 7, SCALE, symmetric=True, num_context=5)
    rows = graph.halo.complete(data.rows)
    known = torch.where(graph.neighbors < 0, -1, rows[graph.neighbors.clamp(min=0).long()])
    context = torch.where(graph.context < 0, -1, rows[graph.context.clamp(min=0).long()])
    direct = torch.zeros(len(rows), dtype=torch.bool)
    direct[: data.num_own] = True
    direct[graph.neighbors[: data.num_own].clamp(min=0).long()] = True
    return {"rows": rows[direct], "parents": known[direct], "context": context[direct]}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_symmetric_graph_of_several_processes_is_that_of_all_rows(count, tmp_path):
    x, _, _ = problem(Gaussian)
    expected = SymmetricGraph(x, 7, metric=SCALE)
    near = expected.others(5)
    seen = torch.zeros(N)
    for part in on_processes(count, tmp_path, parents):
        rows = part["rows"]
        assert torch.equal(part["parents"], expected.neighbors[rows])
        for row, further in zip(rows.tolist(), part["context"].tolist(), strict=True):
            known = set(expected.neighbors[row].tolist())
            assert [each for each in further if each >= 0] == [each for each in near[row].tolist() if each not in known]
        seen[rows] += 1
    assert (seen >= 1).all()
    assert (seen > 1).any()


def build(case, sharded):
    method, likelihood, encoder = CASES[case]
    x, y, _ = problem(likelihood)
    torch.manual_seed(0)
    settings = {"num_neighbors": 6, "jitter": 0.01, "kernel": Matern52(2, 1.0, 0.3)}
    settings["guide"] = Amortized(encoder(2) if encoder is SiteEncoder else encoder())
    settings["likelihood"] = likelihood() if likelihood is Poisson else likelihood(0.1)
    return method(ShardedData(x, y), **settings) if sharded else method(x, y, **settings)


def trained(case, sharded):
    gp, new = build(case, sharded), problem(Gaussian)[2]
    losses = fit(gp, 4, batch_size=N, refresh_every=2, progress=False).losses
    mean, variance = gp(new)
    weights = torch.cat([param.detach().flatten() for param in gp.q.encoder.parameters()])
    moments = torch.stack([mean, variance, gp.predict(new).variance]).detach()
    return {"losses": losses, "lengthscale": gp.kernel.lengthscale.detach(), "weights": weights, "moments": moments}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(case, tmp_path):
    expected = trained(case, False)
    for found in on_processes(2, tmp_path, trained, case, True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def still(batch_size):
    """Losses of steps too small to move anything."""
    options = {"lr": 1e-30, "schedule": Schedule(()), "progress": False}
    return {"losses": fit(build("npvi", True), 5, batch_size=batch_size, **options).losses}


@pytest.mark.slow
def test_minibatches_of_an_epoch_average_to_the_bound_of_all_rows(tmp_path):
    for name in ("batches", "all"):
        (tmp_path / name).mkdir()
    batches = on_processes(2, tmp_path / "batches", still, N // 5)
    whole = on_processes(2, tmp_path / "all", still, N)
    assert torch.equal(batches[0]["losses"], batches[1]["losses"])
    assert batches[0]["losses"].std() > 0.001
    torch.testing.assert_close(batches[0]["losses"].mean(), whole[0]["losses"][0], rtol=1e-6, atol=0)


class Stop(Exception):
    """Ends a run in the middle."""


def continued(path, end):
    def stop(step, loss):
        if step == end:
            raise Stop

    gp = build("npvi", True)
    checkpoint = None if path is None else Checkpoint(path / "checkpoint", every=3)
    try:
        result = fit(gp, 8, batch_size=60, refresh_every=2, checkpoint=checkpoint, callback=stop, progress=False)
    except Stop:
        return {}
    return {"losses": result.losses, "moments": torch.stack(gp(problem(Gaussian)[2])).detach()}


@pytest.mark.slow
def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    for name in ("whole", "begun", "continued"):
        (tmp_path / name).mkdir()
    expected = on_processes(2, tmp_path / "whole", continued, None, None)[0]
    on_processes(2, tmp_path / "begun", continued, tmp_path, 5)
    found = on_processes(2, tmp_path / "continued", continued, tmp_path, None)[0]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
