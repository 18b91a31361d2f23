"""Data cut into spatial cells, one for each process, without any process that holds all rows.

Each process reads N / R consecutive rows, and sends each row to the process whose cell of a k-d tree it is in. The
cells come from a random sample, which every process gets: the rows from which hyperparameters start, so that a sharded
method starts where the same method on all rows does (up to 65,536 rows, exactly there; beyond, up to the quantiles that
scale gradient steps).

Rows are numbered anew: rows of process 0 first, on each process in the order of the random ordering.

Cost: O(N / R) memory per process for rows, and 7 N bytes for a moment, for the random ordering. Symbols: N rows, D
inputs, R processes, n rows of this process.
"""

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from pyro_nngp._checks import check_finite, check_seed, fail
from pyro_nngp.distributed.cells import Cells
from pyro_nngp.distributed.points import ShardedPoints
from pyro_nngp.distributed.sources import open_source, read_rows
from pyro_nngp.distributed.world import Route, World

_SAMPLE = 2**16  # as in pyro_nngp.starts.from_data, whose rows these are
_ODD = 0x1E3779B97F4A7C15  # a multiplier that mixes bits


class ShardedData(ShardedPoints):
    """Rows of inputs and targets on the processes of the default group; on one process without a group.

    Pass it to a method in place of `x`, without `y`: ``Vecchia(ShardedData("x.npy", "y.npy"))``. All processes must
    build it, and everything from it, at the same time.

    Args:
        x: inputs (N, D): anything that is read by slices, or the path of a ``.npy`` file or ``.zarr`` store
            (:mod:`pyro_nngp.distributed.sources`).
        y: targets, (N,) or (N, T).
        offset, weights, trials, limits: of each row, as methods take them, of these kinds.
        seed: seed of the random ordering, as for the method on all rows.

    Attributes:
        world: the processes.
        num_rows: N.
        num_own: n.
        starts: first number of each process, and N, (R+1,).
        rows: places of the local rows in the source (n,).
        positions: places of the local rows in the random ordering, ascending (n,).
        values: tensors of the local rows, by name, all of the dtype of x.
        x: the local rows of inputs, `values["x"]`.
        sample: tensors of some rows of all processes, by name.

    Raises:
        ValueError: if lengths differ, values are not finite, or a process gets no rows.
        TypeError: for something that cannot be read by slices.
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        *,
        offset: Any = None,
        weights: Any = None,
        trials: Any = None,
        limits: Any = None,
        seed: int = 0,
    ) -> None:
        where = "ShardedData"
        check_seed(where, seed)
        self.world, self.seed = World(), seed
        given = {"x": x, "y": y, "offset": offset, "weights": weights, "trials": trials, "limits": limits}
        sources = {name: open_source(where, name, value) for name, value in given.items() if value is not None}
        if "y" not in sources:
            fail(where, "y", "with targets", None, "Sharded methods are trained on them.")
        self.num_rows = int(sources["x"].shape[0])
        for name, source in sources.items():
            if len(source.shape) not in ((2,) if name == "x" else (1, 2)) or source.shape[0] != self.num_rows:
                shape = "(N, D)" if name == "x" else f"({self.num_rows}, ...)"
                fail(where, name, f"of shape {shape}", tuple(source.shape), "One row for each row of x.")
        if self.num_rows < 2 * self.world.size:
            fail(where, "x", f"with at least {2 * self.world.size} rows", self.num_rows, "Use fewer processes.")
        start, stop = self.block
        block = {name: read_rows(where, name, source, start, stop) for name, source in sources.items()}
        for name, values in block.items():
            check_finite(where, name, values)
            block[name] = values.to(block["x"].dtype)
        self.sample = self._sample(block, start)
        ranks = Cells(self.sample["x"], self.world.size)(block["x"])
        route = Route(self.world, ranks)
        positions = route.forward(self._positions(start, stop))
        order = positions.argsort()
        self.positions = positions[order]
        self.rows = route.forward(torch.arange(start, stop))[order]
        self.values = {name: route.forward(block.pop(name))[order] for name in sources}
        counts = self._number(len(order))
        if not bool((counts > 0).all()):
            actual = f"none on process {int(counts.argmin())}"
            fail(where, "x", "to have rows in every cell", actual, "Use fewer processes, or spread equal points.")

    @property
    def block_size(self) -> int:
        """Rows that each process reads, the last ones fewer: process i begins at place i times this number."""
        return -(-self.num_rows // self.world.size)

    @property
    def block(self) -> tuple[int, int]:
        """Places in the source, first and end, of the rows that this process reads."""
        start, stop = (min(self.num_rows, (self.world.rank + i) * self.block_size) for i in (0, 1))
        return start, stop

    @property
    def x(self) -> Float[Tensor, "n D"]:
        """Inputs of the local rows."""
        return self.values["x"]

    def digest(self) -> int:
        """A number that depends on all values and their places in the source, not on the processes."""
        total = torch.zeros(1, dtype=torch.int64)
        for number, values in enumerate(self.values.values()):
            code = self.rows * _ODD + number
            for column in values.double().reshape(self.num_own, -1).unbind(-1):
                code = (code ^ column.contiguous().view(torch.int64)) * _ODD
                code = code ^ (code >> 29)
            total += code.sum()
        return int(self.world.sum(total))

    def numbers_of(self, rows: Int[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Numbers of rows given by their places in the source, the same on all processes."""
        order = self.rows.argsort()
        place = torch.searchsorted(self.rows[order], rows).clamp(max=self.num_own - 1)
        own = self.rows[order][place] == rows
        return self.world.sum(torch.where(own, order[place] + self.first, 0))

    def numbers_at(self, count: int) -> Int[Tensor, " S"]:
        """Numbers of the first rows of the random ordering, the same on all processes."""
        here = self.positions < count
        numbers = torch.arange(self.first, self.first + self.num_own)[here]
        return self.world.gather(numbers)[self.world.gather(self.positions[here]).argsort()]

    def in_order(self, values: Shaped[Tensor, "*L n"]) -> Shaped[Tensor, "*L N"]:
        """Values of all rows in the order of the source, on each process, from the values of its local rows.

        All processes must call it at the same time.
        """
        rows, every = self.world.gather(self.rows), self.world.gather(values.detach().cpu().movedim(-1, 0))
        return every[rows.argsort()].movedim(0, -1).to(values.device)

    def _positions(self, start: int, stop: int) -> Int[Tensor, " n"]:
        """Places in the random ordering of consecutive rows."""
        order = _permutation(self.num_rows, self.seed)
        places = ((order >= start) & (order < stop)).nonzero()[:, 0]
        local = torch.empty(stop - start, dtype=torch.int64)
        local[order[places].long() - start] = places
        return local

    def _sample(self, block: dict[str, Tensor], start: int) -> dict[str, Tensor]:
        """The sample, in the order in which a random choice of all of them gives them in their order."""
        chosen = _permutation(self.num_rows, 0)[:_SAMPLE].long()
        own = ((chosen >= start) & (chosen < start + len(block["x"]))).nonzero()[:, 0]
        places = _permutation(len(chosen), 0).long()[self.world.gather(own)]
        local = {}
        for name, values in block.items():
            rows = self.world.gather(values[chosen[own] - start])
            local[name] = torch.empty_like(rows)
            local[name][places] = rows
        return local


def _permutation(size: int, seed: int) -> Tensor:
    """Permutation by ``torch.randperm`` with a seed, in 32 bits where they suffice."""
    dtype = torch.int32 if size < 2**31 else torch.int64
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=dtype)
