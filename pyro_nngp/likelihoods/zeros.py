r"""Counts with more, or fewer, zeros than their distribution has: zero-inflated, zero-truncated, hurdle.

Each wraps another likelihood of counts: ``ZeroInflated(NegativeBinomial())``. Draws of zero-truncated counts are exact
at any mean, without rejection: a Poisson or negative binomial count is the number of events of a process on (0, 1), and
the time of the first event, given that there is one, has a truncated exponential distribution.

Reference: Kemp (1981), "Efficient generation of logarithmically distributed pseudo-random variables", Applied
Statistics, for the first batch of events of a negative binomial process. Cost: the wrapped likelihood.
"""

from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import pyro_method
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from pyro_nngp._checks import fail
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.hyperparameters import Hyperparameter, between
from pyro_nngp.likelihoods.base import Likelihood
from pyro_nngp.likelihoods.counts import Binomial, NegativeBinomial, Poisson
from pyro_nngp.likelihoods.observations import PseudoObservations
from pyro_nngp.likelihoods.proportions import BetaBinomial

_EXTRA_ZERO = 10.0  # times the noise of a zero that may have come from elsewhere


class _CountWrapper(Likelihood):
    """Base class of likelihoods that wrap another likelihood of counts, `counts`, of a class in `allowed`."""

    counts: Likelihood
    allowed: tuple[type[Likelihood], ...] = (NegativeBinomial, Poisson)

    def __init__(self, counts: Likelihood) -> None:
        super().__init__()
        if not isinstance(counts, self.allowed):
            names = " or ".join(c.__name__ for c in self.allowed)
            fail(type(self).__name__, "counts", f"to be {names}", f"{counts!r:.60}", "Pass one of them.", TypeError)
        self.counts = counts


class ZeroInflated(_CountWrapper):
    r"""Zero with probability :math:`\pi`, else a count, which may be zero too.

    Args:
        counts: the likelihood of the counts: :class:`Poisson`, :class:`NegativeBinomial`, :class:`Binomial` or
            :class:`BetaBinomial`, these two also with the ``trials`` of each row.
        gate: probability :math:`\pi` of an extra zero.

    Raises:
        TypeError: if ``counts`` is another likelihood.
        ValueError: if ``gate`` is not between 0 and 1.
    """

    allowed = (NegativeBinomial, Poisson, Binomial, BetaBinomial)

    def __init__(self, counts: Likelihood, gate: Hyperparameter | None = None) -> None:
        super().__init__(counts)
        self.gate = between(type(self).__name__, "gate", gate, 0.0, 1.0, 0.2)
        self.takes_trials = counts.takes_trials
        self.support, self.expectation, self.cure = counts.support, counts.expectation, counts.cure

    def _set_rows(self, trials: Tensor | None, limits: Tensor | None) -> None:
        if trials is not None:
            counts = self.counts.for_rows(trials=trials)
            self.__dict__.update(counts=counts, support=counts.support, expectation=counts.expectation)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.ZeroInflatedDistribution(self.counts(f), gate_logits=self._gate_logits(f))

    @pyro_method
    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Tensor:
        counted = self.counts.expected_log_prob(y, loc, var) + torch.log1p(-self.gate.to(loc.dtype))
        return torch.where(y > 0, counted, super().expected_log_prob(torch.zeros_like(y), loc, var))

    @pyro_method
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        return dist.ZeroInflatedDistribution(self.counts.marginal(loc, var), gate_logits=self._gate_logits(loc))

    def observations(self, y: Tensor) -> PseudoObservations | None:
        """Observations by the counts, with more noise at zeros, which may be extra zeros."""
        counted = self.counts.observations(y)
        if counted is None or counted.noise is None:
            return None
        return PseudoObservations.of(counted.obs, torch.where(y > 0, counted.noise, _EXTRA_ZERO * counted.noise))

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor | None:
        """The gate that explains the zeros among the data if counts are Poisson with the mean of positive neighbors."""
        if name != "gate" or self.takes_trials:  # counts of different numbers of trials do not compare
            return None
        some = (near > 0).sum(-1)
        mean, zero = near.sum(-1)[some > 0] / some[some > 0], (y[some > 0] == 0).to(y.dtype)
        chance = (-mean).exp()
        return ((zero - chance).sum() / (1 - chance).sum().clamp(min=1)).clamp(0.02, 0.9)

    def _gate_logits(self, f: Tensor) -> Tensor:
        gate = self.gate.to(f.dtype)
        return gate.log() - torch.log1p(-gate)


