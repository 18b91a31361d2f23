"""Schedules: functions of the update number, for step sizes and temperatures of the stochastic-gradient samplers.

- :class:`PolynomialDecay`: Welling and Teh (2011), "Bayesian learning via stochastic gradient Langevin dynamics".
- :class:`Cyclical`: Zhang, Li, Zhang, Chen and Wilson (2020), "Cyclical stochastic gradient MCMC", equation 1.

Differs from the papers: nothing. Any callable ``int -> float`` is a schedule; those here can be pickled, for the
worker processes of Pyro's ``MCMC``. Cost: O(1).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pyro_nngp._checks import check_number, check_positive, fail
from pyro_nngp._kinds import check_callable

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same value at every update."""

    value: float

    def __call__(self, update: int) -> float:
        return self.value


@dataclass(frozen=True)
class PolynomialDecay:
    r"""Step size :math:`\varepsilon_t = a\,(1 + t/b)^{-\gamma}`.

    The bias of the chain vanishes as :math:`\varepsilon_t \to 0`. Draws then represent unequal intervals of
    time: weight them by ``schedule(t)`` in averages.

    Args:
        initial: a, the first step size.
        delay: b, the number of updates over which it stays of that order.
        power: gamma in (1/2, 1], for which the steps sum to infinity and their squares do not.
    """

    initial: float
    delay: float
    power: float = 0.55

    def __post_init__(self) -> None:
        check_positive("PolynomialDecay", "initial", self.initial)
        check_positive("PolynomialDecay", "delay", self.delay)
        check_number("PolynomialDecay", "power", self.power)
        if not 0.5 < self.power <= 1:
            fail("PolynomialDecay", "power", "in (0.5, 1]", self.power, "Outside, the draws do not converge.")

    def __call__(self, update: int) -> float:
        return self.initial * (1 + update / self.delay) ** -self.power


@dataclass(frozen=True)
class Cyclical:
    r"""Step size :math:`\varepsilon_t = \tfrac a2 (\cos(\pi\, (t \bmod P)/P) + 1)`.

    Large steps find a mode, and small steps sample it. With ``temperature=schedule.temperature`` the first part of each
    cycle runs without noise, the paper's exploration stage. ``num_steps=period``, after a burn-in of whole cycles,
    draws once a cycle, where the step is smallest.

    Args:
        initial: a, the step size at the start of a cycle.
        period: P, updates per cycle.
        explore: the part of a cycle, in [0, 1), during which :meth:`temperature` is zero.
    """

    initial: float
    period: int
    explore: float = 0.0

    def __post_init__(self) -> None:
        check_positive("Cyclical", "initial", self.initial)
        check_positive("Cyclical", "period", self.period)
        check_number("Cyclical", "explore", self.explore)
        if not 0 <= self.explore < 1:
            fail("Cyclical", "explore", "in [0, 1)", self.explore, "It is the part of a cycle without noise.")

    def __call__(self, update: int) -> float:
        return self.initial / 2 * (math.cos(math.pi * self._phase(update)) + 1)

    def temperature(self, update: int) -> float:
        """Temperature: 0 while the cycle explores, 1 while it samples."""
        return float(self._phase(update) >= self.explore)

    def _phase(self, update: int) -> float:
        return update % self.period / self.period


@dataclass(frozen=True)
class Refined:
    """A schedule at half speed, two updates for one, with values multiplied by `scale`."""

    schedule: Schedule
    scale: float

    def __call__(self, update: int) -> float:
        return self.scale * self.schedule(update // 2)


def as_schedule(where: str, arg: str, value: float | Schedule) -> Schedule:
    """Make a constant schedule of a positive number; return a callable unchanged.

    Raises:
        TypeError: if `value` is neither.
        ValueError: if the number is not positive and finite.
    """
    if callable(value):
        check_callable(where, arg, value, "Pass a number, or an instance of a schedule.", 1)
        check_number(where, f"{arg}(0)", value(0), cure="A schedule maps the number of an update to a number.")
        return value
    check_positive(where, arg, value)
    return Constant(float(value))
