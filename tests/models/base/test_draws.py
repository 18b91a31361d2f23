"""Posterior draws: how many of each, one at a time or by ``torch.vmap``."""

import pytest
import torch
from torch import nn

from pyro_nngp.models.base.draws import at_each_draw, evenly_spaced


@pytest.mark.parametrize(
    ("total", "rows", "counts"), [(2, [0, 2], [1, 1]), (5, [0, 1, 2], [2, 1, 2]), (3, [0, 1, 2], [1, 1, 1])]
)
def test_draws_are_taken_evenly_and_repeatedly_where_there_are_few(total, rows, counts):
    values = torch.arange(6.0).reshape(3, 2)
    chosen, times = evenly_spaced("here", nn.Module(), {"a": values}, total)
    assert torch.equal(chosen["a"], values[rows])
    assert times == counts


def test_mapped_draws_are_those_one_by_one():
    samples = {"a": torch.randn(7, 3), "b": torch.randn(7)}

    def compute(draw):
        return draw["a"].cumsum(0) * draw["b"], draw["b"].exp()

    one_by_one, mapped = (
        list(at_each_draw("here", nn.Module(), samples, compute, entries)) for entries in (None, 2**21)
    )
    for pair, other in zip(one_by_one, mapped, strict=True):
        for value, same in zip(pair, other, strict=True):
            torch.testing.assert_close(value, same)
