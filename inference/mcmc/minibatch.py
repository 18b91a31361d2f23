"""Placeholder for the rows of an update in the arguments of a run.

Symbols: N rows, B rows of a batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from pyro_nngp._checks import check_device, check_int, fail


class Minibatch:
    """Placeholder for an index of rows, in the arguments of a run, that is drawn at every update.

    ``MCMC(SGHMC(model), ...).run(Minibatch(len(y), 256))`` calls ``model(idx)`` with 256 of the row numbers, uniform
    without replacement; inside, ``pyro.plate("data", len(y), subsample=idx)`` gives the scale N/B. One object passed in
    two places gives both the same index.

    Args:
        size: N, the number of rows.
        batch_size: B <= N. With B = N the index is every row in order, and nothing random is drawn.
        device: device of the index; None is torch's default device.

    Raises:
        ValueError: unless 1 <= batch_size <= size.
    """

    def __init__(self, size: int, batch_size: int, device: torch.device | str | None = None) -> None:
        check_int("Minibatch", "size", size, 1)
        check_int("Minibatch", "batch_size", batch_size)
        if device is not None:
            check_device("Minibatch", device)
        if not 1 <= batch_size <= size:
            fail("Minibatch", "batch_size", f"in 1..{size}", batch_size, "Choose a smaller batch.")
        self.size, self.batch_size, self.device = size, batch_size, device

    def draw(self) -> Int[Tensor, " B"]:
        """Draw an index. Cost: O(B log B) in expectation (repeated rows are drawn again while B <= N/2)."""
        if self.batch_size == self.size:
            return torch.arange(self.size, device=self.device)
        if 2 * self.batch_size > self.size:
            return torch.randperm(self.size, device=self.device)[: self.batch_size]
        idx = torch.randint(self.size, (self.batch_size,), device=self.device).unique()
        while len(idx) < self.batch_size:
            again = torch.randint(self.size, (self.batch_size - len(idx),), device=self.device)
            idx = torch.cat([idx, again]).unique()
        return idx

    def in_order(self, k: int) -> Int[Tensor, " B"]:
        """The k-th of the minibatches that cover the rows in order; after the last, the first again."""
        starts = -(-self.size // self.batch_size)
        first = min(k % starts * self.batch_size, self.size - self.batch_size)
        return torch.arange(first, first + self.batch_size, device=self.device)


def minibatches_of(args: tuple, kwargs: Mapping[str, Any]) -> list[Minibatch]:
    """The minibatches among the arguments of a run, each once."""
    return list(dict.fromkeys(each for each in (*args, *kwargs.values()) if isinstance(each, Minibatch)))


def with_all_rows(args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a run, with all rows instead of each minibatch."""

    def every(argument: Any) -> Any:
        return torch.arange(argument.size, device=argument.device) if isinstance(argument, Minibatch) else argument

    return tuple(map(every, args)), {name: every(value) for name, value in kwargs.items()}


__all__ = ["Minibatch", "minibatches_of", "with_all_rows"]
