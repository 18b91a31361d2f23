r"""Likelihoods of labels, classes and ratings.

Closed forms: the marginals under probit links. Probabilities are logits throughout, so that float32 stays finite, with
finite gradients, far beyond :math:`f = \pm 50`.

Cost: O(1) per value and quadrature node; O(C) for C classes or ratings.
"""

from typing import Any, Literal, cast

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import PyroParam, pyro_method
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid
from torch.special import log_ndtr

from pyro_nngp._checks import check_choice, check_int, check_tensor, fail
from pyro_nngp.likelihoods.base import Likelihood, Marginal
from pyro_nngp.likelihoods.gumbel_max import expected_logsumexp, softmax_log_probs
from pyro_nngp.likelihoods.quadrature import BRANCH, Focus, at_zero

_INFINITY = 1e4  # used for the outermost cutpoints: no latent value comes near, and its logarithms stay finite


class Bernoulli(Likelihood):
    r"""Labels 0 and 1 with :math:`p(y = 1) = \sigma(f)` (logit) or :math:`\Phi(f)` (probit).

    Args:
        link: "logit" or "probit"; with "probit" the marginal has a closed form.
    """

    support = constraints.boolean
    expectation = "to be labels 0 and 1"
    cure = "Map two other labels with y == y.max()."

    def __init__(self, link: Literal["logit", "probit"] = "logit") -> None:
        super().__init__()
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


class Categorical(Likelihood):
    r"""Classes 0..C-1 with softmax probabilities, :math:`p(y = c) \propto e^{f_c}`; f has the shape (C, \*batch).

    Integrals are one-dimensional for any number of classes: :mod:`pyro_nngp.likelihoods.gumbel_max`.

    Args:
        num_classes: C; has to be given, since some classes may be missing from the data.

    Raises:
        ValueError, TypeError: if ``num_classes`` is not an integer >= 2.
    """

    def __init__(self, num_classes: int | None = None) -> None:
        super().__init__(num_quadrature=32)
        cure = "Give the number of distinct labels, as by Categorical(5)."
        check_int("Categorical", "num_classes", num_classes, 2, cure)
        num_classes = cast(int, num_classes)
        self.num_latents = num_classes
        self.support = constraints.integer_interval(0, num_classes - 1)
        self.expectation = f"to be labels in 0..{num_classes - 1}"
        self.cure = "Renumber them with torch.unique(y, return_inverse=True)."

    def forward(self, f: Float[Tensor, "C ..."]) -> Distribution:
        return dist.Categorical(logits=f.movedim(0, -1))

    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "C ..."], var: Float[Tensor, "C ..."]) -> Tensor:
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

    Raises:
        ValueError: if ``cutpoints`` is not a strictly increasing vector.
    """

    elementwise = False

    def __init__(self, cutpoints: Float[Tensor, " R"], link: Literal["logit", "probit"] = "logit") -> None:
        super().__init__()
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
        center = interval_middles(self.cutpoints.detach(), y)
        return center, torch.full_like(center, BRANCH)

    @pyro_method
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


def interval_middles(cutpoints: Float[Tensor, "... R"], number: Tensor) -> Float[Tensor, "..."]:
    """Middles of numbered intervals between cutpoints; the finite end of an unbounded one."""
    last, shape = cutpoints.shape[-1] - 1, torch.broadcast_shapes(cutpoints.shape[:-1], number.shape)
    cutpoints, number = cutpoints.expand(*shape, -1), number.long()[..., None].expand(*shape, 1)
    upper, lower = cutpoints.gather(-1, number.clamp(max=last)), cutpoints.gather(-1, (number - 1).clamp(min=0))
    return (upper + lower)[..., 0] / 2


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
