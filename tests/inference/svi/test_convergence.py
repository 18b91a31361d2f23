"""Plateaus and falling losses."""

import math

import pytest
import torch

from pyro_nngp.inference.svi.convergence import Plateau, Rounds, describe_fall, still_falling


def test_a_plateau_is_a_round_too_many_without_an_improvement():
    plateau = Plateau(0.01, cuts=1)
    assert [plateau.observe(value) for value in (1.0, 0.5, 0.495)] == [False, False, True]
    assert not plateau.converged
    assert plateau.observe(math.nan)
    assert plateau.converged
    worse = Plateau(0.01, cuts=9)
    assert [worse.observe(value) for value in (1.0, 2.0, 1.5)] == [False, True, True]


def test_rounds_that_go_back_and_forth_end_between_the_two_places_and_others_are_left_alone():
    place, rounds, steady = torch.tensor([1.0, 0.0]).double(), Rounds(), Rounds()
    for number in range(40):
        if number == 20:  # as a checkpoint does
            state, rounds = rounds.state(), Rounds()
            rounds.load(state)
        place = rounds.end(-1.5 * place)  # by themselves they would go ever farther
        ahead = torch.tensor([float(number), 2.0])
        assert torch.equal(steady.end(ahead), ahead)
    assert place.norm() < 1e-3


def test_falling_losses_are_told_from_noise():
    noise = 0.1 * torch.randn(400, generator=torch.Generator().manual_seed(0))
    steps = torch.arange(400)
    assert still_falling(noise.tolist()) == 0
    assert still_falling((noise - 0.004 * steps).tolist()) > 0.1
    flat_after = torch.where(steps < 300, -0.004 * steps, -1.2)  # the rates are lowered at 300
    assert still_falling((noise + flat_after).tolist()) == 0
    assert still_falling((noise + flat_after).tolist(), 0.75) > 0.1
    assert still_falling([1.0, 0.0]) is None
    loud = (-1.0) ** steps  # the mean of an eighth, 50 steps, has a standard error of .2, and differences .28
    assert still_falling((loud - 0.024 * steps).tolist()) == pytest.approx(1.2)
    assert still_falling((loud - 0.012 * steps).tolist()) == 0


@pytest.mark.parametrize("fall", [None, math.inf, 0.0, -0.0049])
def test_a_loss_is_said_to_have_fallen_only_where_it_did(fall):
    assert describe_fall(fall, "the last round") == "may still fall"
    assert describe_fall(0.25, "the last round") == "fell by 0.25 nats per data point in the last round"
