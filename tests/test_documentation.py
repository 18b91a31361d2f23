"""The examples that a newcomer copies: each page's Python blocks run from top to bottom, as one program."""

import math
import re
from pathlib import Path

import pandas
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoNormal
from torch.testing import assert_close

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.models import VNNGP

ROOT = Path(__file__).parents[1]

FEWER = {  # sizes on a page, and in the test
    "README.md": [("num_samples=100, warmup_steps=100", "num_samples=5, warmup_steps=5"), ("2_000", "300")],
    "docs/gibbs.md": [("num_samples=500, warmup_steps=100", "num_samples=5, warmup_steps=5"), ("rand(500", "rand(100")],
    "docs/howto/checkpoints.md": [("train(60)", "train(6)"), ("train(100)", "train(12)"), ("every=50", "every=5")],
    "docs/howto/cluster.md": [("5_000", "400"), ("every=5", "every=50"), (", 200)", ", 20)")],
    "docs/howto/gaps.md": [("1_500", "250"), ("fit(gp)", "fit(gp, 3)"), ("max_seconds=20", "num_steps=2")],
    "docs/howto/maps.md": [
        (", 400)", ", 60)"),
        ("50, 0.5", "50, 5.0"),
        ("30, 0.5", "30, 5.0"),
        ("fit(gp)", "fit(gp, 3)"),
    ],
    "docs/howto/memory_and_threads.md": [("2_000", "300"), ("50_000", "500"), ("x[:500]", "x[:50]")],
    "docs/howto/priors.md": [("num_samples=100, warmup_steps=100", "num_samples=5, warmup_steps=5"), ("200)", "20)")],
    "docs/howto/new_data.md": [
        ("fit(gp)", "fit(gp, 3)"),
        ("gp, 100", "gp, 5"),
        ("100_000", "500"),
        ("=64)", "=8)"),
        ("range(3)", "range(1)"),
    ],
    "docs/howto/missing_and_offsets.md": [
        ("gp, 150", "gp, 20"),
        ("gp, 50", "gp, 5"),
        ("two, 100", "two, 3"),
        ("600", "200"),
        ("300", "100"),
    ],
    "docs/howto/guide_check.md": [
        ("num_samples=400, warmup_steps=200", "num_samples=4, warmup_steps=4"),
        ("num_samples=400)", "num_samples=5)"),
        ("num_samples=200", "num_samples=25"),
        ("2_000", "20"),
        ("khat(200", "khat(25"),
        ("num_samples=99", "num_samples=9"),
        ("(99", "(9"),
        (", 3, progress", ", 1, progress"),
    ],
    "docs/howto/mixed_models.md": [
        ("range(50)", "range(3)"),
        ("range(10)", "range(2)"),
        ("num_samples=100", "num_samples=3"),
        ("=20)", "=2)"),
    ],
    "docs/howto/several_outputs.md": [
        ("fit(gp)", "fit(gp, 3)"),
        ("fit(alone)", "fit(alone, 3)"),
        ("varying, 60", "varying, 2"),
        ("300", "100"),
        ("40", "9"),
    ],
    "docs/howto/scikit_learn.md": [
        (", 400)", ", 80)"),
        ("[:300]", "[:60]"),
        ("[300:]", "[60:]"),
        ("cv=3", "cv=2"),
        ("r(num_neighbors=10)", "r(num_neighbors=10, fit_options={'num_steps': 5})"),
    ],
    "docs/methods.md": [
        ("2_000", "400"),
        ("1_500", "300"),
        ("data, 500)", "data, 100)"),
        ("(gp, 100", "(gp, 40"),
        ("50, b", "9, b"),
        ("gp, 30", "gp, 5"),
        ("vi, 20", "vi, 4"),
        ("num_samples=20, warmup_steps=20", "num_samples=4, warmup_steps=4"),
        ("warmup_steps=100", "warmup_steps=30"),
    ],
    "docs/intervals.md": [("fit(gp)", "fit(gp, 10)")],
    "docs/sgmcmc.md": [("num_samples=50, warmup_steps=600", "num_samples=5, warmup_steps=50")],
}


