"""Checkpoints: damage is found before anything is loaded, one writer at a time, crashes keep the old file."""

import hashlib
import io
import os
import pickle
import random
import signal
import threading
import time

import pytest
import torch

from pyro_nngp.inference import CheckpointError, fit
from pyro_nngp.inference.checkpoint import check_schema, exclusive_checkpoint, load_checkpoint, save_checkpoint
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import SVGP
from tests.oracles.processes import files_of_at_most

STATE = {"a": torch.arange(6.0).view(2, 3), "b": [1, (2.5, "x"), None, True], "c": {"d": torch.tensor(7)}}
X = torch.rand(20, 1, generator=torch.Generator().manual_seed(0))
SETTINGS = {"batch_size": 8, "progress": False}


def gp():
    return SVGP(X, torch.sin(5 * X[:, 0]), Matern52(1, 1.0, 0.5), Gaussian(0.1), inducing=4)


def test_a_state_comes_back(tmp_path):
    save_checkpoint(tmp_path / "a.pt", STATE)
    state = load_checkpoint(tmp_path / "a.pt")
    assert torch.equal(state["a"], STATE["a"])
    assert state["b"] == STATE["b"]
    assert state["c"]["d"] == 7
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_full_disk_is_named(tmp_path):
    message = "writing: expected .*a.pt to be on a disk that can be written, with space left, got File too large. Free"
    for number in (3, 100_000):  # written at the end, and before
        with files_of_at_most(1000), pytest.raises(OSError, match=message):
            save_checkpoint(tmp_path / "a.pt", {"a": torch.zeros(number)})
    assert os.listdir(tmp_path) == []


