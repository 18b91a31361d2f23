"""Data cut into cells, halos, and neighbor tables that equal those of one process."""

import numpy as np
import pytest
import torch

from pyro_nngp.distributed import ParquetColumns, ProcessError, ShardedData, World
from pyro_nngp.distributed.halo import Halo
from pyro_nngp.distributed.search import ShardedIndex
from pyro_nngp.distributed.table import ShardedGraph, ShardedOthers
from pyro_nngp.kernels import KernelMetric, Matern52
from pyro_nngp.neighbors import NearestOthers, NeighborGraph
from tests.oracles.processes import on_processes


def points(num_rows=1500, dims=2):
    """Random points with coincident and equally distant ones."""
    x = torch.rand(num_rows, dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:200] = (10 * x[:200]).round() / 10
    x[200:210] = x[0]
    return x


SCALE = torch.tensor([1.0, 0.3], dtype=torch.float64)


def tables(x, y):
    """The neighbors of own rows in the numbers of the source, halo sums, and gradients through the halo."""
    data = ShardedData(x, y)
    assert torch.equal(data.values["x"], torch.as_tensor(np.asarray(x[:]))[data.rows])
    found = {"rows": data.rows, "cells": data.values["x"]}
    for kind in (ShardedGraph, ShardedOthers):
        table = kind(data, 8, SCALE)
        numbers = table.halo.complete(data.rows)
        found[kind.__name__] = torch.where(table.neighbors < 0, -1, numbers[table.neighbors.clamp(min=0).long()])
        assert table.neighbors.dtype == torch.int32
        assert torch.equal(table.x, table.halo.complete(data.values["x"]))
    size, sent = data.world.size, data.world.traffic["sum"]
    data.world.sum(torch.ones(100, dtype=torch.float64))
    assert data.world.traffic["sum"] - sent == 2 * (size - 1) * 800 // size  # bytes of a ring
    sent = data.world.traffic["gather"]
    data.world.gather(torch.ones(100, dtype=torch.float64))
    assert data.world.traffic["gather"] - sent == (size - 1) * (800 + 8)  # and their number
    every = torch.arange(data.num_rows)
    places = table.halo.places(every)
    assert torch.equal(table.halo.numbers_at(places), torch.where(places == -1, -1, every))
    assert (places >= 0).sum() == data.num_own + len(table.halo)
    values = data.rows.double().requires_grad_()
    table.halo.complete(values).square().sum().backward()  # each copy of a row contributes to its owner's gradient
    found |= {"gradient": values.grad, "halo": table.halo.numbers, "sent": torch.tensor(data.world.traffic["exchange"])}
    found["nearest"] = data.fetch(ShardedIndex(data, SCALE).nearest(x[:7] + 0.01, 5).flatten().long(), data.rows)[0]
    found |= {"numbers": torch.cat([data.numbers_of(torch.tensor([3, 0, 1499])), data.numbers_at(4)])}
    found["digest"] = torch.tensor(data.digest())
    return found


def check_tables(x, parts):
    graph, others = NeighborGraph(x, 8, metric=SCALE), NearestOthers(x, 8, metric=SCALE)
    rows = torch.cat([part["rows"] for part in parts])
    assert torch.equal(rows.sort().values, torch.arange(len(x)))
    copies = torch.ones(len(x))
    for part in parts:
        assert torch.equal(part["ShardedGraph"], graph.neighbors[part["rows"]])
        assert torch.equal(part["ShardedOthers"], others.others()[part["rows"]])
        assert torch.equal(part["nearest"], graph.query(x[:7] + 0.01, 5).flatten())
        expected = [3, 0, 1499, *graph.order[:4].tolist()]
        assert rows[part["numbers"]].tolist() == expected
        assert torch.equal(part["digest"], parts[0]["digest"])
        copies[rows[part["halo"]]] += 1
    for part in parts:
        assert torch.equal(part["gradient"], 2 * part["rows"] * copies[part["rows"]])


def test_one_process_has_the_tables_of_all_rows():
    x = points()
    check_tables(x, [tables(x, x[:, 0])])


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
def test_tables_of_several_processes_are_those_of_all_rows(count, tmp_path):
    x = points()
    parts = on_processes(count, tmp_path, tables, x, x[:, 0])
    check_tables(x, parts)
    if count != 7:  # equal points cannot be divided
        assert all(abs(len(part["rows"]) - len(x) / count) < 0.1 * len(x) / count for part in parts)
    assert all(part["sent"] > 0 for part in parts)
    alone = tables(x, x[:, 0])["digest"]
    assert torch.equal(parts[0]["digest"], alone)


def test_rows_are_read_from_memory_maps_and_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x = points().numpy()
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(1500))
    table = pyarrow.table({"east": x[:, 0], "north": x[:, 1], "count": np.arange(1500)})
    parquet.write_table(table, tmp_path / "all.parquet", row_group_size=400)
    data = ShardedData(tmp_path / "x.npy", tmp_path / "y.npy")
    same = ShardedData(
        ParquetColumns(tmp_path / "all.parquet", ["east", "north"]), ParquetColumns(tmp_path / "all.parquet", "count")
    )
    assert torch.equal(data.values["x"], torch.from_numpy(x)[data.rows])
    assert torch.equal(data.values["x"], same.values["x"])
    assert torch.equal(same.values["y"], same.rows.double())
    for start, stop in ((395, 1201), (395, 400), (395, 401), (400, 800), (0, 1500)):
        part = ParquetColumns(tmp_path / "all.parquet", ["north"])[start:stop]
        np.testing.assert_array_equal(part[:, 0], x[start:stop, 1])
    assert ParquetColumns(tmp_path / "all.parquet", ["north", "east"])[1500:1500].shape == (0, 2)
    with pytest.raises(ValueError, match="expected columns of the file, got 'west'"):
        ParquetColumns(tmp_path / "all.parquet", ["west"])