def blocks(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), re.DOTALL)


def pages():
    files = [path for folder in ("docs", "docs/howto", "docs/api") for path in (ROOT / folder).glob("*.md")]
    found = [path.relative_to(ROOT).as_posix() for path in files]
    return sorted(path for path in ["README.md", *found] if not path.startswith("docs/tutorials") and blocks(path))


def given_data():
    """Data and new places, which a page takes for granted."""
    x = torch.rand(200, 2)
    f = torch.sin(6 * x[:, 0])
    return {"x": x, "counts": torch.poisson(f.exp()), "x_new": torch.rand(20, 2)}


def given_frame():
    """A table with columns of several types, as files have them."""
    east, north = torch.rand(200), torch.arange(200)
    height = (100 * torch.sin(6 * east)).round().int()
    return {
        "df": pandas.DataFrame({"east": east, "north": north, "height": height}),
        "places": pandas.DataFrame({"east": torch.rand(5), "north": torch.arange(5)}),
        "raster": {"east": [0.2, 0.4], "north": [3.0, 8.0, 9.0]},
    }


GIVEN = {"README.md": given_frame, "docs/index.md": given_frame, "docs/intervals.md": given_data}


def check_guide(scope):
    assert (scope["variance"] > 0).all()
    assert ((scope["probability"] > 0) & (scope["probability"] < 1)).all()
    assert (scope["rate"] > 0).all()
    assert scope["predictive"].batch_shape == scope["averaged"].batch_shape == (5,)
    assert scope["fields"].shape == (100, 5)
    assert scope["loss"].detach() < 0.5


def check_method(scope):
    x, kernel = scope["x"][:20].float(), scope["kernel"]
    lag = x - x.mT
    assert_close(kernel(x), (math.tau * lag / 2).cos() + (math.tau * lag / 0.7).cos())
    assert scope["error"] < 0.1
    draws, mean, variance = scope["draws"], scope["mean"], scope["variance"]
    assert_close(draws.mean(0), mean.detach(), rtol=0, atol=6 * float((variance.detach().max() / 200).sqrt()))


def check_likelihood(scope):
    assert scope["error"] < 0.2
    assert_close(scope["found"], scope["given"], rtol=1e-4, atol=0.0)


def check_exposure(scope):
    """Exposures and trials of new rows multiply, outputs at other sites are predicted everywhere."""
    assert_close(scope["day"], 24 * scope["rate"], rtol=1e-4, atol=0.0)
    assert_close(scope["of_ten"], 10 * scope["share"], rtol=1e-4, atol=0.0)
    assert scope["means"].isfinite().all()
    assert scope["mean"].shape == scope["y"].shape


def check_estimators(scope):
    assert scope["mean"].shape == scope["std"].shape == scope["low"].shape == (20,)
    assert scope["maps"].shape == (20, 20)
    assert scope["model"].score(scope["stations"], scope["temperature"]) > 0.9


def check_resumed(scope):
    assert scope["result"].steps == 12
    assert_close(scope["mean"], scope["gp"](scope["x"][:5])[0], rtol=0, atol=0)


def check_neighbors(scope):
    degrees = torch.tensor([[0.0, 0.0], [90.0, 0.0], [0.0, 90.0]])
    quarter = math.pi * 6371 / 2
    want = quarter * (1 - torch.eye(3))
    assert_close(scope["great_circle"](degrees, degrees), want, rtol=1e-4, atol=1e-2)
    assert torch.equal(scope["given"].neighbors[5], torch.tensor([4, 3, 2]))


