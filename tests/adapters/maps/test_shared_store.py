"""Maps that several processes write into one Zarr store."""

import numpy as np
import pytest
import torch
import xarray as xr

from pyro_nngp.adapters.maps import predict_grid
from pyro_nngp.adapters.maps.shared_store import SharedStore
from pyro_nngp.distributed import ShardedData
from pyro_nngp.inference.checkpoint import load_checkpoint
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import VNNGP, Vecchia
from tests.oracles.processes import on_processes

pytestmark = pytest.mark.slow
AXES = {"x": np.linspace(0, 1, 300), "y": np.linspace(0, 1, 140)}
OPTIONS = {"quantile_levels": [0.1, 0.9], "progress": False, "num_neighbors": 8}


def method(sharded, kind=Vecchia):
    x = torch.rand(600, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.sin(6 * x[:, 0])
    options = {"kernel": Matern52(2, 1.0, 0.3), "likelihood": Gaussian(0.01), "num_neighbors": 8}
    gp = kind(ShardedData(x, y), **options) if sharded else kind(x, y, **options)
    if kind is VNNGP:
        gp.solve()
    return gp


def mask():
    return xr.DataArray(AXES["x"] < 0.4, dims="x")  # the last tiles have no cells


def written(path, kind=Vecchia):
    gp = method(True, kind)
    found = predict_grid(gp, AXES, path=path, mask=mask(), **OPTIONS)
    assert found.sizes == {"quantile": 2, "y": 140, "x": 300}
    return {}


def interrupted(path):
    """A map that ends at the third tile of a process; the next call continues it."""
    calls, finish = [], SharedStore.finish

    def stop_at_the_third(store, tile, values):
        calls.append(tile)
        if len(calls) == 3:
            raise KeyError("stop")
        finish(store, tile, values)

    SharedStore.finish = stop_at_the_third  # in this process, which ends afterwards
    with pytest.raises(KeyError, match="stop"):
        predict_grid(method(True), AXES, path=path, mask=mask(), **OPTIONS)
    return {}


def with_errors(path):
    gp = method(True)
    with pytest.raises(ValueError, match="expected path to end in .zarr on 2 processes, got None"):
        predict_grid(gp, AXES)
    with pytest.raises(ValueError, match="predict_grid: expected num_draws 0 on several processes, got 2"):
        predict_grid(gp, AXES, path=path, num_draws=2)
    return {}


def check(path, kind=Vecchia):
    expected = predict_grid(method(False, kind), AXES, mask=mask(), **OPTIONS)
    found = xr.open_zarr(path)
    assert set(found) == {"mean", "sd", "quantiles"}
    xr.testing.assert_allclose(found.load(), expected, rtol=1e-5)
    assert found["mean"].isnull().sum() == (AXES["x"] >= 0.4).sum() * 140


@pytest.mark.parametrize("kind", [Vecchia, VNNGP])
def test_two_processes_write_one_store(kind, tmp_path):
    on_processes(2, tmp_path, written, tmp_path / "map.zarr", kind)
    check(tmp_path / "map.zarr", kind)
    assert not (tmp_path / "map.zarr.part").exists()


def test_an_interrupted_map_continues_on_another_number_of_processes(tmp_path):
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    path = tmp_path / "map.zarr"
    on_processes(2, tmp_path / "first", interrupted, path)
    flags = [load_checkpoint(file)["done"] for file in (tmp_path / "map.zarr.part").glob("done*.pt")]
    assert sum(flags).sum() == 4
    on_processes(3, tmp_path / "second", written, path)
    check(path)
    on_processes(2, tmp_path / "third", with_errors, path)
