"""q(u) by an encoder on several processes: batches with the neighbors of their neighbors."""

import pytest
import torch

from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.table import ShardedNeighborhoods
from pyro_nngp.neighbors import SymmetricGraph
from tests.oracles.processes import on_processes

N = 240
SCALE = torch.tensor([1.0, 0.3], dtype=torch.float64)


def problem():
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(N, 2, generator=generator, dtype=torch.float64)
    x[:40] = (6 * x[:40]).round() / 6  # coincident points
    return x, torch.sin(6 * x[:, 0]) * torch.cos(5 * x[:, 1])


def parents():
    """Parents of own rows in the numbers of the source, and those of the rows of the halo that they need."""
    x, y = problem()
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
    x, _ = problem()
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