def check_gaps(scope):
    """Blocks are harder than random folds, and the difference of two models has the smaller error."""
    near, gaps = scope["near"]["Matern32"], scope["gaps"]["Matern32"]
    assert gaps.scores["rmse"].value > near.scores["rmse"].value
    assert scope["difference"].standard_error < gaps.scores["nll"].standard_error
    assert scope["table"].shape == (4, 4)


CHECKS = {
    "docs/howto/gaps.md": check_gaps,
    "docs/methods.md": check_guide,
    "docs/howto/write_a_method.md": check_method,
    "docs/howto/write_a_likelihood.md": check_likelihood,
    "docs/howto/missing_and_offsets.md": check_exposure,
    "docs/howto/checkpoints.md": check_resumed,
    "docs/howto/scikit_learn.md": check_estimators,
    "docs/howto/neighbors.md": check_neighbors,
}
SKIPPED = {"docs/diagnostics.md"}  # its blocks are alternatives; three of them run below
SLOW = {  # pages of more than a second, which run on their own before a release and in .ci/run
    "README.md",
    "docs/gibbs.md",
    "docs/howto/checkpoints.md",
    "docs/howto/cluster.md",
    "docs/howto/gaps.md",
    "docs/howto/gpu.md",
    "docs/howto/guide_check.md",
    "docs/howto/kernels.md",
    "docs/howto/likelihoods.md",
    "docs/howto/missing_and_offsets.md",
    "docs/howto/mixed_models.md",
    "docs/howto/neighbors.md",
    "docs/howto/new_data.md",
    "docs/howto/priors.md",
    "docs/howto/scikit_learn.md",
    "docs/howto/several_outputs.md",
    "docs/howto/space_time.md",
    "docs/methods.md",
    "docs/sgmcmc.md",
}
RUN = [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in pages() if page not in SKIPPED]


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyro.set_rng_seed(0)
    scope = {"__name__": "__main__", **GIVEN.get(page, dict)()}
    for code in blocks(page):
        for old, new in FEWER.get(page, ()):
            code = code.replace(old, new)
        exec(compile(code, page, "exec"), scope)
    CHECKS.get(page, lambda scope: None)(scope)


@pytest.mark.slow
def test_blocks_of_the_page_on_diagnostics_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyro.set_rng_seed(0)
    x = torch.rand(60, 2)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(60)

    def model(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(slope * x[:, 0], 1.0), obs=y)

    guide = AutoNormal(model)
    guide(x, y)
    mcmc = MCMC(NUTS(model), num_samples=50, warmup_steps=50, disable_progbar=True)
    mcmc.run(x, y)
    gp = VNNGP(x, y, Matern32(2, lengthscale=0.5), num_neighbors=10)
    scope = {"mcmc": mcmc, "model": model, "guide": guide, "x": x, "y": y, "gp": gp, "result": fit(gp, 5)}
    scope |= {"x_test": x, "y_test": y, "prob": torch.rand(60), "label": (y > 0).float()}
    scope |= {"prior": dist.Normal(0.0, 1.0), "simulator": lambda theta: theta + torch.randn(10)}
    scope |= {"fit_and_draw": lambda data: {"theta": data.sum() / 11 + torch.randn(50) / 11**0.5}}
    exec("from pyro_nngp.inference import sbc_ranks, symmetry, uniformity", scope)
    chosen = [code for code in blocks("docs/diagnostics.md") if re.search(r"to_netcdf|sbc_ranks\(|plot_pit\(", code)]
    assert len(chosen) == 3
    for code in chosen:
        exec(compile(code, "docs/diagnostics.md", "exec"), scope)
    assert scope["uniformity"](scope["ranks"]) > 1e-3


def test_sizes_that_are_replaced_are_on_their_pages():
    for page, pairs in FEWER.items():
        for old, _ in pairs:
            assert any(old in code for code in blocks(page)), (page, old)


def test_there_are_examples():
    assert len(pages()) >= 12
    assert (len(blocks("README.md")), len(blocks("docs/methods.md"))) == (3, 8)
