r"""Gaussian observations of f that replace the data before any model of f is known.

Targets with an identity link are observations themselves. For other links, each datum gives one by a Laplace
approximation of its likelihood under a wide prior around the level :math:`f_0` that fits all data best,

.. math:: \hat f_i = \arg\max_f \log p(y_i \mid f) - (f - f_0)^2 / 2 s^2, \qquad
   \delta_i = -1 / \partial^2_f \log p(y_i \mid \hat f_i), \qquad
   \tilde y_i = \hat f_i + \delta_i\, \partial_f \log p(y_i \mid \hat f_i).

Cost: 60 log densities per distinct datum, and 200 at some 1,024 of them for the level. Symbols: N data, L latent
functions or outputs.
"""

from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.likelihoods.base import Likelihood
from pyro_nngp.likelihoods.continuous import Gamma, HeteroskedasticGaussian
from pyro_nngp.likelihoods.discrete import Categorical, NegativeBinomial, OutOfTrials
from pyro_nngp.likelihoods.polya_gamma import PolyaGammaBound
from pyro_nngp.likelihoods.softmax_counts import Multinomial

_SPREAD = 2.0  # s, on the scale of a logarithm or logit
_FARTHEST = 6.0  # that an observation may lie from the mode: log densities that are all but linear have no other bound
_RANGE, _ACCURACY = 60.0, 1e-4  # of levels
_GRID = 17  # levels tried at a time; the next ones lie within two of their steps around the best
_ENTRIES = 2**22  # log densities at once
_STEPS = 20
_STEP = 1e-3  # of central differences
_LEAST_PRECISION = 1e-3
_LEVEL_POINTS = 512  # or up to twice as many
_SHARING = 4  # neighbors that are taken to have the f of a count
_SIZES = (-1.0, 3.0, 81)  # r from .1 to 1,000
_EXTRA_ZERO = 10.0  # times the noise of a zero that may have come from elsewhere


class PseudoObservations(NamedTuple):
    """Observations of f.

    Attributes:
        level: a robust level of each latent function, () or (L,).
        obs: observations, (N,) or (L, N).
        noise: their noise variances, of the same shape; None if they are the targets themselves, whose noise is to be
            estimated.
    """

    level: Tensor
    obs: Tensor
    noise: Tensor | None


@torch.no_grad()
def pseudo_observations(likelihood: Likelihood, y: Tensor, level: Tensor | None = None) -> PseudoObservations:
    """Observations of f in float64.

    Args:
        likelihood: with its hyperparameters read, as :meth:`Likelihood.bind` returns it.
        y: targets, outputs first, (*T, N), of any dtype.
        level: level of labels and counts, if that of y does not count; see :class:`PseudoObservations`.
    """
    if isinstance(likelihood, HeteroskedasticGaussian):
        y = y.double()
        residual = (y - y.median()).abs().median().clamp(min=torch.finfo(y.dtype).tiny)
        level = torch.stack([y.median(), 2 * (residual / 0.6745).log()])
        return PseudoObservations(level, y[None], None)
    base = likelihood.base if isinstance(likelihood, PolyaGammaBound) else likelihood
    if isinstance(base, Multinomial):  # logarithms of the shares, up to a constant of each row
        f = (y.double() + 0.5).log()
        f, noise = f - f.mean(-2, keepdim=True), 1 / (y.double() + 0.5)
        return PseudoObservations(_weighted_mean(f, noise), f, noise)
    inflated = base.takes_trials and not isinstance(base, OutOfTrials)
    base = cast(Likelihood, getattr(base, "counts", base)) if inflated else base
    if isinstance(base, OutOfTrials) and isinstance(base.total_count, Tensor):
        share = (y.double() + 0.5) / (base.total_count + 1)
        noise = base.overdispersion() / ((base.total_count + 1) * share * (1 - share))
        if inflated:
            noise = torch.where(y > 0, noise, _EXTRA_ZERO * noise)
        return PseudoObservations(_weighted_mean(share.logit(), noise), share.logit(), noise)
    direct = likelihood.direct(y.double())
    if direct is not None:
        return PseudoObservations(direct.median(-1).values, direct, None)
    y, places, counts = y.unique(return_inverse=True, return_counts=True, dim=-1)  # labels and counts repeat
    level = _level(likelihood, y, counts) if level is None else level
    prior = level[..., None]
    f = prior.expand(*level.shape, y.shape[-1]).clone()
    for _ in range(_STEPS):
        slope, precision = _derivatives(likelihood, y, f)
        step = (slope - (f - prior) / _SPREAD**2) / (precision + 1 / _SPREAD**2)
        f = f + step.clamp(-2, 2)
    slope, precision = _derivatives(likelihood, y, f)
    precision = torch.maximum(precision, slope.abs() / _FARTHEST)
    return PseudoObservations(level, (f + slope / precision)[..., places], (1 / precision)[..., places])


