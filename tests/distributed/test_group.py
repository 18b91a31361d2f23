"""Joining the processes that torchrun started, also after a restart."""

import os
import subprocess
import sys

import pytest

from pyro_nngp.distributed import join_group
from tests.oracles.processes import on_processes

# After the restart the second process comes late, so that the first finds what the dead ones left in the store.
SCRIPT = """
import os, sys, time
from datetime import timedelta
from pyro_nngp.distributed import join_group

restarts, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
time.sleep(3 * restarts * rank)
world = join_group(timeout=timedelta(seconds=20))
if restarts == 0:
    world.barrier()
    os._exit(1)
print("joined", world.max(rank + 1), "of", world.size, flush=True)
"""


def test_plain_python_is_one_process():
    world = join_group()
    assert (world.rank, world.size) == (0, 1)


def join_again():
    with pytest.raises(RuntimeError, match="join_group: expected the process to be in no group, got one in a group"):
        join_group()
    return {}


@pytest.mark.slow
def test_a_process_joins_once(tmp_path):
    on_processes(2, tmp_path, join_again)


@pytest.mark.slow
def test_a_restarted_process_does_not_wait_for_dead_ones(tmp_path):
    (tmp_path / "run.py").write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "run.py"]
    command, env = [sys.executable, "-W", "ignore", *launch], os.environ | {"PYTHONPATH": ""}
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("joined 2 of 2") == 2
