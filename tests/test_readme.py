"""The example that a newcomer copies from the README."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs():
    match = re.search(r"<!-- example -->\s*```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert match, "README.md has no python block after the marker <!-- example -->"
    exec(compile(match[1], str(README), "exec"), {"__name__": "__main__"})
