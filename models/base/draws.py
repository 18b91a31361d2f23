"""Functions of one posterior draw at each of several: by ``torch.vmap``, as many at a time as memory allows.

Cost: the function, once for each draw. Symbols: S draws.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp._memory import at_once
from pyro_nngp.hyperparameters.priors import count_draws_of

Draw: TypeAlias = Mapping[str, Tensor]
"""Values of all sites in one posterior draw."""

Samples: TypeAlias = Mapping[str, Tensor]
"""Draws of all sites by name, as ``MCMC.get_samples()`` returns them."""

Result = TypeVar("Result")
_ENTRIES = 2**22  # entries of temporaries of several posterior draws that are held at once


def at_each_draw(
    where: str, owner: nn.Module, samples: Samples, compute: Callable[[Draw], Any], entries: int | None
) -> Iterator[Any]:
    """Results of a function at each posterior draw.

    Args:
        where: name of the caller, for messages.
        owner: the method whose sites they are.
        samples: posterior draws.
        compute: maps one draw to a tensor or a tuple of tensors. Random numbers differ between draws.
        entries: entries of the function's temporaries at one draw; None takes one draw after the other, for functions
            that look at values.

    Raises:
        ValueError, TypeError: for malformed samples.
    """
    count = count_draws_of(where, owner, samples)
    most = 1 if entries is None else at_once(_ENTRIES, entries)
    if min(count, most) < 2:
        yield from (compute(one_draw(samples, row)) for row in range(count))
        return
    for rows in torch.arange(count).split(most):
        some = {name: value[rows.to(value.device)] for name, value in samples.items()}
        results = torch.vmap(compute, randomness="different")(some)
        yield from zip(*results, strict=True) if isinstance(results, tuple) else results


def one_draw(samples: Samples, row: int) -> dict[str, Tensor]:
    """The values of all sites in one of the draws."""
    return {name: value[row] for name, value in samples.items()}


def drawn_values(where: str, draw: Draw, name: str, shape: tuple[int, ...]) -> Tensor:
    """The values of a latent site in a posterior draw.

    Raises:
        ValueError: if the draw has none, or of another shape than on all data.
    """
    if name not in draw:
        cure = f"A site that was reparametrized comes from Predictive(model, samples, return_sites=[{name!r}])."
        fail(where, "samples", f"to hold the site {name!r}", sorted(draw), cure)
    value = draw[name]
    while value.dim() > len(shape) and value.shape[0] == 1:  # Predictive puts dimensions of one in front
        value = value[0]
    if value.shape != shape:
        expectation = f"of shape (S, {', '.join(map(str, shape))})"
        cure = "Pass draws of the model on all data, as get_samples() of the run returns them."
        fail(where, f"samples[{name!r}]", expectation, ("S", *value.shape), cure)
    return value


def evenly_spaced(where: str, owner: nn.Module, samples: Samples, total: int) -> tuple[dict[str, Tensor], list[int]]:
    """Evenly spaced draws, and how often each is taken, so that they are `total` together."""
    rows = torch.linspace(0, count_draws_of(where, owner, samples) - 1, total).round().long()
    rows, counts = rows.unique_consecutive(return_counts=True)
    return {name: value[rows.to(value.device)] for name, value in samples.items()}, counts.tolist()


def can_be_mapped(parts: Iterable[object]) -> bool:
    """Whether parts run under ``torch.vmap``; those that are not of this package may look at values."""
    return all(type(part).__module__.partition(".")[0] == __name__.partition(".")[0] for part in parts)


__all__ = ["Draw", "Samples", "at_each_draw", "can_be_mapped", "drawn_values", "evenly_spaced", "one_draw"]
