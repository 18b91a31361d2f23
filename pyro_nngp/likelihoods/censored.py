r"""Data that are known only in part: censored at a limit (Tobit), or recorded as one of several intervals.

The variable is normal or log-normal, so that marginals have closed forms, and so have expected log-densities of values
that are observed. Normal probabilities are computed as logarithms, finite in the far tails. Reference: Tobin (1958),
"Estimation of relationships for limited dependent variables", Econometrica. Cost: O(1) per value; O(C) for C intervals.
"""

import math
from typing import Any, Literal, NamedTuple

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import pyro_method
from torch import Tensor
from torch.distributions import Distribution
from torch.special import log_ndtr, ndtr

from pyro_nngp._checks import check_number, check_tensor, fail
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.likelihoods.base import Likelihood
from pyro_nngp.likelihoods.continuous import Gaussian, LogNormal
from pyro_nngp.likelihoods.labels import interval_middles, interval_probabilities
from pyro_nngp.likelihoods.observations import PseudoObservations
from pyro_nngp.likelihoods.quadrature import BRANCH, Focus

_FAR = 1e4  # standardized value of an absent limit
_BY_ROW = "limits"


class _Recorded(constraints.Constraint):
    """Numbers above `least` and between two limits."""

    def __init__(self, least: float, lower: float | Tensor, upper: float | Tensor) -> None:
        self.least, self.lower, self.upper = least, lower, upper

    def check(self, value: Tensor) -> Tensor:
        return (value > self.least) & (value >= self.lower) & (value <= self.upper)


class _PartlyObserved(Likelihood):
    """Base class of partial observations of a value with normal noise on the scale of f; its likelihood is `values`."""

    values: Likelihood

    def __init__(self, values: Likelihood) -> None:
        super().__init__()
        if not isinstance(values, Gaussian | LogNormal):
            name, cure = type(self).__name__, "Pass one of them."
            fail(name, "values", "to be Gaussian or LogNormal", f"{values!r:.60}", cure, TypeError)
        self.values = values

    @property
    def is_log(self) -> bool:
        """Whether f is the mean of the logarithm of the value."""
        return isinstance(self.values, LogNormal)

    def _latent_scale(self, y: Tensor) -> Tensor:
        """Values on the scale of f."""
        return y.log() if self.is_log else y


class Censored(_PartlyObserved):
    r"""A normal or log-normal value that is recorded as the limit where it lies beyond the limit (Tobit).

    A measurement below the limit of detection, for instance, is recorded as that limit. Predictions of y are of the
    record, predictions of f of the value itself.

    Limits may differ between rows, as between laboratories, or between times at which a study ends. The method then
    gets them as ``limits``: for the data, and for new rows where predictions are to be of the record. Without limits of
    new rows predictions are of the value itself.

    Args:
        values: :class:`Gaussian` or :class:`LogNormal`, the likelihood of the value.
        lower: lower limit; data equal to it stand for this value or less. None for no limit, "limits" for one per row.
        upper: upper limit, likewise.

    Raises:
        TypeError: if ``values`` is another likelihood, or a limit not a number.
        ValueError: if there is no limit, if they are not in order, not positive with :class:`LogNormal`, or both
            "limits".
    """

    def __init__(
        self,
        values: Likelihood,
        lower: float | Literal["limits"] | None = None,
        upper: float | Literal["limits"] | None = None,
    ) -> None:
        super().__init__(values)
        least, numbers = 0.0 if self.is_log else -math.inf, []
        for arg, limit, without in (("lower", lower, -math.inf), ("upper", upper, math.inf)):
            if limit is not None and not (isinstance(limit, str) and limit == _BY_ROW):
                check_number("Censored", arg, limit, least, 'Pass a number, in the unit of y, or "limits".')
            numbers.append(without if limit is None or limit == _BY_ROW else float(limit))
        low, high = numbers
        if lower == upper or low >= high or (self.is_log and 0 in (low, high)):
            expectation = "with one of them at least, positive for log-normal values"
            cure = "Pass the limit of detection as lower, or the largest value that is recorded as upper."
            fail("Censored", "lower < upper", expectation, f"{lower} and {upper}", cure)
        self._by_row = [limit == _BY_ROW for limit in (lower, upper)]
        self.takes_limits = any(self._by_row)
        self.cure = "Record values beyond a limit as that limit."
        self._limit(low, high)

    def _set_rows(self, trials: Tensor | None, limits: Tensor | None) -> None:
        if limits is not None:
            ends = zip(self._by_row, self._ends, strict=True)
            self._limit(*(limits if is_of_row else own for is_of_row, own in ends))

    def _limit(self, low: float | Tensor, high: float | Tensor) -> None:
        least = 0.0 if self.is_log else -math.inf
        start = low if isinstance(low, Tensor) else max(low, least)
        lower, upper = ("the limit of their row" if isinstance(v, Tensor) else f"{v:g}" for v in (start, high))
        self.__dict__["_ends"], self.__dict__["support"] = (low, high), _Recorded(least, low, high)
        self.__dict__["expectation"] = f"to be from {lower} to {upper}"

    def admissible(self, y: Tensor) -> Tensor:
        low, high = self._ends
        return _finite(*_Ends.of(low, high, y), torch.ones_like(y))

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return _Clamped(self.values(f), *self._ends)

    def focus(self, y: Tensor) -> Focus:
        """The limit, where the distribution function bends; only censored data need quadrature."""
        limit = self._latent_scale(y)
        return limit, BRANCH * self.values.variance.detach().to(limit.dtype).sqrt().expand_as(limit)

    def observations(self, y: Tensor) -> PseudoObservations:
        return PseudoObservations.of(self._latent_scale(y))

    @pyro_method
    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Tensor:
        low, high = self._ends
        ends = _Ends.of(low, high, loc)
        is_seen = ends.inside(y)
        censored = super().expected_log_prob(torch.where(is_seen, _finite(*ends, y), y), loc, var)
        return torch.where(is_seen, self.values.expected_log_prob(y, loc, var), censored)

    @pyro_method
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        return _Clamped(self.values.marginal(loc, var), *self._ends)


