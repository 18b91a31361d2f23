"""Results as rows of a CSV file, to which the benchmarks add one per run, so that they can be stopped and repeated."""

import csv
import math
import subprocess
from functools import cache

import torch


def read(path):
    """All rows, as text; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, restval=""))


def append(path, fields, row):
    """Add a row; numbers with a fraction to six digits, those that are not finite as nothing."""
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow({name: _cell(value) for name, value in row.items()})


@cache
def commit():
    """Of the package that is measured, with a plus sign where the checkout differs from it."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def _cell(value):
    if not isinstance(value, float | torch.Tensor):
        return value
    return f"{float(value):.6g}" if math.isfinite(value) else ""
