"""The examples that a newcomer copies from the README."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(
    r"```python\n(.*?)```", README.read_text(encoding="utf-8").split("<!-- example -->")[1], re.DOTALL
)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_run(code):
    code = code.replace("num_samples=100, warmup_steps=100", "num_samples=5, warmup_steps=5")
    exec(compile(code, str(README), "exec"), {"__name__": "__main__"})


def test_there_are_two_of_them():
    assert len(EXAMPLES) == 2
