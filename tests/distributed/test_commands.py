"""The commands of docs/howto/cluster.md, with one and two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/cluster.md"


def run(folder, *launch):
    """What the page's script prints."""
    folder.mkdir()
    text = PAGE.read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(# train.py.*?)```", text, re.DOTALL)
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-W", "ignore", *launch, "train.py"]
    env = os.environ | {"PYTHONPATH": ""}
    found = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return eval(re.search(r"\[.*\]", found.stdout)[0])


@pytest.mark.slow
def test_the_script_prints_the_same_under_python_and_torchrun(tmp_path):
    assert "torchrun --nproc-per-node 2 train.py" in PAGE.read_text(encoding="utf-8")
    alone = run(tmp_path / "one")
    both = run(tmp_path / "two", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    np.testing.assert_allclose(both, alone, rtol=1e-6)
    one, two = (xr.open_zarr(tmp_path / name / "map.zarr").load() for name in ("one", "two"))
    xr.testing.assert_allclose(two, one, rtol=1e-5)
