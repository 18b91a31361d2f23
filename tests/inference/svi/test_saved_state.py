"""Checkpoints of other runs are refused."""

import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from training import BY_GRADIENTS, SETTINGS, Line, N, vnngp

from pyro_nngp.inference import (
    CheckpointError,
    fit,
)
from pyro_nngp.inference.checkpoint import load_checkpoint


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    fit(vnngp(), 3, checkpoint=path, **SETTINGS)
    with pytest.raises(CheckpointError, match=r"a checkpoint of this run, got one with num_steps = 3 and not 2\. Name"):
        fit(vnngp(), 2, checkpoint=path, **SETTINGS)
    with pytest.raises(CheckpointError, match=r"got one with seed = 0 and not 1\. Name another file"):
        fit(vnngp(), 4, checkpoint=path, seed=1, **SETTINGS)
    with pytest.raises(CheckpointError, match=r"with solve_every = None and not 0, solving = True and not False"):
        fit(vnngp(), 3, checkpoint=path, solve_every=0, **SETTINGS)
    with pytest.raises(CheckpointError, match=r"got one with .*model = .*VNNGP and not .*Line"):
        fit(Line(), 3, checkpoint=path, **SETTINGS)


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    one, other = vnngp(), vnngp()
    other.y.neg_()
    fit(one, 2, checkpoint=tmp_path / "run.pt", progress=False)
    with pytest.raises(CheckpointError, match="expected a checkpoint of this run"):
        fit(other, 2, checkpoint=tmp_path / "run.pt", progress=False)
    assert not torch.equal(other.y, one.y)


def test_a_pair_is_guarded_and_saved_like_its_method(tmp_path):
    settings = {"num_data": N, "checkpoint": tmp_path / "run.pt"} | BY_GRADIENTS
    one, other = vnngp(), vnngp()
    fit((one.model, one.guide), 2, **settings)
    assert len(load_checkpoint(tmp_path / "run.pt")["run"]["values"]["modules"]) == 1
    other.y.neg_()
    with pytest.raises(CheckpointError, match="expected a checkpoint of this run"):
        fit((other.model, AutoNormal(other.model)), 2, **settings)
    with pytest.raises(CheckpointError, match="expected a checkpoint of this run"):
        fit((other.model, other.guide), 2, **settings)
