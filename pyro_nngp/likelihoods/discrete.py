r"""Likelihoods of labels, classes, ratings and counts.

Closed forms (m, v the mean and variance of f): the expected log-density of the Poisson with exponential link, and the
marginals under probit links. Probabilities are handled as logits throughout, so that float32 stays finite, with finite
gradients, far beyond :math:`f = \pm 50`.

Cost: O(1) per value and quadrature node; O(C) for C classes or ratings.
"""

from typing import Any, Literal, cast

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid, softplus
from torch.special import log_ndtr

from pyro_nngp._checks import check_choice, check_int, check_tensor, fail
from pyro_nngp.hyperparameters import Hyperparameter, positive, pyro_entry
from pyro_nngp.likelihoods.base import Likelihood, Marginal, bounded
from pyro_nngp.likelihoods.gumbel_max import expected_logsumexp, softmax_log_probs
from pyro_nngp.likelihoods.quadrature import BRANCH, Focus, at_zero

_INFINITY = 1e4  # used for the outermost cutpoints: no latent value comes near, and its logarithms stay finite


class Bernoulli(Likelihood):
    r"""Labels 0 and 1 with :math:`p(y = 1) = \sigma(f)` (logit) or :math:`\Phi(f)` (probit).

    Args:
        link: "logit" or "probit"; with "probit" the marginal has a closed form.
        num_quadrature: number of nodes of the expected log-density.
    """

    support = constraints.boolean
    expectation = "to be labels 0 and 1"
    cure = "Map two other labels with y == y.max()."

    def __init__(self, link: Literal["logit", "probit"] = "logit", num_quadrature: int = 48) -> None:
        super().__init__(num_quadrature)
        check_choice("Bernoulli", "link", link, ("logit", "probit"))
        self.link = link

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return _Bernoulli(logits=f if self.link == "logit" else log_ndtr(f) - log_ndtr(-f))

    def focus(self, y: Tensor) -> Focus:
        return at_zero(y)

    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        if self.link == "probit":
            return self.forward(loc / (1 + var).sqrt())
        sign = torch.where(loc > 0, -1, 1).to(loc.dtype)  # the rarer label only, by symmetry
        rarer = Marginal(self, sign * loc, var).log_prob(torch.ones_like(loc))
        return _Bernoulli(logits=sign * (rarer - torch.log1p(-rarer.exp())))


class OutOfTrials(Likelihood):
    """Base class of likelihoods of successes among n trials.

    Args:
        total_count: number n of trials, if it is the same for all data; None where the method gets one per row, as
            ``trials``.
        num_quadrature: number of nodes of the expected log-density.

    Raises:
        ValueError, TypeError: if ``total_count`` is not an integer >= 1.
    """

    total_count: Any
    cure = "Pass the number of successes, not their share, and the trials of each row."

    def __init__(self, total_count: int | None = None, num_quadrature: int = 48) -> None:
        super().__init__(num_quadrature)
        self.takes_trials = total_count is None
        if total_count is not None:
            check_int(type(self).__name__, "total_count", total_count, 1, "Pass the number of trials.")
        self._count(1 if total_count is None else total_count)

    def take_rows(self, trials: Tensor | None, limits: Tensor | None) -> None:
        if trials is not None:
            self._count(trials)

    def overdispersion(self) -> Tensor | float:
        """The variance of y given f, in multiples of that of a binomial variable."""
        return 1.0

    def _count(self, trials: int | Tensor) -> None:
        of_each = "their row's trials" if isinstance(trials, Tensor) else trials
        self.__dict__["total_count"], self.__dict__["support"] = trials, constraints.integer_interval(0, trials)
        self.__dict__["expectation"] = f"to be counts in 0..{of_each}"


class Binomial(OutOfTrials):
    r"""Successes among n trials, :math:`y \sim Binomial(n, \sigma(f))`; arguments as for :class:`OutOfTrials`."""

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.Binomial(self.total_count, logits=f)

    def focus(self, y: Tensor) -> Focus:
        return at_zero(y)


