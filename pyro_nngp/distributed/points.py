"""Points on several processes, numbered across them: points of process 0 first.

Symbols: N points of all processes, n local points, D inputs, R processes.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.distributed.world import Route, World


class ShardedPoints:
    """Points of each process; all processes must build it at the same time.

    Args:
        world: the processes.
        x: local points (n, D), possibly none.
        positions: places of the local points in an ordering of all, ascending (n,); ties in distance go to the first.

    Attributes:
        world: the processes.
        x: the local points.
        positions: their places in the ordering.
        num_rows: N.
        starts: first number of each process, and N, (R+1,).
    """

    world: World
    positions: Int[Tensor, " n"]
    num_rows: int
    starts: Tensor

    def __init__(self, world: World, x: Float[Tensor, "n D"], positions: Int[Tensor, " n"]) -> None:
        self.world, self._x, self.positions = world, x, positions
        self.num_rows = int(self._number(len(x)).sum())

    @property
    def x(self) -> Float[Tensor, "n D"]:
        """The local points."""
        return self._x

    @property
    def num_own(self) -> int:
        """n."""
        return int(self.starts[self.world.rank + 1]) - self.first

    @property
    def first(self) -> int:
        """Number of the first local point."""
        return int(self.starts[self.world.rank])

    def owners(self, numbers: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The process of each point."""
        return torch.searchsorted(self.starts, numbers, right=True) - 1

    def fetch(self, numbers: Int[Tensor, " S"], *values: Tensor) -> list[Tensor]:
        """Rows of tensors (n, ...) of all processes at any numbers; all processes must call it."""
        route = Route(self.world, self.owners(numbers))
        here = route.forward(numbers) - self.first
        return [route.back(each[here]) for each in values]

    def _number(self, num_own: int) -> Int[Tensor, " R"]:
        """Number the points of all processes; returns how many each has."""
        counts = self.world.gather(torch.tensor([num_own]))
        self.starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return counts

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # processes have to build it together
