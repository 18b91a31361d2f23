"""Malformed arguments at every entrance end in an error of the package: no silence, no crash, no hang, few others."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_malformed_arguments_end_in_errors_of_the_package():
    script = Path(__file__).resolve().parents[1] / ".ci" / "fuzz"
    found = subprocess.run([sys.executable, script, "1", "0"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