class Poisson(Likelihood):
    r"""Counts :math:`y \sim Poisson(g(f))` with :math:`g = \exp` or :math:`g(f) = \log(1 + e^f)` (softplus).

    Args:
        link: "exp" or "softplus"; with "exp" the expected log-density has a closed form.
        num_quadrature: number of nodes of the expected log-density (softplus) and of the marginal moments.
    """

    support = constraints.nonnegative_integer
    expectation = "to be counts 0, 1, 2, .."
    cure = "Round them, or use a likelihood of continuous data."

    def __init__(self, link: Literal["exp", "softplus"] = "exp", num_quadrature: int = 48) -> None:
        super().__init__(num_quadrature)
        check_choice("Poisson", "link", link, ("exp", "softplus"))
        self.link = link

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.Poisson(bounded(f).exp() if self.link == "exp" else softplus(f.clamp(min=-80)))

    def focus(self, y: Tensor) -> Focus:
        return at_zero(y) if self.link == "softplus" else (y.clamp(min=1).log(), torch.ones_like(y))

    def expected_log_prob(
        self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        if self.link == "softplus":
            return super().expected_log_prob(y, loc, var)
        return y * loc - bounded(loc + var / 2).exp() - torch.lgamma(1 + y.to(loc.dtype))


class NegativeBinomial(Likelihood):
    r"""Overdispersed counts, :math:`y \sim NB(r, \sigma(f))` with mean :math:`r e^f`, variance :math:`r e^f (1 + e^f)`.

    The logits are f itself, the form that Polya-Gamma augmentation needs. In the form with mean :math:`e^g` and the
    same dispersion r, :math:`g = f + \log r`: a shift of the prior mean.

    Args:
        total_count: dispersion r > 0; the Poisson is the limit of large r.
        num_quadrature: number of nodes of expectations.
    """

    support = constraints.nonnegative_integer
    expectation = "to be counts 0, 1, 2, .."
    cure = "Round them, or use a likelihood of continuous data."

    def __init__(self, total_count: Hyperparameter | None = None, num_quadrature: int = 48) -> None:
        super().__init__(num_quadrature)
        self.total_count = positive("NegativeBinomial", "total_count", total_count)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return dist.NegativeBinomial(self.total_count.to(f.dtype), logits=bounded(f))

    def focus(self, y: Tensor) -> Focus:
        return at_zero(y)


class Categorical(Likelihood):
    r"""Classes 0..C-1 with softmax probabilities, :math:`p(y = c) \propto e^{f_c}`; f has the shape (C, \*batch).

    Integrals are one-dimensional for any number of classes: :mod:`pyro_nngp.likelihoods.gumbel_max`.

    Args:
        num_classes: C; has to be given, since some classes may be missing from the data.
        num_quadrature: number of nodes of the expected log-density.

    Raises:
        ValueError, TypeError: if ``num_classes`` is not an integer >= 2.
    """

    def __init__(self, num_classes: int | None = None, num_quadrature: int = 32) -> None:
        super().__init__(num_quadrature)
        cure = "Give the number of distinct labels, as by Categorical(5)."
        check_int("Categorical", "num_classes", num_classes, 2, cure)
        num_classes = cast(int, num_classes)
        self.num_latents = num_classes
        self.support = constraints.integer_interval(0, num_classes - 1)
        self.expectation = f"to be labels in 0..{num_classes - 1}"
        self.cure = "Renumber them with torch.unique(y, return_inverse=True)."

    def forward(self, f: Float[Tensor, "C ..."]) -> Distribution:
        return dist.Categorical(logits=f.movedim(0, -1))

    def expected_log_prob(
        self, y: Tensor, loc: Float[Tensor, "C ..."], var: Float[Tensor, "C ..."]
    ) -> Float[Tensor, "..."]:
        loc, var = torch.broadcast_tensors(loc, var)
        log_normalizer = expected_logsumexp(loc, var, self.num_quadrature)
        return loc.gather(0, y.long().expand(loc.shape[1:])[None]).squeeze(0) - log_normalizer

    def marginal(self, loc: Float[Tensor, "C ..."], var: Float[Tensor, "C ..."]) -> Distribution:
        log_probs = softmax_log_probs(*torch.broadcast_tensors(loc, var))
        return dist.Categorical(logits=log_probs.movedim(0, -1))


class Ordinal(Likelihood):
    r"""Ratings 0..C-1 with :math:`p(y \le k) = F(c_k - f)`, F the logistic (logit) or the normal (probit) distribution.

    Args:
        cutpoints: :math:`c_0 < .. < c_{C-2}`, shape (R,) with R = C - 1, initial values of an ordered ``PyroParam``.
        link: "logit" or "probit"; with "probit" the marginal has a closed form.
        num_quadrature: number of nodes of the expected log-density.

    Raises:
        ValueError: if ``cutpoints`` is not a strictly increasing vector.
    """

    elementwise = False

    def __init__(
        self, cutpoints: Float[Tensor, " R"], link: Literal["logit", "probit"] = "logit", num_quadrature: int = 48
    ) -> None:
        super().__init__(num_quadrature)
        check_tensor("Ordinal", "cutpoints", cutpoints)
        cure = "Start e.g. from torch.linspace(-2, 2, C - 1)."
        if not cutpoints.is_floating_point() or not bool(cutpoints.isfinite().all()):
            fail("Ordinal", "cutpoints", "to be finite, in floating point", cutpoints.tolist(), cure)
        if cutpoints.dim() != 1 or len(cutpoints) < 1 or not bool((cutpoints.diff() > 0).all()):
            fail("Ordinal", "cutpoints", "to be a strictly increasing vector", cutpoints.tolist(), cure)
        self.cutpoints: Any = PyroParam(cutpoints, constraints.ordered_vector)
        check_choice("Ordinal", "link", link, ("logit", "probit"))
        self.link = link
        self.support = constraints.integer_interval(0, len(cutpoints))
        self.expectation = f"to be ratings in 0..{len(cutpoints)}"
        self.cure = "Renumber them from 0, in order."

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return interval_probabilities(self.cutpoints.to(f.dtype), f, self.link)

    def focus(self, y: Tensor) -> Focus:
        """The middle of the rating's interval, or its only finite end."""
        cutpoints, rating = self.cutpoints.detach(), y.long()[..., None]
        last, shape = cutpoints.shape[-1] - 1, torch.broadcast_shapes(cutpoints.shape[:-1], y.shape)
        cutpoints, rating = cutpoints.expand(*shape, -1), rating.expand(*shape, 1)
        upper, lower = cutpoints.gather(-1, rating.clamp(max=last)), cutpoints.gather(-1, (rating - 1).clamp(min=0))
        center = (upper + lower)[..., 0] / 2
        return center, torch.full_like(center, BRANCH)

    @pyro_entry
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        if self.link == "probit":
            scale = (1 + var).sqrt()
            return interval_probabilities(self.cutpoints.to(loc.dtype) / scale[..., None], loc / scale, self.link)
        bound = cast(Ordinal, self.bind())
        ratings = torch.arange(bound.cutpoints.shape[-1] + 1, device=loc.device)
        if bound.cutpoints.dim() > 1:  # batches of them, in front of the points
            bound.__dict__["cutpoints"] = bound.cutpoints[..., None, :]
        return _Ratings(logits=Marginal(bound, loc[..., None], var[..., None]).log_prob(ratings))


def interval_probabilities(
    cutpoints: Float[Tensor, "... R"], f: Float[Tensor, "..."], link: Literal["logit", "probit"]
) -> Distribution:
    """Probabilities F(upper - f) - F(lower - f) of the R + 1 intervals between cutpoints, accurate in the tails too."""
    ends = cutpoints.new_full((*cutpoints.shape[:-1], 1), _INFINITY)
    bounds = torch.cat([-ends, cutpoints, ends], -1)
    lower, upper = bounds[..., :-1] - f[..., None], bounds[..., 1:] - f[..., None]
    if link == "logit":
        logits = logsigmoid(upper) + logsigmoid(-lower) + torch.log(-torch.expm1(-bounds.diff()))
    else:
        flip = lower + upper > 0  # to the left tail
        log_low = log_ndtr(torch.where(flip, -upper, lower))
        log_high = log_ndtr(torch.where(flip, -lower, upper))
        logits = log_high + torch.log(-torch.expm1(log_low - log_high))
    return _Ratings(logits=logits)


class _Ratings(dist.Categorical):
    """A categorical distribution of numbers in order, which have a mean and a variance."""

    @property
    def mean(self) -> Tensor:
        return (self.probs * self._values).sum(-1)

    @property
    def variance(self) -> Tensor:
        return (self.probs * (self._values - self.mean[..., None]).square()).sum(-1)

    @property
    def _values(self) -> Tensor:
        return torch.arange(self.probs.shape[-1]).to(self.probs)


class _Bernoulli(dist.Bernoulli):
    """A Bernoulli distribution that also takes labels of integer and boolean type."""

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value.to(self.logits.dtype))
