"""The number of neighbors is doubled while that pays."""

import pytest
import torch

from pyro_nngp.neighbors.numbers import enough_neighbors, rows_to_try


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

    def score(k):
        asked.append(k)
        return gains.get(k, 4.99)

    assert enough_neighbors(score, first, most, 5.0 - 4.99) == want
    assert asked == tried


@pytest.mark.parametrize(("num_points", "count"), [(1, 1), (10, 10), (64, 64), (1000, 64)])
def test_rows_are_distinct_and_spread_from_the_first_to_the_last(num_points, count):
    rows = rows_to_try(num_points, torch.device("cpu"))
    assert len(rows) == count == len(rows.unique())
    assert (int(rows.min()), int(rows.max())) == (0, num_points - 1)
    assert rows.diff().max() <= -(-num_points // count) + 1 if count > 1 else True
