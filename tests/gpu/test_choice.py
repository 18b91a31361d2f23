"""When the Triton kernels are used."""

import importlib.metadata

import pytest
import torch

from pyro_nngp import gpu
from pyro_nngp.gpu import conditional as on_gpu
from pyro_nngp.kernels.radial import RBF, SQUARED_DISTANCE
from pyro_nngp.native.conditional import Problem


@pytest.fixture
def fresh():
    gpu.installed.cache_clear()
    yield
    gpu.installed.cache_clear()


@pytest.mark.parametrize(("version", "found"), [("3.6.0", True), ("3.10.1", True), ("3.5.1", False)])
def test_triton_from_the_version_that_is_tested(version, found, fresh, monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: name == "triton")
    monkeypatch.setattr(gpu, "version", lambda name: version)
    assert gpu.enabled() == gpu.installed() == found
    monkeypatch.setenv("PYRO_NNGP_TRITON", "0")
    assert not gpu.enabled()


def test_without_triton_or_its_version(fresh, monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert not gpu.installed()

    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gpu, "find_spec", lambda name: True)
    monkeypatch.setattr(gpu, "version", unknown)
    gpu.installed.cache_clear()
    assert not gpu.installed()


class OnCuda(torch.Tensor):
    """A tensor that reports a CUDA device."""

    @property
    def device(self):
        return torch.device("cuda")


def test_what_the_kernels_cover(monkeypatch):
    monkeypatch.setattr(on_gpu.gpu, "enabled", lambda: True)
    count = on_gpu.FEWEST_TARGETS
    x, scale, rows = torch.zeros(count, 2), torch.ones(2), torch.zeros(count, 2, dtype=torch.int64)
    problem = Problem(x.as_subclass(OnCuda), x, scale, scale[0], None, rows, RBF, 1e-6)
    assert on_gpu.supported(problem)
    wide = torch.zeros(count, on_gpu.MAX_NEIGHBORS + 1, dtype=torch.int64)
    others = {"x": x, "profile": SQUARED_DISTANCE, "points": x.double(), "neighbors": wide}
    others_too = [problem._replace(**{name: value}) for name, value in others.items()]
    others_too += [problem._replace(neighbors=rows[1:]), problem._replace(neighbors=rows[:, :0])]
    assert not any(on_gpu.supported(other) for other in others_too)
    monkeypatch.setattr(on_gpu.gpu, "enabled", lambda: False)
    assert not on_gpu.supported(problem)


@pytest.mark.parametrize("k", [1, 32, 33, 128, 129, on_gpu.MAX_NEIGHBORS])
def test_tiles_are_powers_of_two_with_a_row_for_each_thread(k):
    tiles = on_gpu.tiles(k)
    assert tiles.rows == 32 * tiles.warps
    assert tiles.columns == 16
    assert tiles.warps * tiles.programs <= 64
