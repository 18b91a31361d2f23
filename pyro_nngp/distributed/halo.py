"""The halo: copies of the rows of other processes that the local rows need.

Rows of a process are its local rows, then its halo, by number. A halo is fetched again when the owners' values
change; what a process adds to rows of its halo goes back to the owners (the transpose, which gradients need).

Cost: bytes of the halo, in each direction. Symbols: n local rows, h rows of the halo.
"""

from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from pyro_nngp.distributed.points import ShardedPoints
from pyro_nngp.distributed.world import Route


class Halo:
    """The rows of other processes among some numbers; all processes must build it at the same time.

    Args:
        data: the local rows.
        numbers: numbers of rows that are needed, of any shape; local ones and -1 are passed over.

    Attributes:
        numbers: row numbers of the halo, ascending (h,).
    """

    def __init__(self, data: ShardedPoints, numbers: Int[Tensor, "..."]) -> None:
        self._data = data
        self.numbers = numbers[(numbers >= 0) & ~self._is_own(numbers)].unique().long()
        self._route = Route(data.world, data.owners(self.numbers))
        self._wanted = self._route.forward(self.numbers) - data.first

    def __len__(self) -> int:
        return len(self.numbers)

    def places(self, numbers: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Places of numbers among local rows and halo; -1 for numbers of neither, and where the number is -1."""
        away = (numbers >= 0) & ~self._is_own(numbers)
        here = torch.where(numbers < 0, numbers, numbers - self._data.first)
        wanted = numbers[away].long()
        place = torch.searchsorted(self.numbers, wanted)
        known = torch.cat([self.numbers, self.numbers.new_full((1,), -1)])[place] == wanted
        here[away] = torch.where(known, self._data.num_own + place, -1).to(here.dtype)
        return here

    def numbers_at(self, places: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Numbers of places among local rows and halo; -1 stays."""
        own = torch.arange(self._data.first, self._data.first + self._data.num_own)
        every = torch.cat([own, self.numbers]).to(places.device)
        return torch.where(places < 0, -1, every[places.clamp(min=0).long()])

    def fetch(self, own: Tensor) -> Tensor:
        """Values of the halo (h, ...) from the values of the local rows of all processes (n, ...)."""
        return self._route.back(own[self._wanted.to(own.device)])

    def give_back(self, halo: Tensor) -> Tensor:
        """The sum, for each local row (n, ...), of the values (h, ...) for it in the halos of all processes."""
        own = halo.new_zeros(self._data.num_own, *halo.shape[1:])
        self.add_back(own, halo)
        return own

    def add_back(self, own: Tensor, halo: Tensor) -> None:
        """Add to values of local rows (n, ...), in place, those (h, ...) that all processes have in their halos."""
        own.index_add_(0, self._wanted.to(own.device), self._route.forward(halo))

    def complete(self, own: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "m ..."]:
        """Values of the local rows and of the halo, (n + h, ...), with gradients that go back to the owners."""
        return torch.cat([own, _Fetched.apply(own, self)])

    def _is_own(self, numbers: Tensor) -> Tensor:
        return (numbers >= self._data.first) & (numbers < self._data.first + self._data.num_own)


class Near:
    """Points near some places of this process, whose values are fetched; all processes must build it.

    Args:
        points: the points.
        numbers: of the points near each place (Q, k), the nearest first.

    Attributes:
        points: the points.
        places: of those near each place among local points and halo (Q, k).
    """

    def __init__(self, points: ShardedPoints, numbers: Int[Tensor, "Q k"]) -> None:
        self.points, self._halo = points, Halo(points, numbers)
        self.places = self._halo.places(numbers)

    @property
    def shape(self) -> torch.Size:
        """Q and k."""
        return self.places.shape

    def complete(self, own: Shaped[Tensor, "*L n"]) -> Shaped[Tensor, "*L m"]:
        """Values at the points of `places` from values at local points."""
        return self._halo.complete(own.movedim(-1, 0).contiguous()).movedim(0, -1)

    def at(self, own: Shaped[Tensor, "*L n"]) -> Shaped[Tensor, "*L Q"]:
        """Values at the nearest point of each place."""
        return self.complete(own)[..., self._first(own)]

    def sums(self, values: Shaped[Tensor, "*L Q"]) -> Shaped[Tensor, "*L n"]:
        """Sums over the places, of all processes, whose nearest point is a local one."""
        own = self.points.num_own
        here = values.new_zeros(*values.shape[:-1], own + len(self._halo)).index_add_(-1, self._first(values), values)
        return here[..., :own] + self._halo.give_back(here[..., own:].movedim(-1, 0).contiguous()).movedim(0, -1)

    def _first(self, like: Tensor) -> Tensor:
        return self.places[:, 0].long().to(like.device)


class _Fetched(torch.autograd.Function):
    """:meth:`Halo.fetch`, whose derivative is :meth:`Halo.give_back`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return halo.fetch(own)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.halo.give_back(grads[0]), None
