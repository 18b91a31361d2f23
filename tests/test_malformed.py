"""Malformed arguments at every entrance end in an error of the package: no silence, no crash, no hang, few others.

Each argument of each entrance is replaced by each value of a table, in forked processes of limited memory and time:
one for each argument, and another where a value ends it. A fork of a process that has loaded torch takes 0.1 s.
"""

from collections import Counter
from itertools import groupby

import pytest


@pytest.mark.slow
def test_malformed_arguments_end_in_errors_of_the_package(tmp_path, monkeypatch):
    from oracles.entrances import CASES, outcomes  # builds a model of each kind

    monkeypatch.chdir(tmp_path)
    found = {}
    for _, group in groupby(CASES, key=lambda case: case[:2]):
        cases = list(group)
        found |= zip(cases, outcomes(cases), strict=True)
    kinds = Counter(result.split(":")[0] for result in found.values())
    bad = {case: result for case, result in found.items() if result == "silent" or result.startswith(("crash", "hang"))}
    foreign = {case: result for case, result in found.items() if result not in ("fine", "ours")}
    assert not bad, f"{kinds}: {bad}"
    assert len(foreign) <= 0.01 * len(CASES), f"{kinds}: {foreign}"
