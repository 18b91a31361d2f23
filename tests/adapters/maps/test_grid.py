"""Maps hold what ``predict`` gives at each cell, whatever the tiles."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.adapters.maps import predict_grid
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, Poisson


def at_cells(axes):
    north, east = np.meshgrid(axes["north"], axes["east"], indexing="ij")
    return torch.from_numpy(np.stack([east.ravel(), north.ravel()], 1))


@pytest.mark.parametrize("of", ["y", "f"])
def test_cells_have_the_moments_of_predictions(gp, axes, of, small_tiles):
    found = predict_grid(gp, axes, of=of, quantile_levels=[0.1, 0.9], thresholds=[0.5])
    assert found["mean"].dims == ("north", "east")
    assert found["quantiles"].dims == ("quantile", "north", "east")
    np.testing.assert_array_equal(found["east"], axes["east"])
    with torch.no_grad():
        oracle = gp.predict(at_cells(axes)) if of == "y" else torch.distributions.Normal(*normal_moments(gp, axes))
    np.testing.assert_allclose(found["mean"].values.ravel(), oracle.mean, rtol=1e-6)
    np.testing.assert_allclose(found["sd"].values.ravel(), oracle.stddev, rtol=1e-6)
    np.testing.assert_allclose(
        found["quantiles"].sel(quantile=0.9).values.ravel(), oracle.icdf(torch.tensor(0.9)), 1e-5
    )
    above = 1 - oracle.cdf(torch.tensor(0.5))
    np.testing.assert_allclose(found["exceedance"].sel(threshold=0.5).values.ravel(), above, atol=1e-6)


def normal_moments(gp, axes):
    mean, variance = gp(at_cells(axes))
    return mean, variance.sqrt()


def test_draws_are_joint(gp, axes):
    found = predict_grid(gp, axes, of="f", num_draws=600, seed=3)
    assert found["draws"].dims == ("draw", "north", "east")
    with torch.no_grad():
        draws = gp.sample(at_cells(axes), 600, seed=3)
    ours = torch.from_numpy(found["draws"].values.reshape(600, -1)).double()
    error = (ours.T.cov() - draws.T.cov()).abs().max() / draws.var(0).max()
    assert error.item() < 0.35  # of 600 draws each
    assert ours.T.corrcoef()[0, 1] > 0.5  # neighboring cells
    of_y = predict_grid(gp, axes, num_draws=600, seed=3)["draws"]
    assert float((of_y - found["draws"]).var()) == pytest.approx(0.01, rel=0.05)


def test_a_grid_of_any_number_of_dimensions(small_tiles):
    x = torch.rand(60, 3, dtype=torch.float64)
    gp = nngp.Vecchia(x, x.sum(1), Matern52(3, 1.0, 0.5), Gaussian(0.01), num_neighbors=6)
    line = nngp.Vecchia(x[:, :1], x[:, 0], Matern52(1, 1.0, 0.5), Gaussian(0.01), num_neighbors=6)
    space_time = {name: np.linspace(0, 1, size) for name, size in (("x", 4), ("y", 5), ("t", 2))}
    found = predict_grid(gp, space_time, columns=["x", "y", "t"])["mean"]
    assert found.sizes == {"t": 2, "y": 5, "x": 4}
    at = found.isel(x=3, y=1, t=1)
    place = torch.tensor([[float(at.x), float(at.y), float(at.t)]], dtype=torch.float64)
    assert float(at) == pytest.approx(gp(place)[0].item(), rel=1e-6)
    assert predict_grid(line, {"depth": np.linspace(0, 1, 11)}, columns=["depth"])["sd"].dims == ("depth",)


def test_classes_counts_and_several_outputs(axes):
    x = torch.rand(60, 2, dtype=torch.float64)
    y = (x[:, 0] * 3).floor()
    raster = {"x": axes["east"], "y": axes["north"]}
    classes = nngp.VNNGP(x, y, Matern52(2, 1.0, 0.5), Categorical(3), num_neighbors=6)
    probability = predict_grid(classes, raster)["probability"]
    assert probability.dims == ("category", "y", "x")
    np.testing.assert_allclose(probability.sum("category"), 1, atol=1e-2)
    labels = nngp.VNNGP(x, (y > 0).double(), Matern52(2, 1.0, 0.5), Bernoulli(), num_neighbors=6)
    mean = predict_grid(labels, raster)["mean"]
    assert 0 < mean.min() < mean.max() < 1
    counts = nngp.VNNGP(x, y, Matern52(2, 1.0, 0.5), Poisson(), num_neighbors=6)
    found = predict_grid(counts, raster, quantile_levels=[0.5], thresholds=[0.0], num_draws=2)
    np.testing.assert_array_equal(found["quantiles"] % 1, 0)
    np.testing.assert_array_equal(found["draws"] % 1, 0)
    assert (found["exceedance"] < 1).all()
    both = nngp.Vecchia(x, torch.stack([x[:, 0], x[:, 1]], 1), Matern52(2, 1.0, 0.5), Gaussian(0.01), num_neighbors=6)
    two = predict_grid(both, raster, quantile_levels=[0.5])
    assert two["mean"].dims == ("output", "y", "x")
    assert two["quantiles"].dims == ("quantile", "output", "y", "x")
    np.testing.assert_allclose(two["quantiles"].sel(quantile=0.5), two["mean"], rtol=1e-5)


SEVERAL = {
    "Vecchia": {"num_neighbors": 4},
    "LOO": {"num_neighbors": 4},
    "MLLk": {"num_neighbors": 4},
    "VNNGP": {"num_neighbors": 4},
    "NPVI": {"num_neighbors": 4},
    "SVGP": {"inducing": 8},
    "SWSGP": {"inducing": 8, "num_neighbors": 4},
    "BSGP": {"inducing": 8, "inducing_prior": None},
    "LMC": {"num_neighbors": 4},
    "CoregionalizedLOO": {"num_neighbors": 4},
}


@pytest.mark.parametrize("name", SEVERAL)
def test_outputs_come_first_whatever_the_method(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 1, dtype=torch.float64, generator=generator)
    y = torch.cat([x, 5 - x], 1)
    kernel = [Matern52(1, 1.0, 0.5)] if name in ("LMC", "CoregionalizedLOO") else Matern52(1, 1.0, 0.5)
    gp = getattr(nngp.models, name)(x, y, kernel, **SEVERAL[name])
    given = {"samples": {"layers.0.nu": torch.randn(2, 2, 8, dtype=torch.float64)}} if name == "BSGP" else {}
    for count in (2, 3):  # as many cells as outputs, or more
        axis = np.linspace(0, 1, count)
        settings = {"quantile_levels": [0.5], "thresholds": [2.5], "num_draws": 2, "columns": ["x"], **given}
        found = predict_grid(gp, {"x": axis}, **settings)
        with torch.no_grad():
            mean, _ = gp(torch.from_numpy(axis)[:, None], **given)
        np.testing.assert_allclose(found["mean"], mean, rtol=1e-5, atol=1e-5)
        assert (abs(found["quantiles"][0] - found["mean"]) <= found["sd"]).all()  # the median
        assert ((found["exceedance"][0] > 0.5) == (found["quantiles"][0] > 2.5)).all()
        assert found["draws"].dims == ("draw", "output", "x")


def test_posterior_draws_are_averaged_over(axes):
    x = torch.rand(40, 2, dtype=torch.float64)
    kernel = Matern52(2, 1.0, PyroSample(dist.LogNormal(-1.0, 0.5)))
    gp = nngp.Vecchia(x, x[:, 0], kernel, Gaussian(PyroSample(dist.LogNormal(-4.0, 1.0))), num_neighbors=6)
    samples = {"kernel.lengthscale": torch.tensor([0.2, 0.6], dtype=torch.float64)}
    samples["likelihood.variance"] = torch.tensor([100.0, 400.0], dtype=torch.float64)
    found = predict_grid(gp, axes, columns=["east", "north"], samples=samples, num_draws=20)
    noise = found["draws"].to_numpy().reshape(2, -1).var(1)  # half of the draws each, 350 cells
    np.testing.assert_allclose(noise, [100, 400], rtol=6 * (2 / 350) ** 0.5)
    oracle = gp.predict(at_cells(axes), samples=samples)
    np.testing.assert_allclose(found["sd"].values.ravel(), oracle.variance.sqrt(), rtol=1e-6)


def test_one_level_may_be_a_number(gp, axes):
    found = predict_grid(gp, axes, quantile_levels=0.5, thresholds=1)
    assert found.equals(predict_grid(gp, axes, quantile_levels=[0.5], thresholds=[1]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"of": "z"}, ValueError, "predict_grid: expected of to be 'y' or 'f', got 'z'"),
        ({"trials": 2**70}, ValueError, "expected trials in the range of 64-bit integers, got 1180591620717411303424"),
        ({"num_draws": -1}, ValueError, "expected num_draws >= 0, got -1"),
        (
            {"num_draws": 10**13},
            MemoryError,
            r"predict_grid: expected draws to fit into memory, got 10000000000000 at \d+ cells. Lower num_draws",
        ),
        ({"quantile_levels": [5]}, ValueError, r"expected quantile_levels in \(0, 1\), got 5"),
    ],
)
def test_malformed_arguments_are_refused(gp, axes, change, error, message):
    with pytest.raises(error, match=message):
        predict_grid(gp, axes, **change)


LIMITED = """
import resource
from pathlib import Path
import numpy as np
from pyro_nngp import predict_grid
from tests.builders import build

def mapped(size):
    axis = np.linspace(0, 1, size)
    return predict_grid(build("Vecchia"), {"a": axis, "b": axis}, columns=["a", "b"], progress=False)

mapped(5)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
mapped(20_000)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_map_beyond_the_limit_of_memory_names_path():
    command = [sys.executable, "-W", "ignore", "-c", LIMITED]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    message = r"MemoryError: predict_grid: expected the computation to fit .*, got 1.49 GiB in one piece. Give path="
    assert re.search(message, ran.stderr), ran.stderr
