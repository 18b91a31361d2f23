"""The processes of a run: sums, gathers and exchanges of rows.

Everything goes through ``torch.distributed``: Gloo on CPUs, NCCL on GPUs. Without a process group there is one process,
and every operation is the identity, so that one script runs under ``python`` and under ``torchrun``.

Cost: bytes that leave a process are counted (:attr:`World.traffic`). Symbols: R processes, Q rows sent by one of them,
P rows that it receives.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from pyro_nngp._checks import fail


class ProcessError(RuntimeError):
    """Another process of the group has ended, or did not answer in time."""


def group_device() -> torch.device:
    """Where the default group takes tensors: the GPU of this process with NCCL, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")


class World:
    """The default process group, or one process alone where none is initialized.

    Attributes:
        rank: number of this process, 0 .. R-1.
        size: R.
        traffic: bytes that this process has sent, by operation; for sums as in a ring, 2 (R-1) / R times the size.
    """

    def __init__(self) -> None:
        self._is_group = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._is_group else 0
        self.size = dist.get_world_size() if self._is_group else 1
        self.traffic: Counter[str] = Counter()
        self._device = group_device() if self._is_group else torch.device("cpu")

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same bits on each."""
        return self._reduce(values, "sum")

    def max(self, value: int) -> int:
        """The largest of one number from each process."""
        return int(self._reduce(torch.tensor([value]), "max"))

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        if self.size == 1:
            return values
        total = values.detach().to(self._device, copy=True)
        operation = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
        self._run(lambda: dist.all_reduce(total, operation))
        self.traffic[how] += 2 * (self.size - 1) * total.numel() * total.element_size() // self.size
        return total.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        """Rows of all processes, rows of process 0 first; on each process any number of them."""
        counts = self._gather_equal(torch.tensor([len(values)]))
        most = int(counts.max())
        padded = values.new_zeros((most, *values.shape[1:]))
        padded[: len(values)] = values
        parts = self._gather_equal(padded).view(self.size, most, *values.shape[1:])
        return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])

    def _gather_equal(self, values: Tensor) -> Tensor:
        if self.size == 1:
            return values
        here = values.to(self._device).contiguous()
        gathered = [torch.empty_like(here) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(gathered, here))
        self.traffic["gather"] += (self.size - 1) * here.numel() * here.element_size()
        return torch.cat(gathered).to(values.device)

    def exchange(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send consecutive rows to each process, and receive theirs.

        Args:
            values: the rows, those for process 0 first.
            sent: number of rows for each process.
            received: number of rows from each process.
        """
        if self.size == 1:
            return values
        here = values.detach().to(self._device).contiguous()
        gathered = here.new_empty((sum(received), *here.shape[1:]))
        if self._device.type == "cpu":
            self._run(lambda: self._send_and_receive(here.split(sent), gathered.split(received)))
        else:
            self._run(lambda: dist.all_to_all_single(gathered, here, received, sent))
        away = len(here) - sent[self.rank]
        self.traffic["exchange"] += away * here[:1].numel() * here.element_size()
        return gathered.to(values.device)

    def _send_and_receive(self, parts: Sequence[Tensor], gathered: Sequence[Tensor]) -> None:
        """Exchange a part with each process, without messages for empty ones, which Gloo's all-to-all sends."""
        gathered[self.rank].copy_(parts[self.rank])
        steps = (dist.irecv, gathered), (dist.isend, parts)
        operations = [
            dist.P2POp(step, part, rank)
            for step, tensors in steps
            for rank, part in enumerate(tensors)
            if rank != self.rank and len(part)
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def barrier(self) -> None:
        """Wait for all processes."""
        self.max(0)

    def _run(self, operation: Callable[[], Any]) -> None:
        try:
            operation()
        except RuntimeError as error:
            cure = (
                "Look for the first error above; without one a process is stopped, or slower than the timeout of "
                "join_group. torchrun --max-restarts continues from the last checkpoint."
            )
            actual = f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"
            where = f"process {self.rank} of {self.size}"
            fail(where, "all processes", "to take part in time", actual, cure, ProcessError, error)


class Route:
    """Rows on their way to other processes, and answers back.

    Args:
        world: the processes.
        ranks: process that each row goes to, (Q,).
    """

    def __init__(self, world: World, ranks: Int[Tensor, " Q"]) -> None:
        self._world, self._order = world, ranks.argsort(stable=True)
        counts = torch.bincount(ranks, minlength=world.size)
        ones = [1] * world.size
        self._sent, self._received = counts.tolist(), world.exchange(counts, ones, ones).tolist()

    def forward(self, values: Tensor) -> Tensor:
        """Send rows (Q, ...); returns those that arrive, (P, ...), by process."""
        return self._world.exchange(values[self._order], self._sent, self._received)

    def back(self, answers: Tensor) -> Tensor:
        """Send an answer to each row that arrived, (P, ...); returns those to the rows sent, (Q, ...)."""
        gathered = self._world.exchange(answers, self._received, self._sent)
        placed = torch.empty_like(gathered)
        placed[self._order] = gathered
        return placed
