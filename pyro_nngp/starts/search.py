"""Step 3 of :mod:`pyro_nngp.starts.from_data`: the hyperparameters that best predict points from their neighbors.

Symbols: P pool of points, B points predicted, K neighbors, L latent functions.
"""

import math
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributions import transform_to

from pyro_nngp._indexing import repeats
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.kernels import Kernel, KernelMetric, Stationary
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.kernels.metric import MOST_STRESSED, column_scale, stressed
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.neighbors import nearest
from pyro_nngp.starts.scales import Slot, inputs_of, place_scales

_NEIGHBORS = 16
_SPARSE, _FROM_EACH = (4096, 1024, 256), 8  # first points of the pool, and neighbors from each of them
_STRESSED, _STRESSES = 2, (16.0, 4096.0)  # neighbors in metrics that stress one of few columns
_STEP, _LEAST, _MOST = 4.0, 3, 8  # ratio of common factors of all lengthscales, and their number
_NOISES = 0.01, 0.1, 0.5
_SHORT, _SHORT_NOISES = (1 / 16, 1 / 128, 1 / 1024), (0.1, 0.5)  # of one lengthscale alone, as for a season
_PRIOR = 1.5  # standard deviation of the logarithms
_BOUND = 8.0  # on their distance from the start
_STEPS = 15
_CLOSE = 0.05  # change in nats, slope, or move of the logarithms, that ends the steps
_LATENTS = 4  # latent functions or outputs used


class Problem(NamedTuple):
    """Points to predict, observations, and the hyperparameters to optimize."""

    kernel: Any  # frozen
    slots: list[Slot]
    learn_noise: bool
    x: Tensor  # (P, D)
    obs: Tensor  # (L, P), without the mean
    noise: Tensor  # (L, P) or ()
    rows: Tensor  # (B,)
    dtype: torch.dtype
    jitter: float


def maximize_leave_one_out(problem: Problem) -> Tensor:
    """Step 3: set the hyperparameters in the slots and return the noise variance."""
    total = float(problem.obs.square().mean())
    total = total if total > 0 else 1.0
    place_scales(problem.kernel, problem.slots, problem.x, problem.obs, 0.9 * total)
    base = [part.__dict__[name].clone() for part, name in problem.slots]
    noise = problem.x.new_tensor(0.1 * total) if problem.learn_noise else problem.noise
    moving = [i for i, slot in enumerate(problem.slots) if slot.name != "period"]
    maps = [transform_to(problem.slots[i].constraint) for i in moving]  # logarithms, unless there are two bounds
    start = [to.inv(base[i]).flatten() for to, i in zip(maps, moving, strict=True)]
    start += [noise.log()[None]] if problem.learn_noise else []
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

    def value(origin: Tensor, move: Tensor, near: Tensor) -> Tensor:
        log_factors = origin + _BOUND * (move / _BOUND).tanh()
        parts = (center + log_factors).split(sizes)
        for i, to, part in zip(moving, maps, parts, strict=False):
            problem.slots[i].part.__dict__[problem.slots[i].name] = to(part).reshape(base[i].shape)
        level = parts[-1][0].exp() if problem.learn_noise else latents.noise
        penalty = (log_factors / _PRIOR).square().sum() / (2 * len(latents.obs))
        return len(problem.rows) * _leave_one_out(latents, level, near) + penalty

    with torch.enable_grad():
        near, move = _neighbors(problem, is_first=True), torch.zeros_like(center)
        columns = torch.cat(
            [_column_spacings(problem, i) for i in moving] + [center.new_ones(int(problem.learn_noise))]
        )
        trials = _trials(is_length, _spacing(problem), columns, problem.learn_noise)
        origin = min(trials, key=lambda trial: _safely(partial(value, trial), move, near))
        for last in (False, True):
            move = _descend(partial(value, origin), move, near)
            if not last:
                near = _neighbors(problem, is_first=False)
    level = (center + origin + _BOUND * (move / _BOUND).tanh())[-1]
    return level.exp() if problem.learn_noise else noise


def _trials(
    is_length: Bool[Tensor, " h"], spacing: float, columns: Float[Tensor, " h"], learn_noise: bool
) -> list[Tensor]:
    """Logarithms of the factors of the grid, the noise last.

    Args:
        is_length: which hyperparameters are lengthscales.
        spacing: distance of neighboring points in lengthscales.
        columns: of each lengthscale the distance of neighboring values of its column.
        learn_noise: whether the noise is among the hyperparameters.
    """
    lengths = is_length.double()

    def noisy(shift: Tensor, share: float) -> Tensor:
        shift = shift.clone()
        shift[-1] = math.log(share / 0.1)
        return shift

    def with_noises(shift: Tensor, shares: tuple[float, ...]) -> list[Tensor]:
        return [noisy(shift, share) for share in shares] if learn_noise else [shift]

    fitting = math.floor(-math.log(spacing) / math.log(_STEP)) + 1 if spacing < 1 else 1
    count = min(max(_LEAST, fitting), _MOST) if bool(is_length.any()) else 1
    trials = [each for j in range(count) for each in with_noises(-j * math.log(_STEP) * lengths, _NOISES)]
    if 1 < int(lengths.sum()) <= MOST_STRESSED:
        for factor in _SHORT:
            for one in torch.diag(lengths)[is_length & (factor >= columns)]:
                trials += with_noises(math.log(factor) * one, _SHORT_NOISES)
    return trials


