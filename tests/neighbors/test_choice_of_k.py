"""The number of neighbors is doubled while that pays."""

import pytest
import torch

from pyro_nngp.neighbors.choice_of_k import NeighborTrial, rows_to_try


@pytest.mark.parametrize(
    ("gains", "first", "most", "want", "tried"),
    [
        ({32: 5.0, 64: 4.0, 128: 3.995}, 32, 512, 64, [32, 64, 128]),  # the last doubling gains too little
        ({32: 5.0, 64: 4.0, 100: 3.0}, 32, 100, 100, [32, 64, 100]),  # the last step is cut to the most
        ({32: 5.0, 64: 4.99}, 32, 512, 64, [32, 64, 128]),  # a gain of exactly what is worthwhile counts
        ({32: 5.0, 64: 6.0}, 32, 512, 32, [32, 64]),
        ({}, 40, 40, 40, []),
        ({}, 40, 16, 40, []),  # no score is computed where there is no choice
    ],
)
def test_doubling_ends_with_the_last_one_that_pays(gains, first, most, want, tried):
    asked = []

    def scores(near):
        asked.append(near.shape[1])
        return torch.full((2,), gains.get(near.shape[1], 4.99), dtype=torch.float64)

    trial = NeighborTrial(torch.arange(2), torch.zeros(2, most, dtype=torch.int64))
    assert trial.choose_k(scores, first, 5.0 - 4.99) == want
    assert asked == tried


def test_the_answer_is_kept_until_a_score_changes():
    trial, asked, scale = NeighborTrial(torch.arange(2), torch.zeros(2, 64, dtype=torch.int64)), [], [1.0]

    def scores(near):
        asked.append(near.shape[1])
        return torch.full((2,), -scale[0] * near.shape[1])

    assert [trial.choose_k(scores, 16, 20.0) for _ in range(2)] == [16, 16]
    assert asked == [16, 32, 16]  # the second call computes the first score alone
    scale[0] = 2.0
    assert trial.choose_k(scores, 16, 20.0) == 64
    assert trial.choose_k(scores, 16, 1e3) == 16  # as does another threshold


@pytest.mark.parametrize(("num_points", "count"), [(1, 1), (10, 10), (64, 64), (1000, 64)])
def test_rows_are_distinct_and_spread_from_the_first_to_the_last(num_points, count):
    rows = rows_to_try(num_points, torch.device("cpu"))
    assert len(rows) == count == len(rows.unique())
    assert (int(rows.min()), int(rows.max())) == (0, num_points - 1)
    assert rows.diff().max() <= -(-num_points // count) + 1 if count > 1 else True
