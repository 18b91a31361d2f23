r"""The sum of a normal and an asymmetric Laplace variable.

Pyro's ``SoftAsymmetricLaplace`` has this density too, but does not expand, and its terms cancel where the normal part
is by far the wider one. Reference: Reed and Jorgensen (2004), "The double Pareto-lognormal distribution",
Communications in Statistics, for the density. Cost: O(1) per value.
"""

import math

import torch
from pyro.distributions import AsymmetricLaplace, constraints
from torch import Tensor
from torch.special import erfcx, log_ndtr

from pyro_nngp._kinds import broadcast
from pyro_nngp.distributions.expandable import Expandable


class NormalLaplace(Expandable):
    r"""The distribution of :math:`y = f + e` with :math:`f \sim N(m, v)` and e of the density below.

    .. math:: p(e) = \frac{\tau (1 - \tau)}{s} \exp\Big(-\frac{e}{s} (\tau - [e < 0])\Big), \qquad P(e < 0) = \tau

    Args:
        loc: m.
        var: v, broadcastable.
        quantile: :math:`\tau` in (0, 1), broadcastable.
        scale: s > 0, broadcastable.
    """

    arg_constraints = {
        "loc": constraints.real,
        "var": constraints.nonnegative,
        "quantile": constraints.unit_interval,
        "scale": constraints.positive,
    }
    support = constraints.real
    batched = ("loc", "var", "quantile", "scale")

    def __init__(
        self, loc: Tensor, var: Tensor, quantile: Tensor, scale: Tensor, validate_args: bool | None = None
    ) -> None:
        self.loc, self.var, self.quantile, self.scale = broadcast(
            "NormalLaplace", loc=loc, var=var, quantile=quantile, scale=scale
        )
        super().__init__(self.loc.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        return self.loc + asymmetric_laplace(torch.zeros_like(self.loc), self.quantile, self.scale).mean

    @property
    def variance(self) -> Tensor:
        return self.var + asymmetric_laplace(self.loc, self.quantile, self.scale).variance

    def _log_prob(self, value: Tensor) -> Tensor:
        tau, distance = self.quantile, value - self.loc
        sides = torch.logaddexp(self._side(distance, tau), self._side(-distance, 1 - tau))
        return sides + (tau * (1 - tau) / self.scale).log()

    def _draw(self, shape: torch.Size) -> Tensor:
        noise = asymmetric_laplace(torch.zeros_like(self.loc), self.quantile, self.scale).expand(shape).sample()
        return self.loc + self.var.sqrt() * torch.randn_like(noise) + noise

    def _side(self, distance: Tensor, rate: Tensor) -> Tensor:
        """log E exp(-rate e / s) [e > 0] for e ~ N(distance, var): two forms, each where it does not cancel."""
        least = (torch.finfo(distance.dtype).eps * self.scale).square()
        sd, slope = torch.maximum(self.var, least).sqrt(), rate / self.scale
        x = distance / sd - slope * sd
        tail = (erfcx(-x.clamp(max=0) / math.sqrt(2)) / 2).log() - (distance / sd).square() / 2
        return torch.where(x < 0, tail, slope * (slope * self.var / 2 - distance) + log_ndtr(x))


def asymmetric_laplace(loc: Tensor, quantile: Tensor, scale: Tensor) -> AsymmetricLaplace:
    r"""The asymmetric Laplace distribution with loc as its quantile of a level, and :math:`s` as above."""
    odds, spread = (quantile / (1 - quantile)).sqrt(), (quantile * (1 - quantile)).sqrt()
    return AsymmetricLaplace(loc, scale / spread, odds)
