"""Results as rows of a CSV file, to which the benchmarks add one per run, so that they can be stopped and repeated.

Beside them, environments.json says with which processor and versions the rows of each commit were measured.
"""

import csv
import json
import math
import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

MEASURED_WITH = ("torch", "pyro-ppl", "numpy", "scipy", "faiss-cpu", "faiss-gpu")


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
        writer.writerow({name: cell(value) for name, value in row.items()})
    record(path.with_name("environments.json"))


def record(path):
    """Add the present commit to the commits of the environment of this process."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    known = [each for each in found if each["environment"] == environment()]
    if not known:
        known = [{"environment": environment(), "commits": []}]
        found += known
    if commit() not in known[0]["commits"]:
        known[0]["commits"] = sorted([*known[0]["commits"], commit()])
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@cache
def environment():
    """Processor, cores, threads and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = {"processor": names[0] if names else platform.processor(), "cores": os.cpu_count()}
    found |= {"threads": torch.get_num_threads(), "python": platform.python_version(), "system": platform.system()}
    for name in MEASURED_WITH:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@cache
def commit():
    """Of the package that is measured, with a plus sign where the checkout differs from it."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def cell(value):
    """How `append` writes a value."""
    if not isinstance(value, float | torch.Tensor):
        return value
    return f"{float(value):.6g}" if math.isfinite(value) else ""
