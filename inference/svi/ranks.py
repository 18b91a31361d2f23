"""Training on several processes: the local rows of each batch, and sums of losses and gradients over the processes.

Every process has the same hyperparameters and optimizers. A step adds up losses and gradients, in one reduction, so
that all processes take the same step and the same decisions. A process draws the rows of a minibatch among its n local
ones: with B n / N of them and the scale N / B the sum over the processes is an unbiased estimate of the loss, and exact
over an epoch. L-BFGS has the subsamples of a run on one process, of which each process takes its local rows.

Settings and starting values are compared before the first step, by digests: processes that differ would train to a
mixture without an error.

Cost: one reduction of as many numbers as there are hyperparameters, per evaluation. Symbols: N rows of all processes,
n local rows, of this process, B rows of a batch.
"""

from typing import Any

import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.distributed import World
from pyro_nngp.distributed.world import ProcessError
from pyro_nngp.inference.identity import digest
from pyro_nngp.inference.protocols import KeepsRows, Trainable, shard_of
from pyro_nngp.inference.svi.batches import Minibatches, Subsample

_SHOWN = 4  # differences named in a message
_PRIME = 1_000_003  # between the seeds of processes


class Ranks:
    """One process of a run, or the only one.

    Args:
        method: the method that is trained.

    Attributes:
        shard: the rows of the processes; None where this process has all rows.
        world: the processes.

    Raises:
        ValueError: in a process group, for a method that has all rows on each process.
    """

    def __init__(self, method: Trainable) -> None:
        self.shard = shard_of(method)
        self.world = World() if self.shard is None else self.shard.world
        if self.shard is None and self.world.size > 1:
            cure = "Build the method on ShardedData, or train on one process without a process group."
            fail("fit", "method", f"with rows on {self.world.size} processes", "one with all rows on each", cure)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that shows progress bars and warnings."""
        return self.world.rank == 0

    def seed(self, seed: int) -> int:
        """Seed of the draws of this process."""
        return seed + _PRIME * self.world.rank

    def batches(self, optimizer: str, size: int | None, seed: int, num_data: int, start: int | None) -> Any:
        """The rows of each step (:mod:`pyro_nngp.inference.svi.batches`)."""
        if optimizer == "lbfgs":
            whole = Subsample(num_data, size, seed, start)
            return whole if self.shard is None else LocalSubsample(whole, self.shard)
        if self.shard is None:
            return Minibatches(num_data, size, seed)
        return LocalMinibatches(self.shard, size, self.seed(seed))

    def sum_gradients(self, loss: Tensor, params: list[Tensor], sparse: set[int]) -> Tensor:
        """Replace the gradients of shared parameters by their sums; returns the loss of all processes.

        Args:
            loss: the part of this process; NaN if it has none, which all processes then see.
            params: the shared parameters, in the same order on each process.
            sparse: identities of parameters with gradients that are sparse in the rows; a row counts if any process
                uses it.
        """
        if self.shard is None:
            return loss
        parts = [loss.detach().reshape(1).double()]
        for param in params:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            if id(param) in sparse:
                used = param.new_zeros(len(param))
                if grad.is_sparse:
                    used[grad._indices()[0]] = 1
                    grad = grad.to_dense()
                parts.append(used.double())
            parts.append(grad.reshape(-1).double())
        sums = self.world.sum(torch.cat(parts)).split([len(part) for part in parts])
        rest = iter(sums[1:])
        for param in params:
            rows = next(rest).nonzero()[:, 0] if id(param) in sparse else None
            grad = next(rest).view_as(param).to(param.dtype)
            param.grad = grad if rows is None else _sparse(grad, rows)
        return sums[0][0]

    def check_shared(self, method: Any, free: list[Tensor], tables: list[Any]) -> None:
        """Raise if parameters with a row per datum are to be trained by gradients on several processes.

        Raises:
            ValueError: names the cure.
        """
        if not isinstance(method, KeepsRows) or self.shard is None or not method.has_row_tables:
            return
        local = {id(param) for table in tables for param in table.parameters(recurse=False)}
        if any(id(param) in local for param in free):
            cure = "Leave solve_every out, so that they are solved for."
            fail("fit", "parameters", "of the hyperparameters alone with ShardedData", "some of each datum", cure)

    def check_same(self, described: dict[str, str]) -> None:
        """Raise on all processes unless each has the same descriptions of a run.

        Args:
            described: settings, and digests of starting values, by name (:mod:`pyro_nngp.inference.identity`).

        Raises:
            ProcessError: names what differs.
        """
        if self.world.size == 1:
            return
        codes = {name: code_of(f"{name} = {text}") for name, text in described.items()}
        found, counts = self.world.gather(torch.tensor(list(codes.values()))).unique(return_counts=True)
        odd = set(found[counts != self.world.size].tolist())
        if not odd:
            return
        names = [f"{name} = {described[name]:.80}" for name, code in codes.items() if code in odd]
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        actual = f"on process {self.world.rank} and not on all, {shown or 'less than on others'}"
        cure = "Give all the same arguments, and seed what is drawn at random, such as the weights of a network."
        fail("fit", "settings and starting values", "to be those of all processes", actual, cure, ProcessError)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return flag if self.shard is None else bool(self.world.max(int(flag)))

    def sum(self, value: float) -> float:
        """Sum over the processes."""
        return value if self.shard is None else float(self.world.sum(torch.tensor(value, dtype=torch.float64)))

    def of_first(self, value: float) -> float:
        """The value of the first process."""
        return self.sum(value if self.is_first else 0.0)

    def local_rows(self, rows: Tensor) -> Tensor:
        """Local numbers of those among some rows of the data that this process has."""
        return rows if self.shard is None else _local_numbers(self.shard, rows)


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
            self._kept = count, every if chosen is None else _local_numbers(self._shard, chosen)
        return self._kept[1]


def code_of(text: str) -> int:
    """A digest of a text in 63 bits."""
    return int(digest(text.encode())[:16], 16) >> 1


def _sparse(grad: Tensor, rows: Tensor) -> Tensor:
    """Some ascending rows of a dense gradient as a sparse tensor."""
    return torch.sparse_coo_tensor(rows[None], grad[rows], grad.shape, is_coalesced=True, check_invariants=False)


def _local_numbers(shard: Any, rows: Tensor) -> Tensor:
    """Local numbers, ascending, of those among some rows of the data that a process has."""
    return torch.isin(shard.rows, rows.cpu()).nonzero()[:, 0].to(rows.device)
