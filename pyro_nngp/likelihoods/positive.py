r"""Likelihoods of positive data with mean or scale :math:`e^f`: inverse Gaussian, Tweedie, generalized Pareto.

Closed forms: expected log-densities of the inverse Gaussian and the Tweedie, which are linear in powers of the mean.
Cost: O(1) per value; 160 terms of a series for a positive value of the Tweedie, once, not per node of quadrature.
"""

import math

import torch
from jaxtyping import Float
from pyro.nn import pyro_method
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_nngp.distributions.positive import GeneralizedPareto as GeneralizedParetoDistribution
from pyro_nngp.distributions.positive import InverseGaussian as InverseGaussianDistribution
from pyro_nngp.distributions.positive import Tweedie as TweedieDistribution
from pyro_nngp.distributions.positive import tweedie_log_prob
from pyro_nngp.hyperparameters import Hyperparameter, between, positive
from pyro_nngp.likelihoods.base import Likelihood, bounded
from pyro_nngp.likelihoods.quadrature import BRANCH, Focus

_LOG_2PI = math.log(2 * math.pi)


class InverseGaussian(Likelihood):
    r"""Skewed positive data with mean :math:`\mu = e^f` and variance :math:`\mu^3 / \lambda`.

    Args:
        concentration: :math:`\lambda`, in the unit of y.
    """

    support = constraints.positive
    expectation = "to be positive"
    cure = "Drop them, or use Tweedie() for data with zeros."

    def __init__(self, concentration: Hyperparameter | None = None) -> None:
        super().__init__()
        self.concentration = positive("InverseGaussian", "concentration", concentration)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return InverseGaussianDistribution(bounded(2 * f) / 2, self.concentration.to(f.dtype))

    def focus(self, y: Tensor) -> Focus:
        return y.log(), torch.full_like(y, 0.5)

    @pyro_method
    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Tensor:
        a = self.concentration.to(loc.dtype)
        # y E (exp(-f) - 1 / y)^2; clamped, the first power is at least the square of the second, so it is not below 0
        spread = y * bounded(2 * var - 2 * loc).exp() - 2 * (bounded(var - 2 * loc) / 2).exp() + 1 / y
        return (a.log() - _LOG_2PI - 3 * y.log() - a * spread) / 2

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor:
        mean = near.mean(-1)
        relative = (y - mean).square() / mean.pow(3)
        return (1 + 1 / near.shape[-1]) / relative.mean().clamp(min=1e-9 / mean.mean())


class Tweedie(Likelihood):
    r"""Amounts with exact zeros, such as rainfall or catches: mean :math:`\mu = e^f`, variance :math:`\phi \mu^p`.

    y is a sum of gamma variables whose number is Poisson.

    Args:
        dispersion: :math:`\phi`.
        power: p in (1, 2): near 1 like counts, near 2 like a gamma distribution.
    """

    support = constraints.nonnegative
    expectation = "to be zero or positive"
    cure = "Drop negative values, or shift the data."

    def __init__(self, dispersion: Hyperparameter | None = None, power: Hyperparameter | None = None) -> None:
        super().__init__()
        self.dispersion = positive("Tweedie", "dispersion", dispersion)
        self.power = between("Tweedie", "power", power, 1.0, 2.0, 1.5)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return TweedieDistribution(bounded(f), self.dispersion.to(f.dtype), self.power.to(f.dtype))

    def focus(self, y: Tensor) -> Focus:
        """Where a positive y is the mean; where a zero has the probability 1 / e."""
        p = self.power.detach()
        zero = (self.dispersion.detach() * (2 - p)).log() / (2 - p)
        return torch.where(y > 0, torch.where(y > 0, y, 1.0).log(), zero.to(y.dtype)), torch.ones_like(y)

    @pyro_method
    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Tensor:
        p = self.power.to(loc.dtype)
        first, second = (bounded((k - p) * loc + ((k - p) * var.sqrt()).square() / 2).exp() for k in (1, 2))
        return tweedie_log_prob(y, first, second, self.dispersion.to(loc.dtype), p)

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor | None:
        if name != "dispersion" or not bool(y.any()):
            return None
        mean = near.mean(-1).clamp(min=1e-3 * float(y.mean()))
        return ((y - mean).square() / mean.pow(self.power.item())).mean() / (1 + 1 / near.shape[-1])


class GeneralizedPareto(Likelihood):
    r"""Excesses over a high threshold: :math:`P(y > t) = (1 + \xi t e^{-f})^{-1/\xi}`, with scale :math:`e^f`.

    Heavy tails only, :math:`\xi > 0`; the exponential distribution is the limit :math:`\xi \to 0`.

    Args:
        concentration: the tail index :math:`\xi`. The mean is finite below 1, the variance below 1/2.
    """

    support = constraints.positive
    expectation = "to be positive"
    cure = "Subtract the threshold and keep the excesses."

    def __init__(self, concentration: Hyperparameter | None = None) -> None:
        super().__init__()
        self.concentration = positive("GeneralizedPareto", "concentration", concentration, 0.1)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return GeneralizedParetoDistribution(bounded(f), self.concentration.to(f.dtype))

    def focus(self, y: Tensor) -> Focus:
        return (self.concentration.detach() * y).log(), torch.full_like(y, BRANCH)