def test_masked_rows_are_refused():
    x = np.ma.array(points().numpy(), mask=False)
    x[7, 1] = np.ma.masked
    with pytest.raises(ValueError, match="ShardedData: expected x to be finite, got 1 NaN or infinite entries"):
        ShardedData(x, torch.arange(1500))


@pytest.mark.slow
def test_rows_are_read_from_zarr(tmp_path):
    zarr = pytest.importorskip("zarr")
    x = points().numpy()
    zarr.save_array(tmp_path / "x.zarr", x)
    data = ShardedData(tmp_path / "x.zarr", torch.arange(1500))
    assert torch.equal(data.values["x"], torch.from_numpy(x)[data.rows])


def test_halo_is_empty_on_one_process():
    data = ShardedData(points(), torch.zeros(1500))
    halo = Halo(data, torch.tensor([[3, -1], [7, 9]]))
    assert len(halo) == 0
    assert halo.places(torch.tensor([4, -1])).tolist() == [4, -1]
    assert torch.equal(halo.give_back(torch.zeros(0)), torch.zeros(1500))


def test_malformed_data():
    x = points()
    with pytest.raises(ValueError, match="expected y with targets, got None"):
        ShardedData(x, None)
    with pytest.raises(ValueError, match=r"expected y of shape \(1500, ...\), got \(3,\)"):
        ShardedData(x, torch.zeros(3))
    with pytest.raises(ValueError, match="expected x with at least 2 rows, got 1"):
        ShardedData(x[:1], torch.zeros(1))
    with pytest.raises(ValueError, match=r"expected y to end in .npy or .zarr"):
        ShardedData(x, "y.csv")
    with pytest.raises(TypeError, match="expected y to be an array that can be read by slices, got float"):
        ShardedData(x, 1.0)
    with pytest.raises(ValueError, match="expected y to be finite"):
        ShardedData(x, torch.full((1500,), torch.nan))
    with pytest.raises(TypeError, match="expected y to hold real numbers, got torch.complex64"):
        ShardedData(x, torch.zeros(1500, dtype=torch.complex64))


def test_malformed_files(tmp_path):
    x, y = points(), tmp_path / "y.npy"
    for name in ("y.npy", "y.zarr"):
        with pytest.raises(FileNotFoundError, match="expected y to be a file or store that exists, got"):
            ShardedData(x, tmp_path / name)
    for values in (np.full(1500, "1.0"), np.full(1500, 1j)):
        np.save(y, values)
        with pytest.raises(TypeError, match=f"expected y to hold real numbers, got dtype {values.dtype}"):
            ShardedData(x, y)
    np.save(y, np.full(1500, 1.5, ">f4"))
    assert torch.equal(ShardedData(x, y).values["y"], torch.full((1500,), 1.5, dtype=x.dtype))
    np.save(y, np.array([None] * 1500), allow_pickle=True)
    with pytest.raises(ValueError, match="expected y to be a .npy file of numbers"):
        ShardedData(x, y)
    y.write_text("no array")
    with pytest.raises(ValueError, match="expected y to be a .npy file of numbers"):
        ShardedData(x, y)


def test_tables_refuse_what_needs_all_rows():
    data = ShardedData(points(), torch.zeros(1500))
    table = ShardedGraph(data, 4)
    for name, args in (
        ("query", (data.values["x"],)),
        ("extend", (data.values["x"],)),
        ("append", (data.values["x"],)),
        ("others", ()),
        ("trial", (9,)),
        ("levels", ()),
    ):
        with pytest.raises(TypeError, match=f"expected {name} on a table of all rows, got one of several processes"):
            getattr(table, name)(*args)
    with pytest.raises(TypeError, match="expected others on a table of all rows"):
        ShardedOthers(data, 4).others(5)
    with pytest.raises(TypeError, match="expected metric to be lengthscales, got KernelMetric"):
        table.refresh(KernelMetric(Matern52(2), data.values["x"]))


def one_row_in_each_cell_but_one():
    with pytest.raises(ValueError, match="expected x to have rows in every cell, got none on process"):
        ShardedData(torch.ones(50, 2), torch.zeros(50))
    return {}


@pytest.mark.slow
def test_equal_points_cannot_be_divided(tmp_path):
    on_processes(2, tmp_path, one_row_in_each_cell_but_one)


def without_the_other():
    world = World()
    if world.rank == 1:
        return {}
    with pytest.raises(ProcessError, match="process 0 of 2: expected all processes to take part"):
        world.sum(torch.ones(2))
    return {}


@pytest.mark.slow
def test_a_process_that_ends_is_reported(tmp_path):
    with pytest.raises(AssertionError, match="barrier"):  # of the helper, for the same reason
        on_processes(2, tmp_path, without_the_other)
