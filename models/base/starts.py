r"""Where hyperparameters start that the user has not set: lengthscales, variances, noise and mean, from the data.

Raw data come in any units. A start of one for each hyperparameter is right for none of them, and gradient steps do not
bring it there. What follows depends on the data alone, not on their units: scale a column of x or y, or shift it, and
the start scales with it.

1. Targets become Gaussian observations of f (:mod:`pyro_nngp.likelihoods.pseudo_observations`), whose median is the
   level of the mean; a mean function of the user's is subtracted instead where it explains anything.
2. Each lengthscale starts at a robust standard deviation of its column (:func:`~pyro_nngp.kernels.column_scale`) times
   the root of the number of columns that the kernel has, periods at the peak of a Lomb-Scargle periodogram, the
   kernel's variance at that of the observations.
3. Up to 512 random points are predicted from their nearest neighbors among up to 65,536 points, and the mean log
   density of these leave-one-out predictions (Jankowiak and Pleiss 2021, eq. 9) is maximized: over a grid of nine
   common factors of lengthscales and noise, then by L-BFGS over all logarithms, with a weak normal prior (standard
   deviation
   1.5) around step 2 that holds what the points leave open. Neighbors are found again once, in the metric of the kernel
   as it then is. At first some of them come from metrics that stress one column each, so that a kernel of space and
   time sees points of the same place and points of the same time, whatever the units of either.

Hyperparameters that are set, have priors, or have been trained keep their values, and the others adapt to them. The
start is deterministic, in float64, and the same on every device up to rounding.

Cost: O(N) for quantiles, then some 50 evaluations at 512 points of at most 28 neighbors, whatever N: 0.1 to 1 s.
Symbols: N data, D inputs, P pool of points, B points predicted, K neighbors, L latent functions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.signal import lombscargle
from torch import Tensor, nn

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.hyperparameters import freeze, unset_hyperparameters
from pyro_nngp.kernels import (
    Kernel,
    KernelMetric,
    Periodic,
    Product,
    Stationary,
    Sum,
    VerticalScaling,
    bind,
    bind_double,
)
from pyro_nngp.kernels.metric import column_scale
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.likelihoods.pseudo_observations import PseudoObservations, pseudo_observations, start_shape
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.neighbors import nearest

_POOL, _POINTS, _NEIGHBORS = 2**16, 512, 16
_STRESSED, _STRESS, _MOST_STRESSED = 2, 16.0, 6  # neighbors from each metric that stresses one of few columns
_LENGTHS, _NOISES = (1.0, 0.25, 1 / 16), (0.01, 0.1, 0.5)
_PRIOR = 1.5  # standard deviation of the logarithms
_BOUND = 8.0  # on their distance from where they start
_STEPS = 15
_LATENTS = 4  # latent functions or outputs that are looked at


class Start(NamedTuple):
    """What the data say before training.

    Attributes:
        level: of each latent function, () or (L,).
        spread: of each latent function, of the same shape; 1 on the scale of a link.
    """

    level: Tensor
    spread: Tensor

    @property
    def unit(self) -> float:
        """One spread for all, in which parameters of the latent functions move."""
        return float(self.spread.square().mean().sqrt())


class _Slot(NamedTuple):
    """A hyperparameter of a frozen copy."""

    part: nn.Module
    name: str


class _Problem(NamedTuple):
    """Points to predict, observations, and what may change to predict them better."""

    kernel: Any  # frozen
    slots: list[_Slot]
    learn_noise: bool
    x: Tensor  # (P, D)
    obs: Tensor  # (L, P), without the mean
    noise: Tensor  # (L, P) or ()
    rows: Tensor  # (B,)
    dtype: torch.dtype
    jitter: float


@torch.no_grad()
def start_from_data(
    kernel: Any,
    likelihood: Likelihood | None,
    x: Float[Tensor, "N D"],
    y: Float[Tensor, "*T N"] | Int[Tensor, "*T N"] | None,
    trend: Callable[[Tensor], Tensor] | None,
    jitter: float,
) -> Start:
    """Set the hyperparameters of a kernel and a likelihood that were left unset, in place.

    Args:
        kernel: a kernel or any covariance function; reading it has Pyro effects.
        likelihood: None, as `y`, where f is used in a larger program; then x alone counts.
        x: inputs.
        y: targets, outputs first.
        trend: a mean function of rows of x that is not to be started, (P,) -> (*L, P); None for one that is.
        jitter: relative nugget.

    Returns:
        The level of the mean, and the unit of latent values.
    """
    open_kernel = unset_hyperparameters(kernel) if isinstance(kernel, nn.Module) else []
    open_likelihood = [] if likelihood is None else unset_hyperparameters(likelihood)
    pool = _some_rows(len(x), _POOL).to(x.device)
    inputs = x[pool].double().to(_device(kernel, x))
    if likelihood is None or y is None:
        start_without_targets(kernel, x)
        return Start(x.new_zeros(()), x.new_ones(()))
    bound, targets = _moved(freeze(likelihood), inputs.device), y[..., pool].to(inputs.device)
    rows = torch.arange(min(len(pool), _POINTS), device=inputs.device)
    for part, name in open_likelihood:
        near = _nearest(inputs / column_scale(inputs), rows, 8)
        found = start_shape(part, name, targets[..., rows].flatten(), targets[..., near].flatten(0, -2))
        if found is not None:
            setattr(part, name, found.to(x))
            bound = _moved(freeze(likelihood), inputs.device)
    seen = pseudo_observations(bound, targets)
    obs, spread = _residuals(seen, None if trend is None else trend(pool).to(inputs.device))
    noisy = [(part, name) for part, name in open_likelihood if name in ("variance", "scale") and seen.noise is None]
    if open_kernel or noisy:
        work, slots = _frozen(kernel, open_kernel, inputs.device)
        fixed = _noise_of(bound, seen, obs)
        problem = _Problem(work, slots, bool(noisy), inputs, obs, fixed, rows, x.dtype, max(jitter, 1e-6))
        noise = _optimize(problem)
        _put_back(open_kernel, slots, x)
        for part, name in noisy:
            value = noise.sqrt() / 1.2 if name == "scale" else noise
            setattr(part, name, value.to(getattr(part, name)).expand_as(getattr(part, name)).clone())
    return Start(seen.level.to(x.device), spread.to(x.device))


@torch.no_grad()
def start_without_targets(kernel: Any, x: Float[Tensor, "N D"], share: float | None = None) -> None:
    """Set what is unset of a kernel from the inputs alone: lengthscales by their columns, a variance of one.

    Args:
        kernel: a kernel or any covariance function.
        x: inputs.
        share: standard deviation of the function over the spread of the inputs, in place of a variance of one.
    """
    unset = unset_hyperparameters(kernel) if isinstance(kernel, nn.Module) else []
    inputs = x[_some_rows(len(x), _POOL).to(x.device)].double().to(_device(kernel, x))
    work, slots = _frozen(kernel, unset, inputs.device)
    variance = 1.0 if share is None else float((share * column_scale(inputs)).square().mean())
    _place(work, slots, inputs, None, variance)
    _put_back(unset, slots, x)


def _residuals(seen: PseudoObservations, trend: Tensor | None) -> tuple[Tensor, Tensor]:
    """Observations without their mean, (L, P), outliers clipped; and their spread, 1 on the scale of a link."""
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
    """Noise variances (L, P), or one for all; a guess where they are to be estimated."""
    if seen.noise is not None:
        return torch.atleast_2d(seen.noise)
    for name, power in (("variance", 1), ("scale", 2)):
        if isinstance(getattr(likelihood, name, None), Tensor):
            return getattr(likelihood, name).detach().double().mean() ** power
    return 0.1 * obs.square().mean()


def _device(kernel: Any, x: Tensor) -> torch.device:
    """The CPU, where results are the same whatever the data are on; callables may hold tensors on another device."""
    return torch.device("cpu") if isinstance(kernel, nn.Module) else x.device


def _moved(module: Any, device: torch.device) -> Any:
    """A frozen module on another device."""
    for part in module.to(device).modules():
        part.__dict__.update({name: v.to(device) for name, v in part.__dict__.items() if isinstance(v, Tensor)})
    return module


def _frozen(kernel: Any, open_kernel: Sequence[tuple[nn.Module, str]], device: torch.device) -> tuple[Any, list[_Slot]]:
    """A frozen copy in float64, and its hyperparameters that are to be started."""
    work = freeze(kernel)
    if not isinstance(work, nn.Module):
        return work, []
    places = {id(part): i for i, part in enumerate(kernel.modules())}
    parts = list(_moved(work, device).double().modules())
    return work, [_Slot(parts[places[id(part)]], name) for part, name in open_kernel]


def _put_back(open_kernel: Sequence[tuple[nn.Module, str]], slots: Sequence[_Slot], x: Tensor) -> None:
    for (part, name), slot in zip(open_kernel, slots, strict=True):
        setattr(part, name, slot.part.__dict__[slot.name].detach().to(x))


def _place(kernel: Any, slots: Sequence[_Slot], x: Tensor, obs: Tensor | None, variance: float) -> None:
    """Step 2: lengthscales and periods by the columns, variances by that of the observations."""
    spread, uses = column_scale(x), dict.fromkeys(range(x.shape[1]), 0)
    inside = isinstance(kernel, Kernel)
    for part, name in slots:
        value = part.__dict__[name].double()
        if name == "lengthscale" and isinstance(part, Stationary) and inside and not isinstance(part, Periodic):
            columns = list(part.active_dims or range(part.input_dim))
            value = spread[columns] * len(columns) ** 0.5 / 4.0 ** max(uses[d] for d in columns)
            uses.update({d: uses[d] + 1 for d in columns})
        elif name == "lengthscale" and isinstance(part, Stationary):
            value = value.expand(part.input_dim)
        elif name == "period" and isinstance(part, Periodic) and inside:
            columns = list(part.active_dims or range(part.input_dim))
            value = torch.stack([_period(x[:, d], obs) for d in columns])
        part.__dict__[name] = value.clone()
    _place_variances(kernel, {(id(part), name) for part, name in slots}, variance, x[:512])


def _place_variances(kernel: Any, free: set[tuple[int, str]], target: float, x: Tensor) -> None:
    """Give the free variances of a kernel, or of its parts, values that make its variance the target on average."""
    if isinstance(kernel, Sum | Product):
        parts = [kernel.kern0, kernel.kern1]
        open_parts = [part for part in parts if any((id(sub), "variance") in free for sub in part.modules())]
        fixed = [_mean_variance(part, x) for part in parts if part not in open_parts]
        if isinstance(kernel, Sum):
            target = max(target - sum(fixed), target / 10) / max(1, len(open_parts))
        else:
            target = (target / math.prod(fixed)) ** (1 / max(1, len(open_parts)))
        for part in open_parts:
            _place_variances(part, free, target, x)
    elif isinstance(kernel, VerticalScaling):
        amplitude = float(kernel.vscaling_fn(x).square().mean())
        _place_variances(kernel.kern, free, target / amplitude, x)
    elif isinstance(kernel, Kernel):
        if (id(kernel), "variance") in free:
            kernel.__dict__["variance"] = x.new_ones(())
            kernel.__dict__["variance"] = x.new_tensor(target / _mean_variance(kernel, x))
    elif isinstance(kernel, nn.Module):
        inner = [part for part in kernel.modules() if (id(part), "variance") in free]  # on other columns than x has
        for each in inner:
            each.__dict__["variance"] = x.new_ones(())
        variance = x.new_tensor(target / _mean_variance(kernel, x))
        for each in inner:
            each.__dict__["variance"] = variance


def _mean_variance(kernel: Any, x: Tensor) -> float:
    return max(float(bind(kernel).diag(x).mean()), torch.finfo(torch.float32).tiny)


def _period(column: Tensor, obs: Tensor | None) -> Tensor:
    """The period of the highest peak of a periodogram, between four points' spacing and half of the range."""
    t = (column[:1024] - column.min()).cpu().numpy()
    span = float(t.max())
    if span == 0 or obs is None:
        return column.new_tensor(span / 4 or 1.0)
    values = obs[0, :1024].cpu().numpy()
    frequencies = np.linspace(2, max(3, len(np.unique(t)) // 4), 2048) / span
    power = lombscargle(t, values - values.mean(), 2 * np.pi * frequencies)
    return column.new_tensor(1 / frequencies[power.argmax()])


def _optimize(problem: _Problem) -> Tensor:
    """Step 3; returns the noise variance, and leaves the hyperparameters in the slots."""
    total = float(problem.obs.square().mean())
    total = total if total > 0 else 1.0
    _place(problem.kernel, problem.slots, problem.x, problem.obs, 0.9 * total)
    base = [part.__dict__[name].clone() for part, name in problem.slots]
    noise = problem.x.new_tensor(0.1 * total) if problem.learn_noise else problem.noise
    moving = [i for i, slot in enumerate(problem.slots) if slot.name != "period"]
    start = [base[i].log().flatten() for i in moving] + ([noise.log()[None]] if problem.learn_noise else [])
    if not start:
        return noise
    center = torch.cat(start)
    sizes = [len(part) for part in start]
    is_length = torch.cat(
        [
            torch.full((n,), i < len(moving) and problem.slots[moving[i]].name == "lengthscale")
            for i, n in enumerate(sizes)
        ]
    ).to(center.device)
    latents = problem._replace(obs=problem.obs[:_LATENTS], noise=noise if noise.dim() == 0 else noise[:_LATENTS])

    def value(shift: Tensor, near: Tensor) -> Tensor:
        parts = (center + _BOUND * (shift / _BOUND).tanh()).split(sizes)
        for i, part in zip(moving, parts, strict=False):
            problem.slots[i].part.__dict__[problem.slots[i].name] = part.exp().reshape(base[i].shape)
        level = parts[-1][0].exp() if problem.learn_noise else latents.noise
        penalty = (shift / _PRIOR).square().sum() / (2 * len(problem.rows) * len(latents.obs))
        return _leave_one_out(latents, level, near) + penalty

    with torch.enable_grad():
        near = _neighbors(problem, stressed=True)
        grid = [_LENGTHS if bool(is_length.any()) else (1.0,), _NOISES if problem.learn_noise else (0.1,)]
        trials = []
        for length in grid[0]:
            for share in grid[1]:
                shift = is_length.to(center) * math.log(length)
                if problem.learn_noise:
                    shift[-1] = math.log(share / 0.1)
                trials.append((_safely(value, shift, near), shift))
        best = min(trials, key=lambda trial: trial[0])[1]
        for last in (False, True):
            best = _descend(value, best, near)
            _safely(value, best, near)  # puts it into the slots
            if not last:
                near = _neighbors(problem, stressed=False)
    return (center + _BOUND * (best / _BOUND).tanh())[-1].exp() if problem.learn_noise else noise


def _descend(value: Any, shift: Tensor, near: Tensor) -> Tensor:
    """Some steps of L-BFGS; where they fail, what came before."""
    found = shift.clone().requires_grad_()
    before = _safely(value, shift, near)
    optimizer = torch.optim.LBFGS(
        [found], max_iter=_STEPS, max_eval=_STEPS + 10, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = value(found, near)
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except NotPositiveDefiniteError:
        return shift
    return found.detach() if _safely(value, found.detach(), near) <= before else shift


@torch.no_grad()
def _safely(value: Any, shift: Tensor, near: Tensor) -> float:
    try:
        found = float(value(shift, near))
    except NotPositiveDefiniteError:
        return math.inf
    return found if math.isfinite(found) else math.inf


def _leave_one_out(problem: _Problem, noise: Tensor, near: Int[Tensor, "B K"]) -> Tensor:
    """Minus the mean log density of observations given their neighbors, up to a constant."""
    cov, x, obs = bind_double(problem.kernel, problem.dtype), problem.x, problem.obs
    added = noise.expand(len(x)) if noise.dim() == 0 else noise
    w, var = graph_conditional(cov, x[problem.rows], x, near, added, problem.jitter)
    var = var + (noise if noise.dim() == 0 else noise[:, problem.rows])
    misfit = obs[:, problem.rows] - (w * obs[:, near.clamp(min=0)]).sum(-1)
    return (var.log() + misfit.square() / var).mean() / 2


def _neighbors(problem: _Problem, stressed: bool) -> Int[Tensor, "B K"]:
    """Neighbors in the kernel's own metric; with `stressed` also some that are near in one column above all."""
    with torch.no_grad():
        x, rows = problem.x, problem.rows
        spaces = KernelMetric(problem.kernel, x).features(x)
        found = [_nearest(space, rows, _NEIGHBORS) for space in spaces]
        columns = x.shape[1]
        if stressed and 1 < columns <= _MOST_STRESSED:
            places = x / column_scale(x)
            for column in range(columns):
                stress = torch.ones_like(places[0])
                stress[column] = _STRESS
                found.append(_nearest(places * stress, rows, _STRESSED))
        near = torch.cat(found, -1).sort(-1).values
        repeated = torch.zeros_like(near, dtype=torch.bool)
        repeated[:, 1:] = near[:, 1:] == near[:, :-1]
        return near.masked_fill(repeated, -1)


def _nearest(places: Tensor, rows: Tensor, k: int) -> Tensor:
    return nearest(places[rows], places, min(k, len(places) - 1), rows, progress=False)


def _some_rows(size: int, most: int) -> Tensor:
    """Up to so many random rows, the same ones each time."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(0))[:most]
