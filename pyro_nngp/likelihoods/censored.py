r"""Data that are known only in part: censored at a limit (Tobit), or recorded as one of several intervals.

Both are of a normal or log-normal variable, whose distribution function is known, so that marginals have closed forms,
and expected log-densities too where a value is observed. Probabilities are those of the normal distribution by
logarithms, finite in the far tails. Reference: Tobin (1958), "Estimation of relationships for limited dependent
variables", Econometrica. Cost: O(1) per value; O(C) for C intervals.
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import Distribution
from torch.special import log_ndtr, ndtr

from pyro_nngp._checks import check_number, check_tensor, fail
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.likelihoods.base import Likelihood
from pyro_nngp.likelihoods.continuous import Gaussian, LogNormal
from pyro_nngp.likelihoods.discrete import interval_probabilities
from pyro_nngp.likelihoods.quadrature import BRANCH, Focus

_FAR = 1e4  # standard deviations to a limit that is not there


class _Recorded(constraints.Constraint):
    """Numbers above `least`, from one limit to the other."""

    def __init__(self, least: float, lower: float, upper: float) -> None:
        self.least, self.lower, self.upper = least, lower, upper

    def check(self, value: Tensor) -> Tensor:
        return (value > self.least) & (value >= self.lower) & (value <= self.upper)


class _PartlyObserved(Likelihood):
    """What is known of a value with normal noise on the scale of f, whose likelihood is the attribute `values`."""

    values: Likelihood

    def __init__(self, values: Likelihood, num_quadrature: int) -> None:
        super().__init__(num_quadrature)
        if not isinstance(values, Gaussian | LogNormal):
            name, cure = type(self).__name__, "Pass one of them."
            fail(name, "values", "to be Gaussian or LogNormal", f"{values!r:.60}", cure, TypeError)
        self.values = values

    @property
    def is_log(self) -> bool:
        return isinstance(self.values, LogNormal)


class Censored(_PartlyObserved):
    r"""A normal or log-normal value that is recorded as a limit where it lies beyond it (Tobit).

    A measurement below the limit of detection, for instance, is recorded as that limit. Predictions of y are of what
    would be recorded; those of f are of the value itself.

    Args:
        values: :class:`Gaussian` or :class:`LogNormal`, the likelihood of the value.
        lower: data equal to it are at most that; None is no such limit.
        upper: data equal to it are at least that.
        num_quadrature: number of nodes of the expected log-density of a censored value.

    Raises:
        TypeError: if ``values`` is another likelihood, or a limit not a number.
        ValueError: if there is no limit, if they are not in order, or not positive with :class:`LogNormal`.
    """

    def __init__(
        self, values: Likelihood, lower: float | None = None, upper: float | None = None, num_quadrature: int = 48
    ) -> None:
        super().__init__(values, num_quadrature)
        least = 0.0 if self.is_log else -math.inf
        for arg, limit in (("lower", lower), ("upper", upper)):
            if limit is not None:
                check_number("Censored", arg, limit, least, "Pass a number, in the unit of y.")
        low, high = -math.inf if lower is None else float(lower), math.inf if upper is None else float(upper)
        if (lower is None and upper is None) or low >= high or (self.is_log and 0 in (low, high)):
            expectation = "with one of them at least, positive for log-normal values"
            cure = "Pass the limit of detection as lower, or the largest value that is recorded as upper."
            fail("Censored", "lower < upper", expectation, f"{lower} and {upper}", cure)
        self.lower, self.upper, self.support = low, high, _Recorded(least, low, high)
        self.expectation = f"to be from {max(low, least):g} to {high:g}"
        self.cure = "Record values beyond a limit as that limit."

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return _Clamped(self.values(f), self.lower, self.upper)

    def focus(self, y: Tensor) -> Focus:
        """The limit, where the distribution function bends; only censored data need quadrature."""
        limit = self.direct(y)
        return limit, BRANCH * self.values.variance.detach().to(limit.dtype).sqrt().expand_as(limit)

    def direct(self, y: Tensor) -> Tensor:
        return y.log() if self.is_log else y

    @pyro_entry
    def expected_log_prob(
        self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        is_seen = (y > self.lower) & (y < self.upper)
        censored = super().expected_log_prob(torch.where(is_seen, _finite(self), y), loc, var)
        return torch.where(is_seen, self.values.expected_log_prob(y, loc, var), censored)

    @pyro_entry
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        return _Clamped(self.values.marginal(loc, var), self.lower, self.upper)


class IntervalCensored(_PartlyObserved):
    r"""A normal or log-normal value of which only the interval is recorded, such as a class of income or of size.

    y is the number of the interval: 0 is everything up to the first edge, 1 the values from there to the second, and so
    on; R, the last, is everything beyond the last edge.

    Args:
        values: :class:`Gaussian` or :class:`LogNormal`, the likelihood of the value.
        edges: the edges between the intervals, shape (R,), in the unit of the value.
        num_quadrature: number of nodes of the expected log-density.

    Raises:
        TypeError: if ``values`` is another likelihood, or ``edges`` not a tensor.
        ValueError: if ``edges`` is not a finite and strictly increasing vector, or not positive with
            :class:`LogNormal`.
    """

    def __init__(self, values: Likelihood, edges: Float[Tensor, " R"], num_quadrature: int = 48) -> None:
        super().__init__(values, num_quadrature)
        name = type(self).__name__
        check_tensor(name, "edges", edges)
        is_vector = edges.dim() == 1 and len(edges) > 0 and edges.is_floating_point()
        least = 0.0 if self.is_log else -math.inf
        if not (is_vector and bool((edges.isfinite() & (edges > least)).all() & (edges.diff() > 0).all())):
            expectation = f"to be a strictly increasing vector of finite numbers above {least:g}"
            fail(name, "edges", expectation, edges.tolist(), "Leave the unbounded ends out.")
        self.register_buffer("edges", edges)
        self.support = constraints.integer_interval(0, len(edges))
        self.expectation = f"to be numbers of intervals, in 0..{len(edges)}"
        self.cure = "Number them with torch.bucketize(values, edges)."

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return self._intervals(f, torch.zeros_like(f))

    def focus(self, y: Tensor) -> Focus:
        """The middle of the interval, or its only finite end."""
        middle = self.direct(y)
        return middle, BRANCH * self.values.variance.detach().to(middle.dtype).sqrt().expand_as(middle)

    @pyro_entry
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        return self._intervals(loc, var)

    def direct(self, y: Tensor) -> Tensor:
        edges, number = self._edges(), y.long()
        return (edges[number.clamp(max=len(edges) - 1)] + edges[(number - 1).clamp(min=0)]) / 2

    def _edges(self) -> Tensor:
        """On the scale of f."""
        return self.edges.log() if self.is_log else self.edges

    def _intervals(self, loc: Tensor, var: Tensor) -> Distribution:
        sd = (var + self.values.variance.to(loc.dtype)).sqrt()
        return interval_probabilities(self._edges().to(loc.dtype) / sd[..., None], loc / sd, "probit")


class _Clamped(Expandable):
    """A normal or log-normal value clamped to limits."""

    arg_constraints: dict[str, constraints.Constraint] = {}
    batched = ()

    def __init__(self, values: Any, lower: float, upper: float, validate_args: bool | None = None) -> None:
        self.values, self.lower, self.upper = values, lower, upper
        self._is_log = isinstance(values, dist.LogNormal)
        super().__init__(values.batch_shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        return _Recorded(0.0 if self._is_log else -math.inf, self.lower, self.upper)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "_Clamped":
        return _Clamped(self.values.expand(batch_shape), self.lower, self.upper, self._validate_args)

    @property
    def mean(self) -> Tensor:
        return self._moments()[0]

    @property
    def variance(self) -> Tensor:
        return self._moments()[1]

    def cdf(self, value: Tensor) -> Tensor:
        below = self.values.cdf(value.clamp(min=torch.finfo(value.dtype).tiny) if self._is_log else value)
        return torch.where(value >= self.upper, 1.0, torch.where(value < self.lower, 0.0, below))

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        low, high = (self._standardized(limit) for limit in (self.lower, self.upper))
        is_seen = (value > self.lower) & (value < self.upper)
        inside = self.values.log_prob(torch.where(is_seen, value, _finite(self)))
        return torch.where(is_seen, inside, torch.where(value <= self.lower, log_ndtr(low), log_ndtr(-high)))

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        return self.values.sample(sample_shape).clamp(self.lower, self.upper)

    def _standardized(self, limit: float) -> Tensor:
        """The limit in standard deviations from the mean, on the scale of f; far beyond the data if there is none."""
        if not math.isfinite(limit):
            return torch.full_like(self.values.loc, math.copysign(_FAR, limit))
        return ((math.log(limit) if self._is_log else limit) - self.values.loc) / self.values.scale

    def _moments(self) -> tuple[Tensor, Tensor]:
        loc, sd = self.values.loc, self.values.scale
        low, high = self._standardized(self.lower), self._standardized(self.upper)
        below, above = ndtr(low), ndtr(-high)
        if not self._is_log:
            p, q = ((-z.square() / 2).exp() / math.sqrt(2 * math.pi) for z in (low, high))
            first = low * below + high * above + p - q
            second = low.square() * below + high.square() * above + ndtr(high) - below + low * p - high * q
            return loc + sd * first, sd.square() * (second - first.square()).clamp(min=0)

        def moment(k: int) -> Tensor:
            inside = (k * loc + (k * sd).square() / 2).exp() * (ndtr(high - k * sd) - ndtr(low - k * sd))
            ends = [(self.lower, below), (self.upper, above)]
            return inside + sum(limit**k * share for limit, share in ends if math.isfinite(limit))

        return moment(1), (moment(2) - moment(1).square()).clamp(min=0)


def _finite(limits: Censored | _Clamped) -> float:
    """A possible value of y, for places whose result is not used."""
    return min(limits.upper, abs(limits.lower))
