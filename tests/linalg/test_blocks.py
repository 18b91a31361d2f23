"""Results that are computed in blocks of rows."""

import pytest
import torch

from pyro_nngp._memory import block_limit
from pyro_nngp.linalg import blocks


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("row_entries", "sizes"), [(30, [3, 3, 3, 1]), (1000, [1] * 10), (5, [10])])
def test_results_come_in_blocks_that_hold_no_more_than_they_may(row_entries, sizes, gradients, dim):
    x, taken = torch.randn(10, 2, requires_grad=gradients), []

    def compute(part):
        taken.append(len(x[part]))
        return (x[part] ** 2).movedim(0, dim), x[part].sum(-1).double()

    with block_limit(100):
        square, total = blocks.in_blocks(compute, 10, row_entries, dim)
    assert taken == sizes
    assert torch.equal(square, (x**2).movedim(0, dim))
    assert torch.equal(total, x.sum(-1).double())
    assert square.requires_grad == total.requires_grad == gradients
    if gradients:
        square.sum().backward()
        assert torch.equal(x.grad, 2 * x.detach())
