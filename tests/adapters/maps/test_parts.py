"""Maps that are interrupted and continued."""

import copy
import errno
import os
import random

import pytest
import xarray as xr

from pyro_nngp.adapters.maps import predict_grid
from pyro_nngp.inference import CheckpointError
from pyro_nngp.inference.checkpoint import exclusive_checkpoint
from tests.oracles.processes import files_of_at_most


def test_an_interrupted_map_is_continued(gp, axes, tmp_path, small_tiles, monkeypatch):
    whole = predict_grid(gp, axes, thresholds=[0.0])
    path, calls = tmp_path / "map.nc", []
    predict = type(gp).predict

    def interrupted(self, x_new, **options):
        calls.append(len(x_new))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return predict(self, x_new, **options)

    monkeypatch.setattr(type(gp), "predict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        predict_grid(gp, axes, thresholds=[0.0], path=path)
    assert not path.exists()
    found = predict_grid(gp, axes, thresholds=[0.0], path=path)
    assert sum(calls) == 7 * 5 + calls[3]  # each other tile once
    xr.testing.assert_identical(found.load(), whole)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["map.nc"]


@pytest.fixture
def interrupted(gp, axes, tmp_path, small_tiles, monkeypatch):
    """Path of a map of six tiles that was interrupted in the fourth."""
    predict, calls = type(gp).predict, []

    def fails(self, x_new, **options):
        calls.append(len(x_new))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return predict(self, x_new, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(gp), "predict", fails)
        with pytest.raises(KeyboardInterrupt):
            predict_grid(gp, axes, path=tmp_path / "map.nc")
    return tmp_path / "map.nc"


def test_parts_of_another_map_are_refused(gp, axes, tmp_path, interrupted):
    for change in ({"thresholds": [1.0]}, {"seed": 1}, {"of": "f"}):
        with pytest.raises(ValueError, match="to hold parts of the same map, got those of another one"):
            predict_grid(gp, axes, path=tmp_path / "map.nc", **change)
    other = copy.deepcopy(gp)
    other.kernel.lengthscale = 0.31
    with pytest.raises(ValueError, match="to hold parts of the same map, got those of another one"):
        predict_grid(other, axes, path=tmp_path / "map.nc")
    assert predict_grid(gp, axes, path=tmp_path / "map.nc")["mean"].notnull().all()


def test_every_damage_to_a_part_is_found(gp, axes, interrupted):
    rng, folder = random.Random(0), interrupted.with_name("map.nc.part")
    file, other = folder / "000001.tile", folder / "000002.tile"
    good = file.read_bytes()
    for _ in range(30):
        flipped = bytearray(good)
        flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        for content in (bytes(flipped), good[: rng.randrange(len(good))]):
            file.write_bytes(content)
            with pytest.raises(CheckpointError, match=r"000001.tile to (have the digest|be a checkpoint)"):
                predict_grid(gp, axes, path=interrupted)
    file.write_bytes(other.read_bytes())
    with pytest.raises(
        ValueError, match=r"000001.tile to hold parts of the same map, got those of another one or place"
    ):
        predict_grid(gp, axes, path=interrupted)
    file.unlink()
    xr.testing.assert_identical(predict_grid(gp, axes, path=interrupted).load(), predict_grid(gp, axes))


def test_a_kill_at_any_moment_leaves_what_the_next_call_continues(gp, axes, interrupted):
    folder = interrupted.with_name("map.nc.part")
    for file in ("000004.tile.0123456789abcdef.part", "mean.npy"):
        (folder / file).write_bytes(b"half")
    whole = predict_grid(gp, axes)
    xr.testing.assert_identical(predict_grid(gp, axes, path=interrupted).load(), whole)
    folder.mkdir()  # all that a kill after the first instruction leaves
    xr.testing.assert_identical(predict_grid(gp, axes, path=interrupted).load(), whole)
    assert not folder.exists()


def test_other_things_are_refused_and_kept(gp, axes, interrupted, tmp_path):
    for path, file in (
        ("map.zarr", "map.zarr/notes.txt"),
        ("raster.nc", "raster.nc/notes.txt"),
        ("file.zarr", "file.zarr"),
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("mine")
        with pytest.raises(
            ValueError, match="predict_grid: expected path to be a new one, or that of a map to replace"
        ):
            predict_grid(gp, axes, path=tmp_path / path)
        assert (tmp_path / file).read_text() == "mine"
    (tmp_path / "map.nc.part" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"map.nc.part to hold parts of maps alone, got notes.txt"):
        predict_grid(gp, axes, path=interrupted)
    assert (tmp_path / "map.nc.part" / "notes.txt").exists()


def test_two_runs_of_one_map_are_refused(gp, axes, tmp_path):
    with (
        exclusive_checkpoint("predict_grid", tmp_path / "map.nc", "path"),
        pytest.raises(
            CheckpointError, match=f"predict_grid: expected path .*by this run alone, got process {os.getpid()}"
        ),
    ):
        predict_grid(gp, axes, path=tmp_path / "map.nc")


def test_a_full_disk_is_named_and_the_map_continues(gp, axes, tmp_path, monkeypatch):
    path, whole, message = (
        tmp_path / "map.nc",
        predict_grid(gp, axes),
        "to be on a disk that can be written, with space",
    )
    with files_of_at_most(200), pytest.raises(OSError, match=rf"000000.tile {message} left, got File too large"):
        predict_grid(gp, axes, path=path)
    full = OSError(errno.ENOSPC, "full")
    for calls_before in (0, 2):  # the arrays of mean and sd have space, the file has none
        with monkeypatch.context() as patch:
            calls = iter([None] * calls_before)
            patch.setattr(os, "posix_fallocate", lambda *file, calls=calls: next(calls, full) and raises(full))
            with pytest.raises(OSError, match=rf"predict_grid: expected {path} {message} left, got No space left"):
                predict_grid(gp, axes, path=path)
        assert len(list(path.with_name("map.nc.part").glob("*.tile"))) == 2  # the only tile, and draws
    for suffix in (".nc", ".zarr", ".tif"):
        with files_of_at_most(7000), pytest.raises(OSError, match=rf"{message} left, got File too large"):
            predict_grid(gp, axes, path=path.with_suffix(suffix))
        assert not list(tmp_path.glob("*.space"))
    xr.testing.assert_identical(predict_grid(gp, axes, path=path).load(), whole)


def raises(error):
    raise error
