r"""Likelihoods of shares: proportions between 0 and 1, and counts out of n that vary more than binomial ones.

Both have the mean :math:`\sigma(f)` and a concentration. Expectations are by quadrature. Reference: Ferrari and
Cribari-Neto (2004), "Beta regression for modelling rates and proportions", Journal of Applied Statistics.
Cost: O(1) per value and node.
"""

import pyro.distributions as dist
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_nngp._checks import check_int
from pyro_nngp.hyperparameters import Hyperparameter, positive
from pyro_nngp.likelihoods.base import Likelihood, bounded
from pyro_nngp.likelihoods.quadrature import Focus

_BRANCH = 2.7  # distance of the singularities of functions of the sigmoid from the real axis, or a little less


class _OpenUnitInterval(constraints.Constraint):
    """Numbers strictly between 0 and 1."""

    def check(self, value: Tensor) -> Tensor:
        return (value > 0) & (value < 1)


class _Overdispersed(Likelihood):
    """A probability with a beta distribution of mean sigmoid(f); its two parameters are those of :meth:`shapes`."""

    concentration: Tensor

    def shapes(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The two parameters of the beta distribution, both positive wherever f is."""
        f, a = bounded(f), self.concentration.to(f.dtype)
        return a * f.sigmoid(), a * (-f).sigmoid()

    def focus(self, y: Tensor) -> Focus:
        return torch.zeros((), device=y.device), torch.full((), _BRANCH, device=y.device)


class Beta(_Overdispersed):
    r"""Proportions, :math:`y \sim Beta(\phi \mu, \phi (1 - \mu))` with mean :math:`\mu = \sigma(f)`, 0 < y < 1.

    The variance is :math:`\mu (1 - \mu) / (1 + \phi)`.

    Args:
        concentration: :math:`\phi`.
        num_quadrature: number of nodes of expectations.
    """

    support = _OpenUnitInterval()
    expectation = "to lie strictly between 0 and 1"
    cure = "Squeeze shares of 0 and 1 inside: (y * (N - 1) + 0.5) / N."

    def __init__(self, concentration: Hyperparameter | None = None, num_quadrature: int = 48) -> None:
        super().__init__(num_quadrature)
        self.concentration = positive("Beta", "concentration", concentration, 5.0)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.Beta(*self.shapes(f))

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor:
        return _start(y, near)


class BetaBinomial(_Overdispersed):
    r"""Successes among n trials whose probability varies: :math:`p \sim Beta(\phi \mu, \phi (1 - \mu))`.

    The mean is :math:`n \mu` with :math:`\mu = \sigma(f)`; the variance is :math:`1 + (n - 1) / (1 + \phi)` times that
    of :class:`Binomial`.

    Args:
        total_count: number n of trials, the same for all data.
        concentration: :math:`\phi`; the binomial is the limit of a large one.
        num_quadrature: number of nodes of expectations.

    Raises:
        ValueError, TypeError: if ``total_count`` is not an integer >= 1.
    """

    def __init__(self, total_count: int, concentration: Hyperparameter | None = None, num_quadrature: int = 48) -> None:
        super().__init__(num_quadrature)
        check_int("BetaBinomial", "total_count", total_count, 1, "Pass the number of trials.")
        self.total_count = total_count
        self.concentration = positive("BetaBinomial", "concentration", concentration, 5.0)
        self.support = constraints.integer_interval(0, total_count)
        self.expectation = f"to be counts in 0..{total_count}"
        self.cure = "Pass the number of successes, not their share."

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.BetaBinomial(*self.shapes(f), total_count=self.total_count)

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor:
        return _start(y / self.total_count, near / self.total_count, 1 / self.total_count)


def _start(share: Tensor, near: Tensor, binomial: float = 0.0) -> Tensor:
    """The concentration by moments, as if neighbors had the same mean.

    Args:
        share: y, or y / n.
        near: those of the neighbors, (n, K).
        binomial: variance of the share, relative to m (1 - m), when the probability does not vary.
    """
    mean = near.mean(-1).clamp(0.01, 0.99)
    relative = ((share - mean).square() / (mean * (1 - mean))).mean() / (1 + 1 / near.shape[-1])
    inverse = ((relative - binomial) / (1 - binomial) if binomial < 1 else relative).clamp(1e-4, 0.9)
    return 1 / inverse - 1
