"""The lowest versions that are tested are the lowest that are declared."""

import re
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]


def versions(lines, sign):
    found = (re.match(rf"([\w-]+){sign}([\w.]+)", line) for line in lines)
    return {match[1]: tuple(map(int, match[2].split("."))) for match in found if match}


def test_declared_bounds_are_those_that_the_lowest_environment_has():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tested = (extras[name] for name in ("arviz", "cpu", "datasets", "test"))
    declared = versions([*project["dependencies"], *chain.from_iterable(tested)], ">=")
    lowest = versions((ROOT / "constraints-lowest.txt").read_text().splitlines(), "==")
    assert declared.keys() == lowest.keys()
    for name, bound in declared.items():
        assert lowest[name][: len(bound)] == bound, name
        assert not any(lowest[name][len(bound) :]), name
