"""The examples that a newcomer copies from the README and from the guide to the methods."""

import math
import re
from pathlib import Path

import pytest
from torch.testing import assert_close

ROOT = Path(__file__).parents[1]


def examples(path, after=""):
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text[text.index(after) :], re.DOTALL)


README, GUIDE = examples("README.md", after="<!-- example -->"), examples("docs/methods.md")
OWN = examples("docs/howto/write_a_method.md")


@pytest.mark.parametrize("code", README, ids=range(len(README)))
def test_the_examples_run(code):
    code = code.replace("num_samples=100, warmup_steps=100", "num_samples=5, warmup_steps=5").replace("2_000", "300")
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_the_guide_runs_from_top_to_bottom():
    scope = {"__name__": "__main__"}
    for code in GUIDE:
        exec(compile(code, "docs/methods.md", "exec"), scope)
    assert (scope["variance"] > 0).all()
    assert ((scope["probability"] > 0) & (scope["probability"] < 1)).all()
    assert (scope["rate"] > 0).all()
    assert scope["predictive"].batch_shape == scope["averaged"].batch_shape == (5,)
    assert scope["fields"].shape == (100, 5)
    assert scope["loss"].detach() < 0.5


def test_the_page_on_methods_of_your_own_runs():
    scope = {"__name__": "__main__"}
    for code in OWN:
        exec(compile(code, "docs/howto/write_a_method.md", "exec"), scope)
    x, kernel = scope["x"][:20].float(), scope["kernel"]
    lag = x - x.mT
    assert_close(kernel(x), (math.tau * lag / 2).cos() + (math.tau * lag / 0.7).cos())
    assert scope["error"] < 0.1
    draws, mean, variance = scope["draws"], scope["mean"], scope["variance"]
    assert_close(draws.mean(0), mean.detach(), rtol=0, atol=6 * float((variance.detach().max() / 200).sqrt()))


def test_the_page_on_likelihoods_of_your_own_runs():
    scope = {"__name__": "__main__"}
    for code in examples("docs/howto/write_a_likelihood.md"):
        exec(compile(code, "docs/howto/write_a_likelihood.md", "exec"), scope)
    assert scope["error"] < 0.2
    assert_close(scope["found"], scope["given"], rtol=1e-4, atol=0.0)


def test_there_are_examples():
    assert (len(README), len(GUIDE), len(OWN)) == (2, 7, 3)
