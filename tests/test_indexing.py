"""Values at row numbers, repeats in sorted vectors, and distinct numbers."""

import numpy as np
import pytest
import torch
from builders import normal

from pyro_nngp._indexing import distinct, repeats, values_at


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_values_are_those_of_indexing(batch, shape):
    values, numbers = normal(*batch, 9), torch.randint(9, shape)
    assert torch.equal(values_at(values, numbers), values[..., numbers])


def test_padding_takes_any_value_but_changes_no_other():
    values = normal(5)
    assert torch.equal(values_at(values, torch.tensor([[3, -1], [-1, 0]]))[[0, 1], [0, 1]], values[[3, 0]])


def test_repeats_follow_an_equal_entry():
    rows = torch.tensor([[-1, -1, 2, 3], [0, 4, 4, 4]])
    assert repeats(rows).tolist() == [[False, True, False, False], [False, False, True, True]]


@pytest.mark.parametrize("values", [[], [4], [3, 1, 3, 2**40, -1, 1, 3]])
def test_distinct_numbers_are_in_order(values):
    values = np.array(values, np.int64)
    found = distinct(values)
    np.testing.assert_array_equal(found, sorted(set(values.tolist())))
    assert found.dtype == np.int64