class IntervalCensored(_PartlyObserved):
    r"""A normal or log-normal value of which only the interval is recorded, such as a class of income or of size.

    y is the number of the interval: 0 is everything up to the first edge, 1 the values from there to the second, and so
    on; R, the last, is everything beyond the last edge.

    Args:
        values: :class:`Gaussian` or :class:`LogNormal`, the likelihood of the value.
        edges: the edges between the intervals, shape (R,), in the unit of the value.

    Raises:
        TypeError: if ``values`` is another likelihood, or ``edges`` not a tensor.
        ValueError: if ``edges`` is not a finite and strictly increasing vector, or not positive with
            :class:`LogNormal`.
    """

    def __init__(self, values: Likelihood, edges: Float[Tensor, " R"]) -> None:
        super().__init__(values)
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
        middle = interval_middles(self._latent_scale(self.edges), y)
        return middle, BRANCH * self.values.variance.detach().to(middle.dtype).sqrt().expand_as(middle)

    @pyro_method
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        return self._intervals(loc, var)

    def observations(self, y: Tensor) -> PseudoObservations:
        return PseudoObservations.of(interval_middles(self._latent_scale(self.edges), y))

    def _intervals(self, loc: Tensor, var: Tensor) -> Distribution:
        sd = (var + self.values.variance.to(loc.dtype)).sqrt()
        return interval_probabilities(self._latent_scale(self.edges).to(loc.dtype) / sd[..., None], loc / sd, "probit")


class _Ends(NamedTuple):
    """Limits as tensors; infinite where there is none."""

    lower: Tensor
    upper: Tensor

    @staticmethod
    def of(lower: float | Tensor, upper: float | Tensor, like: Tensor) -> "_Ends":
        """Limits in the dtype of a tensor and on its device."""
        lower, upper = (torch.as_tensor(limit, dtype=like.dtype, device=like.device) for limit in (lower, upper))
        return _Ends(lower, upper)

    def inside(self, value: Tensor) -> Tensor:
        """Whether values are between the limits."""
        return (value > self.lower) & (value < self.upper)


class _Clamped(Expandable):
    """A normal or log-normal value clamped to limits."""

    batched = ("values",)
    has_atoms = True  # at the limits

    def __init__(self, values: Any, lower: float | Tensor, upper: float | Tensor) -> None:
        self.values, self._given, self._is_log = values, (lower, upper), isinstance(values, dist.LogNormal)
        self._ends = _Ends.of(lower, upper, values.loc)
        super().__init__(values.batch_shape)

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        return _Recorded(0.0 if self._is_log else -math.inf, *self._given)

    @property
    def mean(self) -> Tensor:
        return self._moments()[0]

    @property
    def variance(self) -> Tensor:
        return self._moments()[1]

    def cdf(self, value: Tensor) -> Tensor:
        below = self.values.cdf(value.clamp(min=torch.finfo(value.dtype).tiny) if self._is_log else value)
        low, high = self._ends
        return torch.where(value >= high, 1.0, torch.where(value < low, 0.0, below))

    def _log_prob(self, value: Tensor) -> Tensor:
        low, high = (self._standardized(limit) for limit in self._ends)
        is_seen = self._ends.inside(value)
        inside = self.values.log_prob(torch.where(is_seen, value, _finite(*self._ends, value)))
        return torch.where(is_seen, inside, torch.where(value <= self._ends.lower, log_ndtr(low), log_ndtr(-high)))

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        return self.values.sample(sample_shape).clamp(*self._ends)

    def _standardized(self, limit: Tensor) -> Tensor:
        """The limit in standard deviations from the mean, on the scale of f; far beyond the data if there is none."""
        is_there = limit.isfinite() & (limit > 0) if self._is_log else limit.isfinite()
        there = torch.where(is_there, limit, 1.0)
        standardized = ((there.log() if self._is_log else there) - self.values.loc) / self.values.scale
        return torch.where(is_there, standardized, torch.where(limit > 1, _FAR, -_FAR))

    def _moments(self) -> tuple[Tensor, Tensor]:
        loc, sd = self.values.loc, self.values.scale
        low, high = (self._standardized(limit) for limit in self._ends)
        below, above = ndtr(low), ndtr(-high)
        if not self._is_log:
            p, q = ((-z.square() / 2).exp() / math.sqrt(2 * math.pi) for z in (low, high))
            first = low * below + high * above + p - q
            second = low.square() * below + high.square() * above + ndtr(high) - below + low * p - high * q
            return loc + sd * first, sd.square() * (second - first.square()).clamp(min=0)

        def moment(k: int) -> Tensor:
            inside = (k * loc + (k * sd).square() / 2).exp() * (ndtr(high - k * sd) - ndtr(low - k * sd))
            lower, upper = (torch.where(limit.isfinite(), limit, 0.0) for limit in self._ends)
            return inside + lower**k * below + upper**k * above

        return moment(1), (moment(2) - moment(1).square()).clamp(min=0)


def _finite(lower: Tensor, upper: Tensor, value: Tensor) -> Tensor:
    """An admissible value for entries whose result is not used: a finite limit, else the value itself."""
    limit = torch.where(lower.isfinite() & (lower != 0), lower, upper)
    return torch.where(limit.isfinite(), limit, value)
