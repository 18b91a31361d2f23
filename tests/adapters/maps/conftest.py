"""A small process on a plane, as a frame's and as tensors'."""

import numpy as np
import pandas as pd
import pytest

import pyro_nngp as nngp
from pyro_nngp.adapters.maps import cells
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian


@pytest.fixture
def gp():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"east": rng.random(80), "north": rng.random(80)})
    return nngp.Vecchia(frame, np.sin(6 * frame["east"]), Matern52(2, 1.0, 0.3), Gaussian(0.01), num_neighbors=8)


@pytest.fixture
def axes():
    return {"east": np.linspace(0, 1, 7), "north": np.linspace(0, 1, 5)}


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(cells, "TILE_SIDE", 3)
