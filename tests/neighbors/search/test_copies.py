"""Points that coincide."""

import numpy as np
import torch

from pyro_nngp.neighbors.search.copies import earlier_copies


def test_copies_are_counted_from_the_first():
    points = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, -0.0], [2.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert earlier_copies(points).tolist() == [0, 0, 1, 0, 2]


def test_different_points_with_one_hash_are_no_copies():
    one = np.random.default_rng(0).random(3)
    factor, shift, ones = 0x9E3779B97F4A7C15, np.uint64(32), 2**64 - 1

    def first_step(value):
        code = np.uint64(int(np.float64(value).view(np.uint64)) * factor & ones)
        return code ^ code >> shift

    other = one.copy()
    other[0] = 0.5
    twin = first_step(one[0]) ^ one[1].view(np.uint64) ^ first_step(other[0])
    other[1] = twin.view(np.float64)

    def stacked(rows):
        return torch.from_numpy(np.stack(rows))

    assert earlier_copies(stacked([one, one])).tolist() == [0, 1]
    assert earlier_copies(stacked([one, other, other])).tolist() == [0, 0, 1]