def without_offset(seen: PseudoObservations, offset: Float[Tensor, "*L N"]) -> PseudoObservations:
    """Observations of f less a known part of it."""
    obs = seen.obs - offset
    level = obs.median(-1).values if seen.noise is None else _weighted_mean(obs, seen.noise)
    return PseudoObservations(level, obs, seen.noise)


def _weighted_mean(obs: Tensor, noise: Tensor) -> Tensor:
    return (obs / noise).sum(-1) / (1 / noise).sum(-1)


@torch.no_grad()
def start_shape(likelihood: Likelihood, attribute: str, y: Tensor, near: Tensor) -> Tensor | None:
    """An estimate of a shape parameter from targets (n,) and their neighbors' targets (n, K), nearest first, or None.

    As if neighbors had the same f: from moments; for counts, the size of a negative binomial that predicts best; or
    what :meth:`Likelihood.start` says.

    Args:
        likelihood: of the data.
        attribute: name of the hyperparameter.
        y: targets.
        near: targets of their neighbors.
    """
    y, near = y.double(), near.double()
    if isinstance(likelihood, Gamma) and attribute == "concentration":
        residual = y.log() - near.log().mean(-1)
        return (1 / residual.square().mean().clamp(min=1e-4)).clamp(0.1, 1e4)
    if isinstance(likelihood, NegativeBinomial) and attribute == "total_count":
        return _predictive_size(y, near[:, :_SHARING])
    return likelihood.start(attribute, y, near)


def _predictive_size(y: Tensor, near: Tensor) -> Tensor:
    """The size r of a negative binomial that predicts counts (n,) best from those of neighbors (n, K)."""
    r = torch.logspace(*_SIZES, dtype=y.dtype, device=y.device)[:, None]
    return r[predictive_log_density(y, near, r).mean(-1).argmax(), 0]


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


def _level(likelihood: Likelihood, y: Tensor, counts: Tensor) -> Tensor:
    """The constant f that fits all data of an output best, by repeated grid search, one latent at a time.

    Columns of y are distinct and sorted, and occur `counts` times; of many columns, evenly spaced ones are used.
    """
    if isinstance(likelihood, Categorical):
        classes = torch.bincount(y.long(), counts.double(), cast(int, likelihood.num_latents))
        level = (classes + 0.5).log()
        return level - level.mean()
    step = max(1, y.shape[-1] // _LEVEL_POINTS)
    y, counts = y[..., step // 2 :: step], counts[step // 2 :: step]
    num_latents = likelihood.num_latents
    shape = y.shape[:-1] if num_latents is None else (num_latents,)
    level, half = y.new_zeros(shape, dtype=torch.float64), _RANGE
    grid = torch.linspace(-1, 1, _GRID, dtype=torch.float64, device=y.device)

    def fit(trial: Tensor) -> Tensor:
        """Log densities of the data of each output at constants (G, *T) or (G, L)."""
        f = trial[..., None].expand(*trial.shape, y.shape[-1])
        f = f if num_latents is None else f.transpose(0, 1)
        return (likelihood(f).log_prob(y) * counts).sum(-1).nan_to_num(-torch.inf, neginf=-torch.inf)

    while half > _ACCURACY:
        for latent in [...] if num_latents is None else range(num_latents):
            trial = level.repeat(len(grid), *[1] * len(shape))
            trial[:, latent] += half * grid.reshape(-1, *[1] * (trial[:, latent].dim() - 1))
            parts = trial.split(max(1, _ENTRIES // y.numel()))
            best = torch.cat([fit(part) for part in parts]).argmax(0)
            level = trial.gather(0, best[None])[0] if num_latents is None else trial[best]
        half *= 4 / (_GRID - 1)
    return level - level.mean() if num_latents else level


def _derivatives(likelihood: Likelihood, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """First and negative second derivative (kept positive) of the log density in f, by central differences."""
    middle, found = likelihood(f).log_prob(y), []
    for latent in [slice(None)] if likelihood.num_latents is None else range(len(f)):
        shift = torch.zeros_like(f)
        shift[latent] = _STEP
        low, high = likelihood(f - shift).log_prob(y), likelihood(f + shift).log_prob(y)
        found.append(((high - low) / (2 * _STEP), (2 * middle - low - high) / _STEP**2))
    slope, precision = found[0] if likelihood.num_latents is None else map(torch.stack, zip(*found, strict=True))
    return slope, precision.clamp(min=_LEAST_PRECISION)
