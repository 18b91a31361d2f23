"""Blocks of a dense matrix, beside torch's indexing, and memory that is refused."""

import pytest
import torch
from builders import F64, normal
from oracles.compiled import needs_library

from pyro_nngp.native import blocks

pytestmark = needs_library


def given():
    return {"matrix": normal(5, 5), "places": torch.tensor([[0, 4, 0], [3, 1, 2]]), "blocks": normal(2, 3, 3)}


def test_blocks_are_added_where_they_are_taken():
    arguments = given()
    matrix, places, added = arguments.values()
    one_by_one = matrix.clone()
    for rows, block in zip(places, added, strict=True):
        one_by_one.index_put_((rows[:, None], rows[None]), block, accumulate=True)
    torch.testing.assert_close(blocks.take(matrix, places), matrix[places[:, :, None], places[:, None]], rtol=0, atol=0)
    blocks.add(matrix, places.mT.contiguous().mT, added.mT.contiguous().mT)
    torch.testing.assert_close(matrix, one_by_one, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrix": normal(5, 4)}, r"add: expected matrix of shape \(5, 5\), got \(5, 4\)"),
        ({"matrix": torch.ones(5, 5)}, r"expected matrix of dtype torch.float64, got torch.float32"),
        ({"matrix": normal(5, 5).mT}, r"expected matrix to be contiguous"),
        ({"places": torch.zeros(2, 3, dtype=torch.int32)}, r"expected places of dtype torch.int64"),
        ({"places": torch.zeros(6, dtype=torch.int64)}, r"expected matrix and places with 2 dimensions, got 2, 1"),
        ({"places": torch.tensor([[0, 1, 5], [0, 1, 2]])}, r"expected places in 0\.\.4, got 0\.\.5"),
        ({"places": torch.tensor([[0, 1, -1], [0, 1, 2]])}, r"expected places in 0\.\.4, got -1\.\.2"),
        ({"blocks": normal(2, 3, 2)}, r"expected blocks of shape \(2, 3, 3\), got \(2, 3, 2\)"),
        ({"blocks": torch.zeros(2, 3, 3, dtype=F64, device="meta")}, r"expected blocks to be a dense tensor"),
    ],
)
def test_memory_that_does_not_fit_is_refused(change, message):
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        blocks.add(**(given() | change))
