r"""Gaussian observations of f that replace the data before any model of f is known.

Targets with an identity link are observations themselves. For other links, each datum gives an observation by a Laplace
approximation of its likelihood under a wide prior around the level :math:`f_0` that fits all data best,

.. math:: \hat f_i = \arg\max_f \log p(y_i \mid f) - (f - f_0)^2 / 2 s^2, \qquad
   \delta_i = -1 / \partial^2_f \log p(y_i \mid \hat f_i), \qquad
   \tilde y_i = \hat f_i + \delta_i\, \partial_f \log p(y_i \mid \hat f_i).

Cost: 60 log densities per distinct datum, and 200 at some 1,024 of them for the level. Symbols: N data, L latent
functions or outputs.
"""

from typing import cast

import torch
from torch import Tensor

from pyro_nngp.likelihoods.base import Likelihood
from pyro_nngp.likelihoods.labels import Categorical
from pyro_nngp.likelihoods.observations import PseudoObservations

_SPREAD = 2.0  # s, on the scale of a logarithm or logit
_FARTHEST = 6.0  # largest distance of an observation from the mode, for log densities that are almost linear
_RANGE, _ACCURACY = 60.0, 1e-4  # half width of the first grid of levels, and of the last
_GRID = 17  # levels tried at a time; the next ones lie within two of their steps around the best
_FINE, _LOST = 1001, 0.5  # constants tried, and nats that the nearest one may lose, where the best one is infinite
_ENTRIES = 2**22  # log densities computed at once
_STEPS = 20
_STEP = 1e-3  # of central differences
_LEAST_PRECISION = 1e-3
_LEVEL_POINTS = 512  # or up to twice as many


@torch.no_grad()
def pseudo_observations(likelihood: Likelihood, y: Tensor, level: Tensor | None = None) -> PseudoObservations:
    """Observations of f in float64.

    Args:
        likelihood: with its hyperparameters read, as :meth:`Likelihood.bind` returns it.
        y: targets, outputs first, (*T, N), of any dtype.
        level: level of labels and counts in place of the level of y; see :class:`PseudoObservations`.
    """
    known = likelihood.observations(y.double())
    if known is not None:
        return known
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


def _level(likelihood: Likelihood, y: Tensor, counts: Tensor) -> Tensor:
    """The constant f that fits all data of an output best, by repeated grid search, one latent at a time.

    Where that is infinite, the constant nearest to 0 that fits them to half a nat.

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
        return torch.cat([fit_some(part) for part in trial.split(max(1, _ENTRIES // y.numel()))])

    def fit_some(trial: Tensor) -> Tensor:
        f = trial[..., None].expand(*trial.shape, y.shape[-1])
        f = f if num_latents is None else f.transpose(0, 1)
        return (likelihood(f).log_prob(y) * counts).sum(-1).nan_to_num(-torch.inf, neginf=-torch.inf)

    while half > _ACCURACY:
        for latent in [...] if num_latents is None else range(num_latents):
            trial = level.repeat(len(grid), *[1] * len(shape))
            trial[:, latent] += half * grid.reshape(-1, *[1] * (trial[:, latent].dim() - 1))
            best = fit(trial).argmax(0)
            level = trial.gather(0, best[None])[0] if num_latents is None else trial[best]
        half *= 4 / (_GRID - 1)
    beyond = level.abs() > _RANGE  # labels of one class, or counts of zero, which a farther constant always fits better
    if num_latents is None and beyond.any():
        fine = torch.linspace(0, 1, _FINE, dtype=level.dtype, device=level.device)
        trial = level * fine.reshape(-1, *[1] * len(shape))
        value = fit(trial)
        nearest = (value >= value.amax(0) - _LOST).int().argmax(0)
        level = torch.where(beyond, trial.gather(0, nearest[None])[0], level)
    return level - level.mean() if num_latents else level


def _derivatives(likelihood: Likelihood, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """First and negative second derivative (kept positive) of the log density in f, by central differences."""
    middle, derivatives = likelihood(f).log_prob(y), []
    for latent in [slice(None)] if likelihood.num_latents is None else range(len(f)):
        shift = torch.zeros_like(f)
        shift[latent] = _STEP
        low, high = likelihood(f - shift).log_prob(y), likelihood(f + shift).log_prob(y)
        derivatives.append(((high - low) / (2 * _STEP), (2 * middle - low - high) / _STEP**2))
    several = likelihood.num_latents is not None
    slope, precision = map(torch.stack, zip(*derivatives, strict=True)) if several else derivatives[0]
    return slope, precision.clamp(min=_LEAST_PRECISION)
