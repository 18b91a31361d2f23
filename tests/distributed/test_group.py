"""Joining the processes that torchrun started, also after a restart."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from pyro_nngp import distributed
from pyro_nngp.distributed import ShardedData, World, join_group
from pyro_nngp.inference import fit
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import VNNGP
from tests.builders import surface
from tests.oracles.pretended_device import DEVICE, pretended_device
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


def on_a_device(name):
    """A collective that takes tensors of the pretended device alone, as NCCL takes those of a GPU."""
    collective = getattr(dist, name)

    def unwrapped(value):
        if isinstance(value, list):
            return [unwrapped(part) for part in value]
        if not isinstance(value, torch.Tensor):
            return value
        assert value.device == DEVICE, f"{name}: {value.device}"
        assert value.is_contiguous()
        return value.here

    return lambda *args: collective(*map(unwrapped, args))


def trained(pretended, monkeypatch):
    x, y, new = surface(Gaussian)
    with pretended_device():
        if pretended:
            monkeypatch.setattr(distributed.world, "group_device", lambda: DEVICE)
            for name in ("all_reduce", "all_gather", "all_to_all_single"):
                monkeypatch.setattr(dist, name, on_a_device(name))
        gp = VNNGP(ShardedData(x, y), num_neighbors=8, likelihood=Gaussian())
        losses = fit(gp, 4, batch_size=300, refresh_every=2, progress=False).losses
        traffic = World().max(len(gp.shard.world.traffic))
        return {"losses": losses, "mean": gp(new)[0].detach(), "traffic": torch.tensor(traffic)}


@pytest.mark.slow
def test_collectives_get_tensors_on_the_device_of_the_group(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    expected = on_processes(2, tmp_path / "here", trained, False, monkeypatch)[0]
    assert expected["traffic"] == 4
    for found in on_processes(2, tmp_path / "there", trained, True, monkeypatch):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
