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
            self._order = torch.randperm(self.num_data, generator=self.generator, device="cpu")
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
        self._order = torch.randperm(self.num_data, generator=self.generator, device="cpu")
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
        self._order = torch.randperm(num_data, generator=self.generator, device="cpu")
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


class LocalMinibatches(Minibatches):
    """Minibatches of the local rows, in proportion to their number.

    Attributes:
        size: local rows per step; None is all.
        size_of_all: rows per step of all processes.
    """

    def __init__(self, shard: Any, size: int | None, seed: int) -> None:
        whole = None if size is None or size >= shard.num_rows else size
        self._every = torch.arange(shard.num_own)
        local = None if whole is None else max(1, round(whole * shard.num_own / shard.num_rows))
        super().__init__(shard.num_own, local, seed)
        self.size_of_all = whole

    def next(self, device: torch.device) -> Tensor:
        """The next local rows."""
        rows = super().next(device)
        return self._every.to(device) if rows is None else rows


class LocalSubsample:
    """The local rows of a growing subsample of all rows; a process without any takes one row, with weight zero.

    Attributes:
        weight: factor from the scale of the local rows to the scale of the subsample.
    """

    def __init__(self, whole: Subsample, shard: Any) -> None:
        self._whole, self._shard = whole, shard
        self.generator, self.num_data, self.size = whole.generator, whole.num_data, whole.size
        self._kept: tuple[int, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("sizes", "num_rows", "grown", "grow", "state", "load"):
            return getattr(self._whole, name)
        raise AttributeError(name)

    @property
    def weight(self) -> float:
        """Factor of the loss of this process."""
        count, shard = len(self._rows()), self._shard
        return shard.num_rows / self.num_rows * count / shard.num_own

    def next(self, device: torch.device) -> Tensor:
        """The present local rows."""
        rows = self._rows()
        return (rows if len(rows) else torch.zeros(1, dtype=torch.int64)).to(device)

    def _rows(self) -> Tensor:
        count = self._whole.num_rows
        if self._kept is None or self._kept[0] != count:
            chosen = self._whole.next(torch.device("cpu"))
            every = torch.arange(self._shard.num_own)
            self._kept = count, every if chosen is None else local_numbers(self._shard, chosen)
        return self._kept[1]


def local_numbers(shard: Any, rows: Tensor) -> Tensor:
    """Local numbers, ascending, of those among some rows of the data that a process has."""
    return torch.isin(shard.rows, rows.cpu()).nonzero()[:, 0].to(rows.device)


def _generator(seed: int) -> torch.Generator:
    """A generator that differs from the one of a random ordering with this seed."""
    generator = torch.Generator().manual_seed(seed)
    torch.randint(2, (1,), generator=generator, device="cpu")
    return generator
