"""Solutions front by front: what compiled code refuses; results are compared in tests/linalg/test_multifrontal.py."""

import pytest
import torch
from builders import F64
from oracles.compiled import needs_library

from pyro_nngp.native import fronts

pytestmark = needs_library


def given():
    """Two points and then one: L11 L11' = I, and Y' of ones."""
    blocks = torch.cat([torch.eye(2, dtype=F64).flatten(), torch.ones(3, dtype=F64)])
    sizes, widths = torch.tensor([2, 1]), torch.tensor([1, 0])
    return {"sizes": sizes, "widths": widths, "borders": torch.tensor([2]), "blocks": blocks, "right": torch.ones(3, 1)}


@pytest.mark.parametrize("num_right", [1, 2])
def test_right_hand_sides_are_left_alone(num_right):
    arguments = given() | {"right": torch.ones(3, num_right, dtype=F64)}
    assert torch.equal(fronts.solve(**arguments)[:, -1], torch.tensor([2.0, 2.0, -1.0], dtype=F64))
    assert (arguments["right"] == 1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"solve_fronts: expected right of dtype torch.float64, got torch.float32"),
        ({"right": torch.ones(3)}, r"expected right and sizes with 2 and 1 dimensions, got 1, 1"),
        ({"right": torch.ones(4, 1)}, r"expected right of 3 rows, got 4"),
        ({"borders": torch.tensor([2, 2])}, r"expected borders of 1 rows, got 2"),
        ({"borders": torch.tensor([2.0])}, r"expected borders of dtype torch.int64"),
        ({"widths": torch.tensor([1])}, r"expected widths of shape \(2,\), got \(1,\)"),
        ({"sizes": torch.tensor([4, -1])}, r"expected sizes and widths >= 0"),
        ({"blocks": torch.ones(6, dtype=F64)}, r"expected blocks of shape \(7,\), got \(6,\)"),
        ({"borders": torch.tensor([3]), "right": torch.ones(3, 1, dtype=F64)}, r"expected borders after their node"),
        ({"borders": torch.tensor([1]), "right": torch.ones(3, 1, dtype=F64)}, r"expected borders after their node"),
        ({"borders": torch.tensor([-1]), "right": torch.ones(3, 1, dtype=F64)}, r"expected borders after their node"),
    ],
)
def test_memory_that_does_not_fit_is_refused(change, message):
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        fronts.solve(**(given() | change))
