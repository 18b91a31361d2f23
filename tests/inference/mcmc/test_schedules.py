"""Step-size schedules by hand."""

import math
import pickle

import pytest

from pyro_nngp.inference import Cyclical, PolynomialDecay
from pyro_nngp.inference.mcmc.schedules import Constant, Refined, as_schedule


def test_polynomial_decay():
    schedule = PolynomialDecay(0.1, delay=10, power=0.75)
    assert schedule(0) == 0.1
    assert schedule(150) == pytest.approx(0.1 / 8)  # (1 + 15)^(3/4)


def test_cyclical_steps_fall_from_the_initial_size_in_each_period():
    schedule = Cyclical(0.2, period=4)
    first = [0.2, 0.1 * (1 + math.sqrt(0.5)), 0.1, 0.1 * (1 - math.sqrt(0.5))]
    assert [schedule(t) for t in range(8)] == pytest.approx(first + first)


def test_cyclical_temperature_is_zero_while_exploring():
    schedule = Cyclical(0.2, period=4, explore=0.5)
    assert [schedule.temperature(t) for t in range(6)] == [0, 0, 1, 1, 0, 0]
    assert [Cyclical(0.2, period=4).temperature(t) for t in range(4)] == [1, 1, 1, 1]


def test_refined_runs_at_half_speed():
    refined = Refined(PolynomialDecay(0.1, delay=1), 0.5)
    assert [refined(t) for t in range(4)] == [0.5 * PolynomialDecay(0.1, delay=1)(t) for t in (0, 0, 1, 1)]


def test_numbers_become_schedules_and_callables_stay():
    assert as_schedule("Here", "step_size", 2)(7) == 2.0
    schedule = Cyclical(0.2, period=4)
    assert as_schedule("Here", "step_size", schedule) is schedule


@pytest.mark.parametrize(
    "schedule", [Constant(0.1), PolynomialDecay(0.1, 5), Cyclical(0.1, 3), Refined(Constant(1.0), 2.0)]
)
def test_schedules_pickle(schedule):
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_step_sizes_must_be_positive(value):
    with pytest.raises(ValueError, match="Here: expected step_size to be finite and > 0"):
        as_schedule("Here", "step_size", value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolynomialDecay(0.0, 5), "PolynomialDecay: expected initial to be finite and > 0"),
        (lambda: PolynomialDecay(0.1, 0), "PolynomialDecay: expected delay to be finite and > 0"),
        (lambda: PolynomialDecay(0.1, 5, power=0.5), r"PolynomialDecay: expected power in \(0.5, 1\]"),
        (lambda: Cyclical(-0.1, 5), "Cyclical: expected initial to be finite and > 0"),
        (lambda: Cyclical(0.1, 0), "Cyclical: expected period to be finite and > 0"),
        (lambda: Cyclical(0.1, 5, explore=1.0), r"Cyclical: expected explore in \[0, 1\)"),
    ],
)
def test_schedules_check_their_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_step_sizes_must_be_numbers():
    with pytest.raises(TypeError, match="expected step_size to be a number, got True"):
        as_schedule("Here", "step_size", True)
