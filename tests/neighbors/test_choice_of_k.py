"""The number of neighbors is doubled while that pays."""

import pytest
import torch

from pyro_nngp._versions import Versions
from pyro_nngp.neighbors.choice_of_k import FOR_F, FOR_Y, NeighborTrial, Rule, itself, loses_density, rows_to_try


def while_it_falls_by(worthwhile, most=512):
    return (Rule(itself, worthwhile, most),)


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
        return (torch.full((2,), gains.get(near.shape[1], 4.99), dtype=torch.float64),)

    trial = NeighborTrial(torch.arange(2), torch.zeros(2, most, dtype=torch.int64))
    assert trial.choose_k(scores, first, while_it_falls_by(5.0 - 4.99)) == want
    assert asked == tried


def test_the_answer_is_kept_until_a_version_changes():
    trial, asked, scale = NeighborTrial(torch.arange(2), torch.zeros(2, 64, dtype=torch.int64)), [], torch.ones(100)

    def scores(near):
        asked.append(near.shape[1])
        return (-scale[:2] * near.shape[1],)

    few, many = while_it_falls_by(20.0), while_it_falls_by(1e3)
    assert [trial.choose_k(scores, 16, few, Versions([scale])) for _ in range(2)] == [16, 16]
    assert asked == [16, 32]
    scale += 1
    assert trial.choose_k(scores, 16, few, Versions([scale])) == 64
    assert trial.choose_k(scores, 16, many, Versions([scale])) == 16  # as does another threshold
    asked.clear()
    assert [trial.choose_k(scores, 16, many) for _ in range(2)] == [16, 16]
    assert asked == [16, 32, 16, 32]  # without versions nothing is kept


@pytest.mark.parametrize(
    ("fall_of_f", "noise", "want"),
    [
        (0.5, 100.0, 256),  # y hardly changes, f does; for its sake alone there are at most 256
        (0.5, 0.01, 512),  # y does, too
        (0.04, 0.0, 512),
        (0.02, 0.0, 256),  # worthwhile for y, not for f; the last doubling takes more
        (0.02, 1.0, 32),
        (0.04, 1e3, 256),
    ],
)
def test_noise_does_not_hide_what_more_neighbors_say_of_f(fall_of_f, noise, want):
    trial = NeighborTrial(torch.arange(2), torch.zeros(2, 512, dtype=torch.int64))

    def variances(near):
        doublings = torch.tensor(near.shape[1] / 32).log2()
        return torch.exp(-fall_of_f * doublings).double().expand(2), torch.tensor(noise).double()

    assert trial.choose_k(variances, 32, FOR_Y + FOR_F) == want


@pytest.mark.parametrize(
    ("falls", "want"),
    [
        ([0.05] * 8, 512),  # nats per point and doubling
        ([0.15] * 8, 32),
        ([0.0] * 7 + [1.2], 512),  # by the same mean, of an outlier
    ],
)
def test_a_doubling_that_lowers_densities_is_refused(falls, want):
    trial = NeighborTrial(torch.arange(8), torch.zeros(8, 512, dtype=torch.int64))

    def evaluate(near):
        doublings = torch.tensor(near.shape[1] / 32).log2()
        return torch.exp(-doublings).expand(8), torch.tensor(0.0), -doublings * torch.tensor(falls)

    assert trial.choose_k(evaluate, 32, FOR_Y) == 512
    assert trial.choose_k(evaluate, 32, FOR_Y, veto=loses_density) == want


def test_a_rule_has_no_say_beyond_its_largest_number():
    trial = NeighborTrial(torch.arange(2), torch.zeros(2, 128, dtype=torch.int64))
    assert trial.choose_k(lambda near: (-1.0 * torch.tensor([near.shape[1]]),), 32, while_it_falls_by(1.0, 100)) == 64


@pytest.mark.parametrize(("num_points", "count"), [(1, 1), (10, 10), (64, 64), (1000, 64)])
def test_rows_are_distinct_and_spread_from_the_first_to_the_last(num_points, count):
    rows = rows_to_try(num_points, torch.device("cpu"))
    assert len(rows) == count == len(rows.unique())
    assert (int(rows.min()), int(rows.max())) == (0, num_points - 1)
    assert rows.diff().max() <= -(-num_points // count) + 1 if count > 1 else True
