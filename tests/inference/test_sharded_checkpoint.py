"""Checkpoints in folders: damage is found on all processes before anything is unpickled."""

import errno
import os
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from pyro_nngp.distributed import ShardedData
from pyro_nngp.inference import CheckpointError, fit, sharded_checkpoint
from pyro_nngp.inference.sharded_checkpoint import ShardedCheckpoint
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import Vecchia
from tests.oracles.processes import files_of_at_most, on_processes

N = 60
X = torch.rand(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DAMAGED = "to have the digest that it was written with, got another one: the file is damaged"


def data():
    return ShardedData(X, X[:, 0])


def folder(path):
    return ShardedCheckpoint(path, data())


def save(checkpoint):
    checkpoint.save({"step": torch.tensor(3)}, {"seed": 1}, {"mean": X[data().rows, 0]})


def damages(files):
    """Every file with 20 single-bit flips, cut, emptied, as garbage, and deleted."""
    rng = random.Random(0)
    for file in files:
        good = file.read_bytes()
        for _ in range(20):
            flipped = bytearray(good)
            flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
            yield file, bytes(flipped)
        for other in (good[:-1], b"", rng.randbytes(len(good)), b"cos\nsystem\n(S'false'\ntR."):
            yield file, other
        file.unlink()
        yield file, None
        file.write_bytes(good)


def test_every_damage_is_found_before_anything_is_unpickled(tmp_path, monkeypatch):
    save(folder(tmp_path))
    shared, local, rows = folder(tmp_path).load({})
    assert (shared["step"], local["seed"]) == (3, 1)
    assert torch.equal(rows["mean"], X[data().rows, 0])
    monkeypatch.setattr(dcp.FileSystemReader, "read_metadata", lambda self: pytest.fail("unpickled"))
    files = [tmp_path / "000000" / name for name in (".metadata", "__0_0.distcp", "digests.pt")]
    assert sorted(files) == sorted(files[0].parent.iterdir())
    for file, content in damages(files):
        if content is None:
            assert folder(tmp_path).exists() == (file.name != "digests.pt")  # as if its writer had been killed
            if file.name == "digests.pt":
                continue
        else:
            file.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{DAMAGED}|to be a checkpoint of this version of the package"):
            folder(tmp_path).load({})


def test_a_folder_of_other_things_is_refused(tmp_path):
    for name in ("notes.txt", "2024", "000007/photo.jpg"):
        file = tmp_path / name.split(".")[0].replace("/", "-") / name
        file.parent.mkdir(parents=True)
        file.write_text("mine")
        path = file.parent.parent if "/" in name else file.parent
        with pytest.raises(CheckpointError, match="fit: expected checkpoint to be a folder of checkpoints alone"):
            folder(path)
        assert file.read_text() == "mine"
    with pytest.raises(CheckpointError, match="to be a folder of checkpoints alone"):
        folder(file)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    def full(path, state):
        raise OSError(errno.ENOSPC, "No space left on device")

    save(folder(tmp_path))
    for context, cause in ((files_of_at_most(200), "File too large"), (monkeypatch.context(), "No space left")):
        with context as patch:
            if patch is not None:
                patch.setattr(sharded_checkpoint, "save_checkpoint", full)
            message = f"expected a checkpoint to be written by all processes, got .*{cause}.*with space left"
            with pytest.raises(CheckpointError, match=message):
                save(folder(tmp_path))
        assert folder(tmp_path).load({})[0]["step"] == 3


def trained(path):
    gp = Vecchia(data(), kernel=Matern52(2, 1.0, 0.3), likelihood=Gaussian(0.1), num_neighbors=4)
    fit(gp, 3, batch_size=N, refresh_every=0, checkpoint=path, progress=False)
    return gp


def refused(path, name):
    trained(path)
    dist.barrier()
    file = next(path.glob(f"*/{name}"))
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises(CheckpointError, match=rf"{os.path.basename(file)} {DAMAGED}"):
        trained(path)
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_all_processes_refuse_damage_to_one_file(name, tmp_path):
    (tmp_path / "group").mkdir()
    on_processes(2, tmp_path / "group", refused, tmp_path / "run", name)
