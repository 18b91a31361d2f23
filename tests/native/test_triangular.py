"""The compiled substitution: what it refuses; its results are compared in tests/linalg/test_sparse_triangular.py."""

import pytest
import torch
from oracles.compiled import needs_library

from pyro_nngp.native import triangular

pytestmark = needs_library


def given():
    return {
        "w": torch.ones(2, 3, 2),
        "neighbors": torch.tensor([[-1, -1], [0, -1], [1, 0]]),
        "right": torch.ones(2, 3, 4),
        "order": torch.arange(3),
        "transposed": False,
    }


def test_right_hand_sides_are_left_alone():
    arguments = given()
    assert torch.equal(triangular.solve(**arguments), torch.tensor([1.0, 2.0, 4.0])[:, None].expand(2, 3, 4))
    assert torch.equal(arguments["right"], torch.ones(2, 3, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.ones(2, 3, 3)}, r"solve_triangular: expected w of shape \(2, 3, 2\), got \(2, 3, 3\)"),
        ({"w": torch.ones(2, 3, 2).double()}, r"expected w of dtype torch.float32, got torch.float64"),
        ({"order": torch.arange(4)}, r"expected order of shape \(3,\), got \(4,\)"),
        ({"right": torch.ones(2, 2, 4)}, r"expected u of shape \(2, 3, 4\), got \(2, 2, 4\)"),
        ({"right": torch.ones(3, 4)}, r"expected right with 3 dimensions, got 2"),
        ({"right": torch.ones(2, 3, 4).int()}, r"expected right of dtype torch.float32 or torch.float64"),
        ({"neighbors": torch.zeros(3, 2)}, r"expected neighbors of dtype torch.int64"),
        ({"neighbors": torch.full((3, 2), 3)}, r"expected neighbors and order below the number of rows, 3"),
        ({"neighbors": torch.full((3, 2), 2**40)}, r"expected neighbors and order below the number of rows, 3"),
        ({"order": torch.tensor([0, 1, -1])}, r"expected neighbors and order below the number of rows, 3"),
        ({"order": torch.tensor([0, 1, 3])}, r"expected neighbors and order below the number of rows, 3"),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_memory_that_does_not_fit_is_refused(change, message, transposed):
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        triangular.solve(**(given() | {"transposed": transposed} | change))
