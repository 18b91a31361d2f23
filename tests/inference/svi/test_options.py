"""Values of the groups of arguments are checked."""

import math

import pytest

from pyro_nngp.inference import (
    Checkpoint,
    Schedule,
    Validation,
)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Schedule(clip_norm=-1), r"Schedule: expected clip_norm to be finite and > 0, got -1"),
        (lambda: Schedule(clip_norm=math.nan), r"expected clip_norm to be finite and > 0, got nan"),
        (lambda: Schedule(local_lr=0), r"expected local_lr to be finite and > 0, got 0"),
        (lambda: Schedule(decay=-1), r"expected decay to be finite and > 0 and <= 1, got -1"),
        (lambda: Schedule(decay=1.5), r"expected decay to be finite and > 0 and <= 1, got 1.5"),
        (lambda: Schedule(milestones=(0.5, 1.5)), r"expected milestones to be in \(0, 1\), got \(0.5, 1.5\)"),
        (lambda: Checkpoint("run.pt", 0), r"Checkpoint: expected every >= 1, got 0"),
        (lambda: Validation(3), r"Validation: expected score to be callable, got int"),
        (lambda: Validation(float, 2.5), r"Validation: expected every to be an int, got 2.5"),
        (lambda: Validation(float, 1, True), r"Validation: expected patience to be an int, got True"),
    ],
)
def test_wrong_groups_of_settings(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()
