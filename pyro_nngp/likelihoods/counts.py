r"""Likelihoods of counts: successes among trials, and counts without a bound.

Closed form: the expected log-density of the Poisson with exponential link. Logits and logarithms are clamped, so that
float32 stays finite, with finite gradients, far beyond :math:`f = \pm 50`. Cost: O(1) per value and quadrature node.
"""

from typing import Any, Literal

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import softplus

from pyro_nngp._checks import check_choice, check_int
from pyro_nngp.hyperparameters import Hyperparameter, positive
from pyro_nngp.likelihoods.base import Likelihood, bounded
from pyro_nngp.likelihoods.observations import PseudoObservations
from pyro_nngp.likelihoods.quadrature import Focus, at_zero

_SIZES = (-1.0, 3.0, 81)  # sizes r that a negative binomial may start with: 81 from .1 to 1,000
_SHARING = 4  # neighbors that are taken to have the f of a count


class SuccessCounts(Likelihood):
    """Base class of likelihoods of successes among n trials.

    Args:
        total_count: number n of trials, if it is the same for all data; None where the method gets one per row, as
            ``trials``.

    Raises:
        ValueError, TypeError: if ``total_count`` is not an integer >= 1.
    """

    total_count: Any
    cure = "Pass the number of successes, not their share, and the trials of each row."

    def __init__(self, total_count: int | None = None) -> None:
        super().__init__()
        self.takes_trials = total_count is None
        if total_count is not None:
            check_int(type(self).__name__, "total_count", total_count, 1, "Pass the number of trials.")
        self._count(1 if total_count is None else total_count)

    def _set_rows(self, trials: Tensor | None, limits: Tensor | None) -> None:
        if trials is not None:
            self._count(trials)

    def overdispersion(self) -> Tensor | float:
        """The variance of y given f, in multiples of the binomial variance."""
        return 1.0

    def observations(self, y: Tensor) -> PseudoObservations | None:
        """Empirical logits where rows differ in their numbers of trials."""
        if not isinstance(self.total_count, Tensor):
            return None
        share = (y + 0.5) / (self.total_count + 1)
        noise = self.overdispersion() / ((self.total_count + 1) * share * (1 - share))
        return PseudoObservations.of(share.logit(), noise)

    def _count(self, trials: int | Tensor) -> None:
        of_each = "their row's trials" if isinstance(trials, Tensor) else trials
        self.__dict__["total_count"], self.__dict__["support"] = trials, constraints.integer_interval(0, trials)
        self.__dict__["expectation"] = f"to be counts in 0..{of_each}"


class Binomial(SuccessCounts):
    r"""Successes among n trials, :math:`y \sim Binomial(n, \sigma(f))`; arguments as for :class:`SuccessCounts`."""

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.Binomial(self.total_count, logits=f)

    def focus(self, y: Tensor) -> Focus:
        return at_zero(y)


class Poisson(Likelihood):
    r"""Counts :math:`y \sim Poisson(g(f))` with :math:`g = \exp` or :math:`g(f) = \log(1 + e^f)` (softplus).

    Args:
        link: "exp" or "softplus"; with "exp" the expected log-density has a closed form.
    """

    support = constraints.nonnegative_integer
    expectation = "to be counts 0, 1, 2, .."
    cure = "Round them, or use a likelihood of continuous data."

    def __init__(self, link: Literal["exp", "softplus"] = "exp") -> None:
        super().__init__()
        check_choice("Poisson", "link", link, ("exp", "softplus"))
        self.link = link

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.Poisson(bounded(f).exp() if self.link == "exp" else softplus(f.clamp(min=-80)))

    def focus(self, y: Tensor) -> Focus:
        return at_zero(y) if self.link == "softplus" else (y.clamp(min=1).log(), torch.ones_like(y))

    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Tensor:
        if self.link == "softplus":
            return super().expected_log_prob(y, loc, var)
        return y * loc - bounded(loc + var / 2).exp() - torch.lgamma(1 + y.to(loc.dtype))


class NegativeBinomial(Likelihood):
    r"""Overdispersed counts, :math:`y \sim NB(r, \sigma(f - \log r))`.

    Their mean is :math:`e^f`, their variance :math:`e^f + e^{2f} / r`.

    f is the logarithm of the mean, as under a :class:`Poisson` with the exponential link, which is the limit of large
    r; so f does not shift with the dispersion. Pyro's ``NegativeBinomial(r, logits)`` and Polya-Gamma augmentation have
    the logits :math:`f - \log r`.

    Args:
        total_count: dispersion r > 0, the "size" or "theta" of other software.
    """

    support = constraints.nonnegative_integer
    expectation = "to be counts 0, 1, 2, .."
    cure = "Round them, or use a likelihood of continuous data."

    def __init__(self, total_count: Hyperparameter | None = None) -> None:
        super().__init__()
        self.link = "exp"
        self.total_count = positive("NegativeBinomial", "total_count", total_count)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        r = self.total_count.to(f.dtype)
        return dist.NegativeBinomial(r, logits=bounded(f - r.log()))

    def focus(self, y: Tensor) -> Focus:
        center, scale = at_zero(y)
        return center + self.total_count.detach().log(), scale

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor | None:
        """The size r with which counts of the nearest points best predict the count of a point."""
        if name != "total_count":
            return None
        return best_size(y, near[:, :_SHARING])[0]


def best_size(y: Tensor, near: Tensor) -> tuple[Tensor, float]:
    """The size r with which K counts each, (n, K), best predict counts (n,), and its gain on the largest r.

    Returns:
        r, and nats per count.
    """
    r = torch.logspace(*_SIZES, dtype=y.dtype, device=y.device)
    densities = predictive_log_density(y, near, r[:, None]).mean(-1)
    return r[densities.argmax()], float(densities.max() - densities[-1])


def predictive_log_density(y: Tensor, near: Tensor, r: Tensor) -> Tensor:
    """Log densities of counts (n,) given K negative binomial counts each, (n, K), of one size r and probability.

    The probability has a beta distribution with a = 1 and b = 1/2, which K counts of sum S make one with a + K r and
    b + S; the next count is beta negative binomial (Johnson, Kemp, Kotz 2005, "Univariate discrete distributions",
    section 6.2.3).
    """
    size, total, a, b = near.shape[-1], near.sum(-1), 1.0, 0.5

    def log_beta(p: Tensor, q: Tensor) -> Tensor:
        return torch.lgamma(p) + torch.lgamma(q) - torch.lgamma(p + q)

    ratio = log_beta(a + (size + 1) * r, b + total + y) - log_beta(a + size * r, b + total)
    return torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1) + ratio
