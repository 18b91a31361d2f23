"""Entries of a method by its posterior: moments, joint draws and scores, at the medians or at posterior draws.

The hyperparameters are read once for each entry, or for each posterior draw, and passed down. On several processes
the rows that predictions condition on are fetched once.

Symbols: N data, T outputs, L latent functions, I rows, P new points, S draws.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_batch, fail
from pyro_nngp._kinds import check_flags
from pyro_nngp.bound import Bound, read
from pyro_nngp.hyperparameters.values import draw_values
from pyro_nngp.models.base.draws import Draw, Samples, at_each_draw, evenly_spaced, one_draw
from pyro_nngp.models.base.posterior import Posterior
from pyro_nngp.models.base.trend import bound_for_predictions
from pyro_nngp.plausibility.far_points import (
    FAR_SHARE,
    can_be_far,
    data_are_connected,
    share_of_far_points,
    warn_of_far_points,
)
from pyro_nngp.rows import Part

Moments = tuple[Posterior, Tensor, Tensor]
"""A posterior with the moments of f, or of y, at new points."""


def posterior_near(
    method: Any, x_new: Tensor, num_neighbors: int | None, samples: Samples | None, jointly: bool = False
) -> tuple[Posterior, Part | None, int | None]:
    """The posterior at the medians, the rows near new points, and the number of neighbors of each point.

    On several processes the rows are a part of all; with `jointly` neighbors may also be other new points, and the
    part's rows are in a graph.
    """
    posterior = method.posterior(bound_for_predictions(method) if samples is None else method._bound_of_plans())
    if samples is not None and num_neighbors is None:
        num_neighbors = posterior.neighbors_at_draws()
    if not posterior.needs_part:
        return posterior, None, num_neighbors
    k = posterior.enough_neighbors() if num_neighbors is None else num_neighbors
    part = posterior.part_near(x_new, min(k, posterior.rows.num_rows) if jointly else k, jointly)
    return method.posterior(_at_part(posterior, part), None, part), part, k


def _at_part(posterior: Posterior, part: Part) -> Bound:
    """The hyperparameters for some rows of all processes."""
    bound = posterior.bound
    if bound.trend is None or part.numbers is None:
        return bound
    return replace(bound, trend=bound.trend.at(lambda tables: posterior.rows.fetch(part.numbers, tables)))


def at_draw(method: Any, where: str, draw: Draw, part: Part | None = None, given: bool = True) -> Posterior:
    """The posterior at the hyperparameters of a draw, and its latent values if these are given."""
    return method.posterior(read(method, draw_values(where, method, draw)), draw if given else None, part)


def moments(
    method: Any,
    entry: str,
    x_new: Tensor,
    num_neighbors: int | None,
    samples: Samples | None,
    kind: Literal["moments", "response_moments"],
) -> list[Moments]:
    """Moments with their posterior: at the medians, or at each posterior draw.

    Args:
        method: the method.
        entry: name of the method that was called, for messages.
        x_new: new points.
        num_neighbors: of each.
        samples: posterior draws.
        kind: the moments of f, or of y.
    """
    method._check_new(entry, x_new, samples is None)
    posterior, part, k = posterior_near(method, x_new, num_neighbors, samples)
    near, where = posterior.neighbors(x_new, k), f"{type(method).__name__}.{entry}"
    if samples is None:
        loc, spread = getattr(posterior, kind)(x_new, near)
        if method._looks_for_far_points:
            _look_for_far_points(method, where, posterior, x_new, spread)
        return [(posterior, loc, spread)]

    def at(draw: Draw) -> tuple[Tensor, Tensor]:
        return getattr(at_draw(method, where, draw, part), kind)(x_new, near)

    with torch.no_grad():
        entries = posterior.entries(x_new, near) if method._maps_draws else None
        pairs = list(at_each_draw(where, method, samples, at, entries))
        return [(at_draw(method, where, one_draw(samples, row), part), *pair) for row, pair in enumerate(pairs)]


def _look_for_far_points(method: Any, where: str, posterior: Posterior, x_new: Tensor, variance: Tensor) -> None:
    """Warn once if predictions are the mean function at many of the points, while others would not be."""
    bound, graph = posterior.bound, posterior.graph
    if method.y is None or posterior.needs_part or not (can_be_far(bound) and hasattr(graph, "others")):
        method._looks_for_far_points = False
        return
    share = share_of_far_points(bound, x_new, variance)
    if share > FAR_SHARE:
        method._looks_for_far_points = False
        if data_are_connected(bound, graph, lambda x: posterior.moments(x, posterior.neighbors(x, None))[1]):
            warn_of_far_points(where, method.x, x_new, share, method.columns)


def joint_draws(
    method: Any,
    where: str,
    x_new: Tensor,
    count: int,
    num_neighbors: int | None,
    seed: int | None,
    samples: Samples | None,
) -> Float[Tensor, "S *L P"]:
    """Joint draws of f; evenly spaced posterior draws are used, some repeatedly if there are fewer than S."""
    posterior, part, k = posterior_near(method, x_new, num_neighbors, samples, jointly=True)
    near = posterior.joint_neighbors(x_new, k, 0 if seed is None else seed)
    if samples is None:
        return torch.cat(list(_from_guide(method, posterior, part, x_new, near, count)))
    chosen, counts = evenly_spaced(where, method, samples, count)

    def joint(draw: Draw) -> Tensor:
        return at_draw(method, where, draw, part).joint(x_new, near, max(counts))

    entries = posterior.entries(x_new, near) if method._maps_draws else None
    draws = zip(at_each_draw(where, method, chosen, joint, entries), counts, strict=True)
    return torch.cat([values[:taken] for values, taken in draws])


def _from_guide(
    method: Any, posterior: Posterior, part: Part | None, x_new: Tensor, near: Any, count: int
) -> Iterator[Tensor]:
    """Joint draws under the guide: with priors, each at other hyperparameters."""
    if method.hyper_guide.has_sites:
        flat = posterior.bound.trend if posterior.bound.trend is not None and posterior.bound.trend.is_flat else None
        for _ in range(count):
            bound = replace(read(method, method.hyper_guide.draw()), trend=flat)
            yield method.posterior(bound, None, part).joint(x_new, near, 1)
        return
    most = posterior.most_draws(len(x_new)) or count
    for start in range(0, count, most):
        yield posterior.joint(x_new, near, min(most, count - start))


def draws_of_y(
    method: Any, where: str, f: Float[Tensor, "S *L P"], by_row: Mapping[str, Tensor], samples: Samples | None
) -> Tensor:
    """A draw of y, (S, *T, P), for each of the draws of f that :func:`joint_draws` makes."""
    if samples is None:
        return given_f(method.posterior(method.bound()), f, by_row)
    chosen, counts = evenly_spaced(where, method, samples, len(f))
    each = zip(f.split(counts), range(len(counts)), strict=True)
    parts = [given_f(at_draw(method, where, one_draw(chosen, row)), some, by_row) for some, row in each]
    return torch.cat(parts)


def given_f(posterior: Posterior, f: Float[Tensor, "... P"], by_row: Mapping[str, Tensor]) -> Tensor:
    """A draw of y, (*S, *T, P), for each value of f."""
    if posterior.bound.likelihood.num_latents is not None:
        f = f.movedim(-2, 0)
    return posterior.given_f(f, by_row).sample()


def draws_by_draw(
    method: Any, x_new: Tensor, num_neighbors: int | None, seed: int, from_guide: bool
) -> Callable[[Draw], tuple[Posterior, Float[Tensor, "*L P"]]]:
    """The posterior and one joint draw of f as a function of one posterior draw at a time."""
    method._check_new("predictions_by_draw", x_new, from_guide)
    check_flags(f"{type(method).__name__}.predictions_by_draw", from_guide=from_guide)
    posterior_at = method._posterior_in_guide if from_guide else method.posterior
    posterior, part, k = posterior_near(method, x_new, num_neighbors, {}, jointly=True)
    near, where = posterior.joint_neighbors(x_new, k, seed), f"{type(method).__name__}.predictions_by_draw"

    def at(draw: Draw) -> tuple[Posterior, Tensor]:
        posterior = posterior_at(read(method, draw_values(where, method, draw)), draw, part)
        return posterior, posterior.joint(x_new, near, 1)[0]

    return at


def leave_one_out(
    method: Any, idx: Tensor | None, num_neighbors: int | None, samples: Samples | None
) -> Float[Tensor, "... I"]:
    """Log densities of some rows given all others, at the medians or at each posterior draw."""
    where, (posterior, part, others) = _where_loo(method), _others(method, idx, num_neighbors, samples is not None)
    if samples is None:
        return posterior.leave_one_out(others)

    def density(draw: Draw) -> Tensor:
        return at_draw(method, where, draw, part).leave_one_out(others)

    entries = posterior.loo_entries(others) if method._maps_draws else None
    return torch.stack(list(at_each_draw(where, method, samples, density, entries)))


def leave_one_out_by_draw(
    method: Any, idx: Tensor | None, num_neighbors: int | None, from_guide: bool
) -> Callable[[Draw], Float[Tensor, "*T I"]]:
    """Log densities of some rows given all others as a function of one posterior draw at a time."""
    known: list[Tensor] = []  # the densities, where no draw differs from another
    check_flags(f"{type(method).__name__}.loo_by_draw", from_guide=from_guide)
    integrates = from_guide and not method.hyper_guide.has_sites
    where, (_, part, others) = _where_loo(method), _others(method, idx, num_neighbors, not integrates)

    @torch.inference_mode(False)
    @torch.no_grad()
    def at(draw: Draw) -> Tensor:
        if not integrates:
            return at_draw(method, where, draw, part, given=not from_guide).leave_one_out(others)
        if not known:
            known.append(leave_one_out(method, idx, num_neighbors, None))
        return known[0]

    return at


def _where_loo(method: Any) -> str:
    return f"{type(method).__name__}.loo"


def _others(
    method: Any, idx: Tensor | None, num_neighbors: int | None, at_draws: bool
) -> tuple[Posterior, Part | None, Any]:
    """The posterior at the medians, and some rows of the data with their nearest others."""
    where, rows = _where_loo(method), method.rows
    if method.likelihood is None:
        fail(where, "a likelihood", "in the model", None, "Score the whole program.")
    if idx is not None:
        check_batch(where, "idx", idx, method.num_data)
    idx = rows.every if idx is None else idx
    posterior = method.posterior(method._bound_of_plans() if at_draws else bound_for_predictions(method))
    if not posterior.needs_part_of_others:
        return posterior, None, posterior.others(idx, num_neighbors)
    part = rows.others(posterior.graph, idx, num_neighbors)
    k = posterior.graph.num_neighbors if num_neighbors is None else num_neighbors
    posterior = method.posterior(_at_part(posterior, part), None, part)
    return posterior, part, posterior.others(part.places, k)


__all__ = [
    "at_draw",
    "draws_by_draw",
    "draws_of_y",
    "given_f",
    "joint_draws",
    "leave_one_out",
    "leave_one_out_by_draw",
    "moments",
    "posterior_near",
]