@torch.no_grad()
def _spacing(problem: Problem) -> float:
    """Median distance of the rows to the nearest others in the kernel's metric, as a number of lengthscales."""
    space = KernelMetric(problem.kernel, problem.x).features(problem.x)[0]
    near = nearest_rows(space, problem.rows, 1)[:, 0]
    distance = (space[near] - space[problem.rows]).norm(dim=-1)
    distance = distance[distance > 0]
    return float(distance.median()) if len(distance) else 1.0


@torch.no_grad()
def _column_spacings(problem: Problem, number: int) -> Float[Tensor, " n"]:
    """Median distances of neighboring values of the columns of a lengthscale, in lengthscales; 0 where not known."""
    slot = problem.slots[number]
    value = slot.part.__dict__[slot.name].flatten()
    if slot.name != "lengthscale" or not isinstance(slot.part, Stationary) or not isinstance(problem.kernel, Kernel):
        return torch.zeros_like(value)
    x = inputs_of(problem.kernel, slot.part, problem.x)
    values = [torch.unique(x[:, d]) for d in slot.part.active_dims or range(slot.part.input_dim)]
    spacings = torch.stack([v.diff().median() if len(v) > 1 else v.new_tensor(math.inf) for v in values])
    return (spacings.min() if slot.part.isotropic else spacings) / value


def _descend(value: Any, shift: Tensor, near: Tensor) -> Tensor:
    """The result of some steps of L-BFGS, or the start if it is no worse; the slots are set to it."""
    moving = shift.clone().requires_grad_()
    before = _safely(value, shift, near)
    optimizer = torch.optim.LBFGS(
        [moving],
        max_iter=_STEPS,
        max_eval=_STEPS + 10,
        tolerance_grad=_CLOSE,
        tolerance_change=_CLOSE,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = value(moving, near)
        loss.backward()
        return loss

    with suppress(NotPositiveDefiniteError):
        optimizer.step(closure)
        if _safely(value, moving.detach(), near) <= before:
            return moving.detach()
    _safely(value, shift, near)
    return shift


@torch.no_grad()
def _safely(value: Any, shift: Tensor, near: Tensor) -> float:
    try:
        loss = float(value(shift, near))
    except NotPositiveDefiniteError:
        return math.inf
    return loss if math.isfinite(loss) else math.inf


def _leave_one_out(problem: Problem, noise: Tensor, near: Int[Tensor, "B K"]) -> Tensor:
    """Minus the mean log density of observations given their neighbors, up to a constant."""
    loc, var = _moments(problem, noise, near)
    var = var + (noise if noise.dim() == 0 else noise[:, problem.rows])
    misfit = problem.obs[:, problem.rows] - loc
    return (var.log() + misfit.square() / var).mean() / 2


def _moments(problem: Problem, noise: Tensor, near: Int[Tensor, "B K"]) -> tuple[Tensor, Tensor]:
    """Means and variances of f at the rows given the observations of their neighbors, (L, B)."""
    added = noise.expand(len(problem.x)) if noise.dim() == 0 else noise
    cov = bind_double(problem.kernel, problem.dtype)
    w, var = graph_conditional(cov, problem.x[problem.rows], problem.x, near, added, problem.jitter)
    return (w * problem.obs[:, near.clamp(min=0)]).sum(-1), var


@torch.no_grad()
def leave_one_out_moments(problem: Problem, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances of f, less its mean function, at the rows, given the observations of their neighbors."""
    return _moments(problem, noise, _neighbors(problem, is_first=False))


def _neighbors(problem: Problem, is_first: bool) -> Int[Tensor, "B K"]:
    """Neighbors in the kernel's metric, some from ever fewer points of the pool: near ones alone do not tell its range.

    At first also some in metrics that stress one column.
    """
    with torch.no_grad():
        x, rows = problem.x, problem.rows
        spaces = KernelMetric(problem.kernel, x).features(x)
        neighbors = [nearest_rows(space, rows, _NEIGHBORS) for space in spaces]
        for count in (each for each in _SPARSE if 2 * each <= len(x)):
            itself = rows.masked_fill(rows >= count, -1)
            neighbors += [nearest(f[rows], f[:count], _FROM_EACH, itself, progress=False) for f in spaces]
        if is_first:
            for stress in _STRESSES:
                neighbors += [nearest_rows(at, rows, _STRESSED) for at in stressed(x / column_scale(x), stress)]
        near = torch.cat(neighbors, -1).sort(-1).values
        return near.masked_fill(repeats(near), -1)


def nearest_rows(places: Tensor, rows: Tensor, k: int) -> Tensor:
    """The k points nearest to each of some rows, excluding the row itself."""
    return nearest(places[rows], places, min(k, len(places) - 1), rows, progress=False)
