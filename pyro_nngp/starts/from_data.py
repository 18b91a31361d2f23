r"""Starts of unset hyperparameters from the data: lengthscales, variances, noise and mean.

Raw data come in any units. Starting each hyperparameter at one would be wrong for most of them, and gradient steps
would not get it right. The starts here are equivariant: if a column of x or y is scaled or shifted, the start scales
with it.

1. Targets become Gaussian observations of f (:mod:`pyro_nngp.likelihoods.pseudo_observations`), whose median is the
   level of the mean; the user's mean function is subtracted instead where it explains anything.
2. Each lengthscale starts at a robust standard deviation of its column (``column_scale``) times
   the root of the number of columns that the kernel has, periods at the peak of a Lomb-Scargle periodogram, the
   kernel's variance at the variance of the observations.
3. Of many points one in eight, 512 to 2,048, are predicted from their nearest neighbors among up to 65,536 points, and
   among 4,096, 1,024 and 256 of them: much data under much noise are near each other, and do not tell how far f is
   alike. The mean log density of these leave-one-out predictions (Jankowiak and Pleiss 2021, eq. 9) is maximized: over
   a grid of common factors of lengthscales and noise, then by L-BFGS over all logarithms, with a weak normal prior
   (standard deviation 1.5) around step 2 for hyperparameters that the points do not determine. The factors of
   lengthscales are powers of 1/4 down to the distance of neighboring points: a daily cycle in a year of hours leaves no
   slope at longer ones. Two to six lengthscales are also tried each alone at 1/16, 1/128 and 1/1024, down to the
   distance of neighboring values of the column, as for a season that all places share. Neighbors are searched again
   once, in the metric of the kernel after the grid. At first some of them come from metrics that stress one column
   each, so that a kernel of space and time has neighbors at the same place and at the same time, whatever the units.

Neighbors that do not share an f make data look overdispersed. So 4 and 16 times the size or concentration that
neighbors alone suggest are tried too, and taken if the leave-one-out density of the data gains .01 nats.

Hyperparameters that are set, have priors, or have been trained keep their values, and the others adapt to them. The
start is deterministic, in float64, and the same on every device up to rounding.

Cost: O(N) for quantiles, then 13 to 85 evaluations at up to 2,048 points of at most 64 neighbors, whatever N: 0.05 to
1 s. Symbols: N data, D inputs, P pool of points, B points predicted, K neighbors, L latent functions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyro_nngp._random import shuffled
from pyro_nngp.hyperparameters import freeze, unset_hyperparameters
from pyro_nngp.kernels.metric import column_scale
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.likelihoods.observations import PseudoObservations
from pyro_nngp.likelihoods.pseudo_observations import pseudo_observations
from pyro_nngp.starts.scales import frozen_copy, moved, place_scales, put_back
from pyro_nngp.starts.search import (
    Problem,
    leave_one_out_moments,
    maximize_leave_one_out,
    nearest_rows,
)

_POOL, _POINTS, _SHARE = 2**16, (512, 2048), 8  # points of the pool; least and most predicted, and one in how many
_SIZED, _SIZES = ("concentration", "total_count"), (4.0, 16.0)  # of which these multiples are tried too
_BETTER = 0.01  # gain in nats per datum that counts


class Start(NamedTuple):
    """Level and spread of the latent functions before training.

    Attributes:
        level: level of each latent function, () or (L,).
        spread: spread of each latent function, of the same shape; 1 on the scale of a link.
    """

    level: Tensor
    spread: Tensor

    @property
    def unit(self) -> float:
        """One spread for all latent functions: the scale of gradient steps of their parameters."""
        return float(self.spread.square().mean().sqrt())


@torch.no_grad()
def start_from_data(
    kernel: Any,
    likelihood: Likelihood | None,
    x: Float[Tensor, "N D"],
    y: Float[Tensor, "*T N"] | Int[Tensor, "*T N"] | None,
    trend: Callable[[Tensor], Tensor] | None,
    jitter: float,
    offset: Float[Tensor, "N *L"] | None = None,
    trials: Float[Tensor, " N"] | None = None,
    at: Any = None,
) -> Start:
    """Set the unset hyperparameters of a kernel and a likelihood, in place.

    Args:
        kernel: a kernel or any covariance function.
        likelihood: None, as `y`, if f is used in a larger program; the start then depends on x only.
        x: inputs.
        y: targets, outputs first.
        trend: a mean function of rows of x that is already set, (P,) -> (*L, P); None if it is to be started.
        jitter: relative nugget.
        offset: known part of f at each row, beside the mean function.
        trials: number of trials of each row, for a likelihood that takes them.
        at: values of hyperparameters with priors, by module and attribute; None draws them.

    Returns:
        The level of the mean, and the unit of latent values.
    """
    open_kernel = unset_hyperparameters(kernel) if isinstance(kernel, nn.Module) else []
    open_likelihood = [] if likelihood is None else unset_hyperparameters(likelihood)
    pool = _some_rows(len(x), _POOL).to(x.device)
    inputs = x[pool].double().to(_device(kernel, x))
    if likelihood is None or y is None:
        start_without_targets(kernel, x, at=at)
        return Start(x.new_zeros(()), x.new_ones(()))
    targets = y[..., pool].to(inputs.device)
    rows = torch.arange(min(len(pool), _points(len(pool))), device=inputs.device)
    there = None if trend is None else trend(pool).to(inputs.device)
    tried = targets[..., rows]

    near = nearest_rows(inputs / column_scale(inputs), rows, 8)
    shapes = []
    for part, name in open_likelihood:
        value = part.start(name, tried.flatten().double(), targets[..., near].flatten(0, -2).double())
        if value is not None:
            shapes.append((part, name, value))
    sized = any(name in _SIZED for _, name, _ in shapes)

    def attempt(shapes: Sequence[tuple[nn.Module, str, Tensor]]) -> tuple[float, Callable[[], Start]]:
        """The score of a start at given shape parameters, and a function that sets it."""
        for part, name, value in shapes:
            setattr(part, name, value.to(x))
        bound = moved(freeze(likelihood, at), inputs.device)
        if trials is not None:
            bound = bound.for_rows(trials=trials[pool].double().to(inputs.device))
        seen = pseudo_observations(bound, targets)
        if offset is not None:
            seen = seen.without(offset[pool].double().to(inputs.device).movedim(0, -1))
        obs, spread = _residuals(seen, there)
        noisy = [(part, name) for part, name in open_likelihood if name in ("variance", "scale") and seen.noise is None]
        work, slots = frozen_copy(kernel, open_kernel, inputs.device, at)
        fixed = _noise_of(bound, seen, obs)
        problem = Problem(work, slots, bool(noisy), inputs, obs, fixed, rows, x.dtype, max(jitter, 1e-6))
        noise = maximize_leave_one_out(problem) if open_kernel or noisy else fixed
        score = 0.0
        if sized:
            loc, var = leave_one_out_moments(problem, noise)
            loc = loc + (torch.atleast_2d(seen.obs) - obs)[:, rows]
            if offset is not None:
                loc = loc + offset[pool][rows].double().to(inputs.device).movedim(0, -1)
            marginal = bound.marginal(loc.reshape(tried.shape), var.expand_as(loc).reshape(tried.shape))
            score = float(marginal.log_prob(tried).mean())

        def place() -> Start:
            put_back(open_kernel, slots, x)
            for part, name, value in shapes:
                setattr(part, name, value.to(x))
            for part, name in noisy:
                value = noise.sqrt() / part.sd_per_scale if name == "scale" else noise
                setattr(part, name, value.to(getattr(part, name)).expand_as(getattr(part, name)).clone())
            return Start(seen.level.to(x.device), spread.to(x.device))

        return score, place

    best = attempt(shapes)
    for factor in _SIZES if sized else ():
        larger = attempt([(part, name, value * (factor if name in _SIZED else 1)) for part, name, value in shapes])
        if larger[0] > best[0] + _BETTER:
            best = larger
    return best[1]()


@torch.no_grad()
def start_without_targets(kernel: Any, x: Float[Tensor, "N D"], share: float | None = None, at: Any = None) -> None:
    """Set the unset hyperparameters of a kernel from the inputs: lengthscales from their columns, variance one.

    Args:
        kernel: a kernel or any covariance function.
        x: inputs.
        share: standard deviation of the function relative to the spread of the inputs; replaces the variance of one.
        at: as of :func:`start_from_data`.
    """
    unset = unset_hyperparameters(kernel) if isinstance(kernel, nn.Module) else []
    inputs = x[_some_rows(len(x), _POOL).to(x.device)].double().to(_device(kernel, x))
    work, slots = frozen_copy(kernel, unset, inputs.device, at)
    variance = 1.0 if share is None else float((share * column_scale(inputs)).square().mean())
    place_scales(work, slots, inputs, None, variance)
    put_back(unset, slots, x)


def _residuals(seen: PseudoObservations, trend: Tensor | None) -> tuple[Tensor, Tensor]:
    """Observations minus their mean, (L, P), with outliers clipped; and their spread, 1 on the scale of a link."""
    obs = torch.atleast_2d(seen.obs)
    centered = obs - torch.atleast_1d(seen.level)[: len(obs), None]
    if trend is not None:
        rest = obs - torch.atleast_2d(trend).double()[: len(obs)]
        if rest.square().mean() < centered.square().mean():
            centered = rest
    spread = column_scale(centered.mT)[:, None]
    if seen.noise is not None:
        return centered, torch.ones_like(seen.level)
    # the second function of a heteroskedastic normal is a logarithm
    scale = torch.ones_like(seen.level)
    scale[() if scale.dim() == 0 else slice(len(obs))] = spread[:, 0] if scale.dim() else spread[0, 0]
    return centered.clamp(-8 * spread, 8 * spread), scale


def _noise_of(likelihood: Likelihood, seen: PseudoObservations, obs: Tensor) -> Tensor:
    """Noise variances (L, P), or one for all; an initial guess if they are to be estimated."""
    if seen.noise is not None:
        return torch.atleast_2d(seen.noise)
    noise = noise_variance(likelihood)
    return 0.1 * obs.square().mean() if noise is None else noise


def noise_variance(likelihood: Likelihood) -> Tensor | None:
    """The variance of data around f, of a likelihood that has it as a variance or a scale; None for others."""
    for part in likelihood.modules():
        for name, unit, power in (("variance", 1.0, 1), ("scale", getattr(part, "sd_per_scale", 1.0), 2)):
            if isinstance(getattr(part, name, None), Tensor):
                return (unit * getattr(part, name).detach().double().mean()) ** power
    return None


def _device(kernel: Any, x: Tensor) -> torch.device:
    """The CPU, for the same results wherever the data are; but callables may hold tensors on another device."""
    return torch.device("cpu") if isinstance(kernel, nn.Module) else x.device


def _points(size: int) -> int:
    """Number of points that are predicted."""
    return min(max(size // _SHARE, _POINTS[0]), _POINTS[1])


def _some_rows(size: int, most: int) -> Tensor:
    """At most that many random rows, the same each time."""
    return shuffled(size, 0)[:most]
