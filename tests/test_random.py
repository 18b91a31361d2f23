"""Random numbers that belong to rows."""

import torch

from pyro_nngp._random import normal_by_row


def test_numbers_follow_their_rows():
    every = normal_by_row(torch.arange(1000), 3, seed=4)
    rows = torch.tensor([7, 999, 0])
    assert torch.equal(normal_by_row(rows, 3, seed=4), every[:, rows])
    assert torch.equal(normal_by_row(rows, 2, seed=4), every[:2, rows])
    assert not (normal_by_row(rows, 3, seed=5) == every[:, rows]).any()


def test_numbers_are_normal_and_independent():
    n = 200_000
    z = torch.cat([normal_by_row(torch.arange(n), 4, seed) for seed in (0, 1)])
    moments = torch.stack([z.mean(-1), (z.square().mean(-1) - 1) / 2**0.5, (z**4).mean(-1) / 96**0.5 - 3 / 96**0.5])
    assert moments.abs().max() < 6 / n**0.5
    between = torch.corrcoef(z).fill_diagonal_(0.0)
    assert between.abs().max() < 6 / n**0.5
    assert (z[:, 1:] * z[:, :-1]).mean(-1).abs().max() < 6 / n**0.5
