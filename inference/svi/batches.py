"""The rows of the data that a step uses: minibatches of an epoch, or a subsample that grows.

Cost: one permutation of the data, per epoch or in total.
"""

from typing import Any

import torch
from torch import Tensor

_GROWTH = 4


class Minibatches:
    """Batches of rows, drawn without replacement within an epoch; an incomplete last batch is left out.

    Args:
        num_data: number of rows.
        size: rows per batch; with None, or N or more, each batch is None, which stands for all rows.
        seed: seed of the order.

    Attributes:
        weight: factor of the loss; other than 1 on several processes only.
    """

    weight = 1.0

    def __init__(self, num_data: int, size: int | None, seed: int) -> None:
        self.num_data = num_data
        self.size = None if size is None or size >= num_data else size
        self.generator = _generator(seed)
        self._epoch, self._position = self.generator.get_state(), num_data
        self._order = torch.empty(0, dtype=torch.int64)

    def next(self, device: torch.device) -> Tensor | None:
        """The next batch of rows. The order of an epoch is kept on the device: a copy per step would wait for it."""
        if self.size is None:
            return None
        if self._position + self.size > self.num_data:
            self._epoch, self._position = self.generator.get_state(), 0
            self._order = torch.randperm(self.num_data, generator=self.generator)
        self._order = self._order.to(device)
        batch = self._order[self._position : self._position + self.size]
        self._position += self.size
        return batch

    def state(self) -> dict[str, Any]:
        """The random states now and at the start of the epoch, and the position in the epoch."""
        return {"now": self.generator.get_state(), "epoch": self._epoch, "position": self._position}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._epoch, self._position = state["epoch"], state["position"]
        self.generator.set_state(self._epoch)
        self._order = torch.randperm(self.num_data, generator=self.generator)
        self.generator.set_state(state["now"])


class Subsample:
    """Nested random subsets of the rows, each four times the previous one; one subset serves until :meth:`grow`.

    Args:
        num_data: number of rows.
        size: rows of the largest subset; None, or N or more, is all rows.
        seed: seed of the order.
        start: rows of the first subset; None starts with the largest.

    Attributes:
        weight: factor of the loss; other than 1 on several processes only.
    """

    weight = 1.0

    def __init__(self, num_data: int, size: int | None, seed: int, start: int | None = None) -> None:
        self.num_data = num_data
        self.size = None if size is None or size >= num_data else size
        self.generator = _generator(seed)
        self._order = torch.randperm(num_data, generator=self.generator)
        largest = num_data if self.size is None else self.size
        self.sizes = [largest]
        while start is not None and self.sizes[0] >= 2 * start:
            self.sizes.insert(0, max(start, self.sizes[0] // _GROWTH))
        self._stage = 0

    @property
    def num_rows(self) -> int:
        """Rows of the present subset."""
        return self.sizes[self._stage]

    @property
    def grown(self) -> bool:
        """Whether the present subset is the largest."""
        return self._stage == len(self.sizes) - 1

    def grow(self) -> None:
        """Go on to the next subset."""
        self._stage += 1

    def next(self, device: torch.device) -> Tensor | None:
        """The present rows; None for all."""
        return None if self.num_rows == self.num_data else self._order[: self.num_rows].to(device)

    def state(self) -> dict[str, Any]:
        """The number of the present subset."""
        return {"stage": self._stage}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._stage = state["stage"]


def _generator(seed: int) -> torch.Generator:
    """A generator that differs from the one of a random ordering with this seed."""
    generator = torch.Generator().manual_seed(seed)
    torch.randint(2, (1,), generator=generator)
    return generator
