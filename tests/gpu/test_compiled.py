"""The kernels lower to machine code of compute capability 9.0, without a GPU, within its registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyro_nngp.gpu import installed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speed" / "gpu_resources.py"


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="Triton is not installed; torch for CUDA on Linux brings it")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_compile_ahead_of_time_and_spill_little(dtype, tmp_path):
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, "--num-neighbors", "16", "256", "--dtype", dtype]
    surroundings |= {"TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True).stdout
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    assert [(row["kernel"], row["K"]) for row in rows] == [
        (kernel, k) for k in ("16", "256") for kernel in ("conditional", "gradient")
    ]
    for row in rows:
        assert int(row["registers"]) <= 255
        assert int(row["stack"]) <= 1024  # bytes per thread
        assert int(row["programs"]) >= 4  # on a multiprocessor
        assert int(row["FFMA" if dtype == "float32" else "DFMA"]) > 100
