r"""Likelihoods of shares: proportions between 0 and 1, and overdispersed counts out of n.

Both have the mean :math:`\sigma(f)` and a concentration. Expectations are by quadrature. Reference: Ferrari and
Cribari-Neto (2004), "Beta regression for modelling rates and proportions", Journal of Applied Statistics.
Cost: O(1) per value and node.
"""

import pyro.distributions as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_nngp.hyperparameters import Hyperparameter, positive
from pyro_nngp.likelihoods.base import Likelihood, bounded
from pyro_nngp.likelihoods.counts import SuccessCounts
from pyro_nngp.likelihoods.quadrature import Focus, at_zero


class _OpenUnitInterval(constraints.Constraint):
    """Numbers strictly between 0 and 1."""

    def check(self, value: Tensor) -> Tensor:
        return (value > 0) & (value < 1)


def _shapes(f: Tensor, concentration: Tensor) -> tuple[Tensor, Tensor]:
    """The parameters of the beta distribution with mean sigmoid(f), both positive wherever f is."""
    f, a = bounded(f), concentration.to(f.dtype)
    return a * f.sigmoid(), a * (-f).sigmoid()


class Beta(Likelihood):
    r"""Proportions, :math:`y \sim Beta(\phi \mu, \phi (1 - \mu))` with mean :math:`\mu = \sigma(f)`, 0 < y < 1.

    The variance is :math:`\mu (1 - \mu) / (1 + \phi)`.

    Args:
        concentration: :math:`\phi`.
    """

    support = _OpenUnitInterval()
    expectation = "to lie strictly between 0 and 1"
    cure = "Squeeze shares of 0 and 1 inside: (y * (N - 1) + 0.5) / N."

    def __init__(self, concentration: Hyperparameter | None = None) -> None:
        super().__init__()
        self.concentration = positive("Beta", "concentration", concentration, 5.0)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.Beta(*_shapes(f, self.concentration))

    def focus(self, y: Tensor) -> Focus:
        return at_zero(y)

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor:
        return _start(y, near)


class BetaBinomial(SuccessCounts):
    r"""Successes among n trials whose probability varies: :math:`p \sim Beta(\phi \mu, \phi (1 - \mu))`.

    The mean is :math:`n \mu` with :math:`\mu = \sigma(f)`; the variance is :math:`1 + (n - 1) / (1 + \phi)` times the
    binomial one.

    Args:
        total_count: number n of trials, if it is the same for all data; None where the method gets one per row.
        concentration: :math:`\phi`; the binomial is the limit of a large one.

    Raises:
        ValueError, TypeError: if ``total_count`` is not an integer >= 1.
    """

    def __init__(self, total_count: int | None = None, concentration: Hyperparameter | None = None) -> None:
        super().__init__(total_count)
        self.concentration = positive("BetaBinomial", "concentration", concentration, 5.0)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.BetaBinomial(*_shapes(f, self.concentration), total_count=self.total_count)

    def focus(self, y: Tensor) -> Focus:
        return at_zero(y)

    def overdispersion(self) -> Tensor:
        return 1 + (self.total_count - 1) / (1 + self.concentration.detach())

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor | None:
        if self.takes_trials:
            return None
        return _start(y / self.total_count, near / self.total_count, 1 / self.total_count)


def _start(share: Tensor, near: Tensor, binomial: float = 0.0) -> Tensor:
    """Estimate the concentration by moments, as if neighbors had the same mean.

    Args:
        share: y, or y / n.
        near: shares of the neighbors, (n, K).
        binomial: variance of the share, relative to m (1 - m), when the probability does not vary.
    """
    mean = near.mean(-1).clamp(0.01, 0.99)
    relative = ((share - mean).square() / (mean * (1 - mean))).mean() / (1 + 1 / near.shape[-1])
    inverse = ((relative - binomial) / (1 - binomial) if binomial < 1 else relative).clamp(1e-4, 0.9)
    return 1 / inverse - 1
