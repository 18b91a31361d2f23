r"""Gaussian observations of f that replace the data before any model of f is known.

Targets with an identity link are observations themselves. For others each datum gives one, the Laplace approximation of
its likelihood under a wide prior around the level :math:`f_0` that fits all data best,

.. math:: \hat f_i = \arg\max_f \log p(y_i \mid f) - (f - f_0)^2 / 2 s^2, \qquad
   \delta_i = -1 / \partial^2_f \log p(y_i \mid \hat f_i), \qquad
   \tilde y_i = \hat f_i + \delta_i\, \partial_f \log p(y_i \mid \hat f_i).

Cost: some sixty log densities per datum, and three hundred at up to 1,024 of them for the level. Symbols: N data, L
latent functions or outputs.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_nngp.likelihoods.base import Likelihood
from pyro_nngp.likelihoods.continuous import Gamma, HeteroskedasticGaussian, LogNormal
from pyro_nngp.likelihoods.discrete import Categorical, NegativeBinomial

_SPREAD = 2.0  # s, on the scale of a logarithm or logit
_FARTHEST = 6.0  # that an observation may lie from the mode: log densities that are all but linear have no other bound
_RANGE = 60.0  # of levels
_STEPS = 20
_STEP = 1e-3  # of central differences
_LEAST_PRECISION = 1e-3
_LEVEL_POINTS = 512  # or up to twice as many


class PseudoObservations(NamedTuple):
    """Observations of f.

    Attributes:
        level: a robust level of each latent function, () or (L,).
        obs: observations, (N,) or (L, N).
        noise: their noise variances, of the same shape; None where they are the targets themselves, whose noise has to
            be estimated.
    """

    level: Tensor
    obs: Tensor
    noise: Tensor | None


@torch.no_grad()
def pseudo_observations(likelihood: Likelihood, y: Tensor) -> PseudoObservations:
    """Observations of f in float64.

    Args:
        likelihood: with its hyperparameters read, as :meth:`Likelihood.bind` returns it.
        y: targets, outputs first, (*T, N), of any dtype.
    """
    if isinstance(likelihood, LogNormal):
        y = y.double().log()
        return PseudoObservations(y.median(-1).values, y, None)
    if isinstance(likelihood, HeteroskedasticGaussian):
        y = y.double()
        residual = (y - y.median()).abs().median().clamp(min=torch.finfo(y.dtype).tiny)
        level = torch.stack([y.median(), 2 * (residual / 0.6745).log()])
        return PseudoObservations(level, y[None], None)
    if likelihood.num_latents is None and likelihood.support is constraints.real:
        return PseudoObservations(y.double().median(-1).values, y.double(), None)
    level = _level(likelihood, y)
    prior = level[..., None]
    f = prior.expand(*level.shape, y.shape[-1]).clone()
    for _ in range(_STEPS):
        slope, precision = _derivatives(likelihood, y, f)
        step = (slope - (f - prior) / _SPREAD**2) / (precision + 1 / _SPREAD**2)
        f = f + step.clamp(-2, 2)
    slope, precision = _derivatives(likelihood, y, f)
    precision = torch.maximum(precision, slope.abs() / _FARTHEST)
    return PseudoObservations(level, f + slope / precision, 1 / precision)


@torch.no_grad()
def start_shape(likelihood: Likelihood, attribute: str, y: Tensor, near: Tensor) -> Tensor | None:
    """A moment estimate of a shape parameter, from targets (n,) and those of neighbors (n, K), or None.

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
        mean, size = near.mean(-1), near.shape[-1]
        excess = ((y - mean).square() * size / (size + 1) - mean).sum()
        return (mean.square().sum() / excess.clamp(min=1e-6)).clamp(0.1, 1e3)
    return None


def _level(likelihood: Likelihood, y: Tensor) -> Tensor:
    """The constant f that fits some data of an output best: by repeated search of a grid, latent by latent."""
    if isinstance(likelihood, Categorical):
        counts = torch.bincount(y.long(), minlength=cast(int, likelihood.num_latents)).double()
        level = (counts + 0.5).log()
        return level - level.mean()
    y = y[..., :: max(1, y.shape[-1] // _LEVEL_POINTS)]
    shape = y.shape[:-1] if likelihood.num_latents is None else (likelihood.num_latents,)
    level, half = y.new_zeros(shape, dtype=torch.float64), _RANGE
    grid = torch.linspace(-1, 1, 33, dtype=torch.float64, device=y.device)
    for _ in range(9):
        if likelihood.num_latents is None:
            trial = level + half * grid.reshape(-1, *[1] * len(shape))
            fit = likelihood(trial[..., None].expand(len(grid), *y.shape)).log_prob(y).sum(-1)
            level = trial.gather(0, fit.nan_to_num(-torch.inf, neginf=-torch.inf).argmax(0, keepdim=True))[0]
        else:
            for latent in range(likelihood.num_latents):
                trial = level.expand(len(grid), *shape).clone()
                trial[:, latent] += half * grid
                fit = torch.stack([likelihood(f[:, None].expand(-1, len(y))).log_prob(y).sum() for f in trial])
                level = trial[fit.nan_to_num(-torch.inf).argmax()]
        half /= 4
    return level - level.mean() if likelihood.num_latents else level


def _derivatives(likelihood: Likelihood, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """First derivative of the log density in f, and the negative second one, kept positive; by central differences."""
    middle, found = likelihood(f).log_prob(y), []
    for latent in [slice(None)] if likelihood.num_latents is None else range(len(f)):
        shift = torch.zeros_like(f)
        shift[latent] = _STEP
        low, high = likelihood(f - shift).log_prob(y), likelihood(f + shift).log_prob(y)
        found.append(((high - low) / (2 * _STEP), (2 * middle - low - high) / _STEP**2))
    slope, precision = found[0] if likelihood.num_latents is None else map(torch.stack, zip(*found, strict=True))
    return slope, precision.clamp(min=_LEAST_PRECISION)
