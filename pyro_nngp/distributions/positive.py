r"""Distributions of positive values that torch and Pyro lack: inverse Gaussian, generalized Pareto, Tweedie.

References: Michael, Schucany and Haas (1976), "Generating random variates using transformations with multiple roots",
The American Statistician, for draws of the inverse Gaussian; Dunn and Smyth (2005), "Series evaluation of Tweedie
exponential dispersion model densities", Statistics and Computing. Cost: O(1) per value; 160 terms of a series for a
positive value of the Tweedie distribution.
"""

import math

import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.nn.functional import softplus

from pyro_nngp._kinds import broadcast
from pyro_nngp.distributions.expandable import Expandable

_TERMS = 160  # of the series
_REACH = 9.0  # range of the terms around the largest, in standard deviations


class InverseGaussian(Expandable):
    r"""The distribution with mean :math:`\mu` and variance :math:`\mu^3 / \lambda`, on the positive numbers.

    Args:
        log_mean: :math:`\log \mu`.
        concentration: :math:`\lambda`, broadcastable.
    """

    arg_constraints = {"log_mean": constraints.real, "concentration": constraints.positive}
    support = constraints.positive
    batched = ("log_mean", "concentration")

    def __init__(self, log_mean: Tensor, concentration: Tensor, validate_args: bool | None = None) -> None:
        self.log_mean, self.concentration = broadcast("InverseGaussian", log_mean=log_mean, concentration=concentration)
        super().__init__(self.log_mean.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        return self.log_mean.exp()

    @property
    def variance(self) -> Tensor:
        return (3 * self.log_mean).exp() / self.concentration

    def _log_prob(self, value: Tensor) -> Tensor:
        misfit = value * (-2 * self.log_mean).exp() - 2 * (-self.log_mean).exp() + 1 / value
        return (self.concentration.log() - math.log(2 * math.pi) - 3 * value.log() - self.concentration * misfit) / 2

    def _draw(self, shape: torch.Size) -> Tensor:
        mean = self.mean.expand(shape)
        chi = torch.randn_like(mean)
        w = mean * chi.square() / (2 * self.concentration)
        ratio = 1 / (1 + w + (w * (w + 2)).sqrt())  # the smaller root, over the mean, without cancellation
        return mean * torch.where(torch.rand_like(mean) * (1 + ratio) <= 1, ratio, 1 / ratio)


class GeneralizedPareto(Expandable):
    r"""Excesses over a threshold: :math:`P(y > t) = (1 + \xi t / \sigma)^{-1/\xi}` for t >= 0, with :math:`\xi > 0`.

    The mean is finite for :math:`\xi < 1`, the variance for :math:`\xi < 1/2`.

    Args:
        log_scale: :math:`\log \sigma`.
        concentration: the tail index :math:`\xi`, broadcastable.
    """

    arg_constraints = {"log_scale": constraints.real, "concentration": constraints.positive}
    support = constraints.nonnegative
    batched = ("log_scale", "concentration")

    def __init__(self, log_scale: Tensor, concentration: Tensor, validate_args: bool | None = None) -> None:
        self.log_scale, self.concentration = broadcast(
            "GeneralizedPareto", log_scale=log_scale, concentration=concentration
        )
        super().__init__(self.log_scale.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        mean = self.log_scale.exp() / (1 - self.concentration).clamp(min=torch.finfo(self.log_scale.dtype).tiny)
        return torch.where(self.concentration < 1, mean, torch.inf)

    @property
    def variance(self) -> Tensor:
        finite = (1 - 2 * self.concentration).clamp(min=torch.finfo(self.log_scale.dtype).tiny)
        return torch.where(self.concentration < 0.5, self.mean.square() / finite, torch.inf)

    def _log_prob(self, value: Tensor) -> Tensor:
        return -self.log_scale - (1 + 1 / self.concentration) * self._log_ratio(value)

    def cdf(self, value: Tensor) -> Tensor:
        return -torch.expm1(-self._log_ratio(value) / self.concentration)

    def icdf(self, value: Tensor) -> Tensor:
        return self._at(-torch.log1p(-value))

    def _draw(self, shape: torch.Size) -> Tensor:
        return self._at(torch.empty(shape, dtype=self.log_scale.dtype, device=self.log_scale.device).exponential_())

    def _log_ratio(self, value: Tensor) -> Tensor:
        """log(1 + xi y / sigma)."""
        return softplus((self.concentration * value).log() - self.log_scale)

    def _at(self, level: Tensor) -> Tensor:
        """The value that is exceeded with probability exp(-level)."""
        return self.log_scale.exp() * torch.expm1(self.concentration * level) / self.concentration


class Tweedie(Expandable):
    r"""A sum of gamma variables whose number is Poisson: zero with positive probability, else positive.

    Mean :math:`\mu` and variance :math:`\phi \mu^p` with 1 < p < 2.

    Args:
        log_mean: :math:`\log \mu`.
        dispersion: :math:`\phi`, broadcastable.
        power: p, broadcastable.
    """

    arg_constraints = {
        "log_mean": constraints.real,
        "dispersion": constraints.positive,
        "power": constraints.interval(1.0, 2.0),
    }
    support = constraints.nonnegative
    batched = ("log_mean",)  # the others stay small, since each of their values has a series

    def __init__(self, log_mean: Tensor, dispersion: Tensor, power: Tensor, validate_args: bool | None = None) -> None:
        self.log_mean = broadcast("Tweedie", log_mean=log_mean, dispersion=dispersion, power=power)[0]
        self.dispersion, self.power = dispersion, power
        super().__init__(self.log_mean.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        return self.log_mean.exp()

    @property
    def variance(self) -> Tensor:
        return self.dispersion * (self.power * self.log_mean).exp()

    def _log_prob(self, value: Tensor) -> Tensor:
        first, second = ((k - self.power) * self.log_mean for k in (1, 2))
        return tweedie_log_prob(value, first.exp(), second.exp(), self.dispersion, self.power)

    def _draw(self, shape: torch.Size) -> Tensor:
        p = self.power
        rate = ((2 - p) * self.log_mean).exp() / (self.dispersion * (2 - p))
        number = torch.poisson(rate.expand(shape))
        scale = self.dispersion * (p - 1) * ((p - 1) * self.log_mean).exp()
        total = torch._standard_gamma((number * (2 - p) / (p - 1)).clamp(min=torch.finfo(p.dtype).tiny))
        return torch.where(number > 0, total * scale, 0.0)


def tweedie_log_prob(value: Tensor, first: Tensor, second: Tensor, dispersion: Tensor, power: Tensor) -> Tensor:
    r"""The log density of a Tweedie distribution at y, which is linear in two powers of the mean.

    Args:
        value: y >= 0.
        first: :math:`\mu^{1-p}`, or its expectation.
        second: :math:`\mu^{2-p}`, or its expectation.
        dispersion: :math:`\phi`.
        power: p.
    """
    exponent = (value * first / (1 - power) - second / (2 - power)) / dispersion
    positive = torch.where(value > 0, value, 1.0)
    return exponent + torch.where(value > 0, _log_series(positive, dispersion, power) - positive.log(), 0.0)


def _log_series(value: Tensor, dispersion: Tensor, power: Tensor) -> Tensor:
    r"""The logarithm of :math:`\sum_j z^j / (j!\, \Gamma(j a))`, a = (2-p)/(p-1), log z = a log y - a log(p-1) - ...

    The terms are those around the largest. Where that range has more than 160 integers, the terms vary so slowly that
    the trapezoidal rule with a longer step has no error that float64 can hold.
    """
    y, phi, p = value.double(), dispersion.double(), power.double()
    a = (2 - p) / (p - 1)
    log_z = a * (y / (p - 1)).log() - (1 + a) * phi.log() - (2 - p).log()
    with torch.no_grad():
        largest = ((2 - p) * y.log()).exp() / (phi * (2 - p))
        reach = _REACH * (largest / (1 + a)).sqrt()
        start = (largest - reach).floor().clamp(min=1)
        step = ((largest + reach - start) / _TERMS).clamp(min=1)
        j = start[..., None] + step[..., None] * torch.arange(_TERMS, dtype=y.dtype, device=y.device)
    terms = j * log_z[..., None] - torch.lgamma(j + 1) - torch.lgamma(j * a[..., None])
    return (terms.logsumexp(-1) + step.log()).to(value.dtype)
