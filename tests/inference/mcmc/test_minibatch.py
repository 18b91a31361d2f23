"""Minibatches in the arguments of a run."""

import pickle

import pytest
import torch

from pyro_nngp.inference import Minibatch


@pytest.mark.parametrize("batch_size", [3, 7])
def test_minibatches_are_uniform_without_replacement(batch_size):
    draws = 4000
    counts, pairs = torch.zeros(9), 0
    for _ in range(draws):
        idx = Minibatch(9, batch_size).draw()
        assert idx.dtype == torch.int64
        assert len(set(idx.tolist())) == batch_size
        counts[idx] += 1
        pairs += int({0, 8} <= set(idx.tolist()))
    p, pair = batch_size / 9, batch_size * (batch_size - 1) / 72
    assert ((counts / draws - p).abs() < 6 * (p * (1 - p) / draws) ** 0.5).all()
    assert abs(pairs / draws - pair) < 6 * (pair * (1 - pair) / draws) ** 0.5


def test_minibatch_of_a_trillion_rows_is_cheap_and_of_all_rows_is_the_range():
    assert len(Minibatch(10**12, 5).draw()) == 5
    torch.testing.assert_close(Minibatch(6, 6).draw(), torch.arange(6))
    assert pickle.loads(pickle.dumps(Minibatch(6, 2))).batch_size == 2


@pytest.mark.parametrize("batch_size", [0, 7])
def test_minibatch_checks_its_size(batch_size):
    with pytest.raises(ValueError, match=r"Minibatch: expected batch_size in 1..6"):
        Minibatch(6, batch_size)