def damaged(good):
    """200 single-bit flips, 100 truncations, 100 runs of garbage, and other files."""
    rng = random.Random(0)
    for _ in range(200):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield bytes(data)
    for _ in range(100):
        yield good[: rng.randrange(len(good))]
        data, start = bytearray(good), rng.randrange(len(good) - 100)
        data[start : start + 100] = rng.randbytes(100)
        yield bytes(data)
    yield from (b"", b"\0", good + b"\0", good[1:], b"PK\x03\x04", good[: len(good) // 2] * 2, rng.randbytes(5000))


def test_every_damage_is_found_before_anything_is_loaded(tmp_path):
    path = tmp_path / "run.pt"
    fit(gp(), 2, checkpoint=path, **SETTINGS)
    good = path.read_bytes()
    for data in damaged(good):
        path.write_bytes(data)
        with pytest.raises(
            CheckpointError, match=r"load_checkpoint: expected .*run\.pt to (be a checkpoint|have the dig)"
        ):
            load_checkpoint(path)
    untouched = gp()
    before = [p.clone() for p in untouched.parameters()]
    with pytest.raises(CheckpointError, match=r"Delete it, or name another path"):
        fit(untouched, 4, checkpoint=path, **SETTINGS)
    assert all(torch.equal(p, q) for p, q in zip(before, untouched.parameters(), strict=True))


def changed(state, *keys, value):
    """Change an entry of nested containers in place."""
    *path, last = keys
    for key in path:
        state = state[key]
    if value is KeyError:
        del state[last]
    else:
        state[last] = value


NAN = float("nan")
WRONG = {
    "no run": (("run",), KeyError),
    "no scores": (("scores",), KeyError),
    "a run that is a list": (("run",), [1]),
    "no kind": (("run", "kind"), KeyError),
    "no step": (("run", "step"), KeyError),
    "a negative step": (("run", "step"), -5),
    "a late step": (("run", "step"), 10**9),
    "a step that is a float": (("run", "step"), 2.0),
    "a step that is NaN": (("run", "step"), NAN),
    "too few losses": (("run", "losses"), torch.zeros(1, dtype=torch.float64)),
    "losses that are a list": (("run", "losses"), [0.0, 0.0]),
    "a shape that would broadcast": (("run", "values", "params", "mean.value"), torch.zeros(1)),
    "another dtype": (("run", "values", "params", "mean.value"), torch.zeros((), dtype=torch.float64)),
    "no parameter": (("run", "values", "params", "mean.value"), KeyError),
    "no buffer": (("run", "values", "modules", 0, "x"), KeyError),
    "no optimizer": (("run", "optimizers"), []),
    "a group without its rate": (("run", "optimizers", 0, "param_groups", 0, "lr"), KeyError),
    "moments of another shape": (("run", "optimizers", 0, "state", 0, "exp_avg"), torch.zeros(3, 3)),
    "no moments": (("run", "optimizers", 0, "state", 0, "exp_avg_sq"), KeyError),
    "moments of no parameter": (("run", "optimizers", 0, "state", 99), {"step": 1}),
    "no schedule": (("run", "schedules"), KeyError),
    "a position beyond the data": (("run", "batches", "position"), 21),
    "a position that is text": (("run", "batches", "position"), "1"),
    "a short random state": (("run", "random"), torch.zeros(3, dtype=torch.uint8)),
    "a random state that is none": (("run", "batches", "now"), torch.zeros(5056, dtype=torch.uint8)),
    "scores that are no pairs": (("scores",), [3]),
    "a best state of another model": (("best",), {"params": {}}),
}


def test_a_step_beyond_the_run_is_refused(tmp_path):
    fit(gp(), 2, checkpoint=tmp_path / "run.pt", **SETTINGS)
    state = load_checkpoint(tmp_path / "run.pt")
    state["run"] |= {"step": 3, "losses": torch.zeros(3, dtype=torch.float64)}
    save_checkpoint(tmp_path / "run.pt", state)
    with pytest.raises(CheckpointError, match=r"fit: expected checkpoint\['run'\]\['step'\] in 0\.\.2, got 3\. Delete"):
        fit(gp(), 4, checkpoint=tmp_path / "run.pt", **SETTINGS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The file of a short run."""
    path = tmp_path_factory.mktemp("run") / "run.pt"
    fit(gp(), 2, checkpoint=path, **SETTINGS)
    return path


@pytest.mark.parametrize("name", WRONG)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_loaded(checkpoint, tmp_path, name):
    path = tmp_path / "run.pt"
    state = load_checkpoint(checkpoint)
    keys, value = WRONG[name]
    changed(state, *keys, value=value)
    save_checkpoint(path, state)
    untouched = gp()
    before = [p.clone() for p in untouched.parameters()]
    with pytest.raises(CheckpointError, match=r"^fit: expected checkpoint.* to|^fit: expected checkpoint.* (in|of) "):
        fit(untouched, 4, checkpoint=path, **SETTINGS)
    assert all(torch.equal(p, q) for p, q in zip(before, untouched.parameters(), strict=True))


def test_schemas():
    check_schema(
        "fit",
        {"a": torch.ones(2), "n": 3, "any": "x", "open": {"z": 1}},
        {
            "a": torch.zeros(2),
            "n": 1.0,
            "any": None,
            "open": {},
        },
    )
    with pytest.raises(
        CheckpointError, match=r"expected checkpoint\['a'\]\[1\] to be a tensor of shape \(2,\) and .*, got"
    ):
        check_schema("fit", {"a": [1, torch.ones(3)]}, {"a": [1, torch.ones(2)]})
    with pytest.raises(CheckpointError, match=r"expected there to be a dict with keys \['a'\], got a list of length 0"):
        check_schema("fit", [], {"a": 1}, "there")
    with pytest.raises(CheckpointError, match=r"to be of type int, got of type bool"):
        check_schema("fit", True, 1)
    with pytest.raises(CheckpointError, match=r"to be of type str, got of type int"):
        check_schema("fit", 1, "x")


class Hostile:
    def __reduce__(self):
        return (os.system, ("touch pwned",))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_hostile_checkpoint_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"run": Hostile()}, "hostile.pt")
    with open("plain.pt", "wb") as file:
        pickle.dump(Hostile(), file)
    save_checkpoint("digested.pt", {"run": Hostile()})
    for name in ("hostile.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match=r"to be a checkpoint of this version of the package"):
            load_checkpoint(name)
    with pytest.raises(CheckpointError, match=r"weights_only=True\) refuses \(UnpicklingError\)"):
        load_checkpoint("digested.pt")
    assert not os.path.exists("pwned")


def test_other_things_than_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="to be a file, got something else"):
            load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.pt")
    content = io.BytesIO()
    torch.save([1], content)
    digest = hashlib.blake2b(content.getvalue(), digest_size=32).hexdigest()
    (tmp_path / "list.pt").write_bytes(f"pyro_nngp checkpoint 2\n{digest}\n".encode() + content.getvalue())
    with pytest.raises(CheckpointError, match=r"to hold a dict, got list"):
        load_checkpoint(tmp_path / "list.pt")


def test_a_crash_while_saving_keeps_the_old_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError("disk full")

    path = tmp_path / "a.pt"
    save_checkpoint(path, {"step": 1})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(path, {"step": 2})
    assert load_checkpoint(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_file_and_folder_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}")))
    save_checkpoint(tmp_path / "a.pt", {"step": 1})
    file, folder = synced
    assert os.path.basename(file).startswith("a.pt.")
    assert folder == os.path.realpath(tmp_path)


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 16)
    (tmp_path / f"a.pt.{'0' * 16}.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        save_checkpoint(tmp_path / "a.pt", {"step": 1})
    (tmp_path / "a.pt.lock").symlink_to(victim)
    with (
        pytest.raises(
            CheckpointError, match=r"SGMCMC: expected checkpoint to have a lock .*a\.pt\.lock that can be wri"
        ),
        exclusive_checkpoint("SGMCMC", tmp_path / "a.pt"),
    ):
        pass
    assert victim.read_text() == "precious"


def test_many_writers_of_one_file_leave_a_whole_one(tmp_path):
    path = tmp_path / "a.pt"
    threads = [
        threading.Thread(target=lambda i=i: [save_checkpoint(path, {"i": torch.full((500,), i)}) for _ in range(10)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(load_checkpoint(path)["i"].unique()) == 1
    assert os.listdir(tmp_path) == ["a.pt"]


def hold(path):
    """Fork a process that holds a checkpoint until it is killed; returns its number."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with exclusive_checkpoint("fit", path):
            os.write(write, b"held")
            while True:
                time.sleep(60)
    assert os.read(read, 4) == b"held"
    os.close(read)
    os.close(write)
    return child


def test_a_second_run_on_one_file_names_the_first_until_it_dies(tmp_path):
    path = tmp_path / "a.pt"
    first = hold(path)
    try:
        with pytest.raises(CheckpointError, match=rf"written by this run alone, got process {first} on .*Wait for it"):
            fit(gp(), 2, checkpoint=path, **SETTINGS)
        (tmp_path / f"a.pt.{'0' * 16}.part").write_text("unfinished")
        (tmp_path / "a.pt.mine.part").write_text("another's")
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    fit(gp(), 2, checkpoint=path, **SETTINGS)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "a.pt.mine.part"]
    with exclusive_checkpoint("fit", path), pytest.raises(CheckpointError, match=f"got process {os.getpid()} on"):
        fit(gp(), 4, checkpoint=path, **SETTINGS)


def test_the_folder_must_exist(tmp_path):
    with pytest.raises(ValueError, match=r"fit: expected checkpoint in a folder that exists, got .*none/a\.pt"):
        fit(gp(), 2, checkpoint=tmp_path / "none" / "a.pt", **SETTINGS)