class Hurdle(_CountWrapper):
    r"""Zero with probability :math:`\pi`, else a positive count: zeros say nothing about f.

    Args:
        counts: as for :class:`ZeroTruncated`.
        gate: probability :math:`\pi` of a zero.

    Raises:
        TypeError: if ``counts`` is another likelihood.
        ValueError: if ``gate`` is not between 0 and 1.
    """

    support = constraints.nonnegative_integer
    expectation = "to be counts 0, 1, 2, .."
    cure = "Round them, or use a likelihood of continuous data."

    def __init__(self, counts: Likelihood, gate: Hyperparameter | None = None) -> None:
        super().__init__(counts)
        self.gate = between("Hurdle", "gate", gate, 0.0, 1.0, 0.2)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return _Hurdle(self.gate.to(f.dtype), _ZeroTruncated(self.counts(f)))

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor | None:
        return ((y == 0).to(y.dtype).sum() + 1) / (len(y) + 2) if name == "gate" else None


class ZeroTruncated(_CountWrapper):
    r"""Counts 1, 2, ..: a count given that it is not zero.

    With a :class:`Bernoulli` of zero or not, a second Gaussian process, this is the hurdle (delta) model whose zeros
    depend on place as the counts do.

    Args:
        counts: the likelihood of the counts: :class:`Poisson` or :class:`NegativeBinomial`.

    Raises:
        TypeError: if ``counts`` is another likelihood.
    """

    support = constraints.positive_integer
    expectation = "to be counts 1, 2, .."
    cure = "Drop the zeros, or use Hurdle()."

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return _ZeroTruncated(self.counts(f))


class _Hurdle(Expandable):
    """Zero with probability `gate`, else a draw of `positive`."""

    support = constraints.nonnegative_integer
    batched = "gate", "positive"

    def __init__(self, gate: Tensor, positive: Any) -> None:
        shape = torch.broadcast_shapes(gate.shape, positive.batch_shape)
        self.gate, self.positive = gate.expand(shape), positive.expand(shape)
        super().__init__(shape)

    @property
    def mean(self) -> Tensor:
        return (1 - self.gate) * self.positive.mean

    @property
    def variance(self) -> Tensor:
        return (1 - self.gate) * (self.positive.variance + self.positive.mean.square()) - self.mean.square()

    def _log_prob(self, value: Tensor) -> Tensor:
        counted = torch.log1p(-self.gate) + self.positive.log_prob(value.clamp(min=1))
        return torch.where(value > 0, counted, self.gate.log())

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        with torch.no_grad():
            count = self.positive.sample(sample_shape)
            return torch.where(torch.rand_like(count) < self.gate, 0.0, count)


class _ZeroTruncated(Expandable):
    """A Poisson or negative binomial distribution given that the count is positive."""

    support = constraints.positive_integer
    batched = ("counts",)

    def __init__(self, counts: Any) -> None:
        self.counts = counts
        super().__init__(counts.batch_shape)

    @property
    def mean(self) -> Tensor:
        return self.counts.mean / -torch.expm1(self._log_zero())

    @property
    def variance(self) -> Tensor:
        square = (self.counts.variance + self.counts.mean.square()) / -torch.expm1(self._log_zero())
        return square - self.mean.square()

    def _log_prob(self, value: Tensor) -> Tensor:
        return self.counts.log_prob(value) - torch.log(-torch.expm1(self._log_zero()))

    def _draw(self, shape: torch.Size) -> Tensor:
        rate = -self._log_zero().expand(shape)
        time = (torch.log1p(torch.rand_like(rate) * torch.expm1(-rate)) / -rate).clamp(0, 1)
        if isinstance(self.counts, dist.Poisson):
            return 1 + torch.poisson(rate * (1 - time))
        logits = self.counts.logits.expand(shape)
        size = (self.counts.total_count * (1 - time)).clamp(min=torch.finfo(rate.dtype).tiny)
        return _logarithmic(logits) + dist.NegativeBinomial(size, logits=logits).sample()

    def _log_zero(self) -> Tensor:
        """The log probability of a zero, accurate where it is tiny."""
        if isinstance(self.counts, dist.Poisson):
            return -self.counts.rate
        return self.counts.total_count * logsigmoid(-self.counts.logits)


def _logarithmic(logits: Tensor) -> Tensor:
    r"""Draws 1, 2, .. with probabilities proportional to :math:`p^k / k`, by Kemp's second algorithm."""
    log_q = torch.log(-torch.expm1(torch.rand_like(logits) * logsigmoid(-logits)))  # q = 1 - (1 - p)^U
    count = torch.log(torch.rand_like(logits).clamp(min=torch.finfo(logits.dtype).tiny)) / log_q
    return 1 + count.nan_to_num(0.0, posinf=0.0).floor()
