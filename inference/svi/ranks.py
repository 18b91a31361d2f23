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

import math
from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp.distributed import ShardedData, World
from pyro_nngp.distributed.training_state import load_training_state, training_state
from pyro_nngp.inference.identity import check_same_run, described
from pyro_nngp.inference.protocols import Trainable, shard_of
from pyro_nngp.inference.svi.batches import LocalMinibatches, LocalSubsample, Minibatches, Subsample, local_numbers
from pyro_nngp.inference.svi.saved_state import RunStore

_PRIME = 1_000_003  # between the seeds of processes


def ranks_of(method: Trainable) -> "Ranks":
    """The place of this process in a run.

    Raises:
        ValueError: in a process group, for a method that has all rows on each process.
    """
    shard, world = shard_of(method), World()
    if shard is not None:
        return ShardedRanks(method, shard)
    if world.size > 1:
        cure = "Build the method on ShardedData, or train on one process without a process group."
        fail("fit", "method", f"with rows on {world.size} processes", "one with all rows on each", cure)
    return Ranks(world)


class Ranks:
    """The only process of a run, which has all rows; what :class:`ShardedRanks` has in common with it sums over one.

    Attributes:
        world: the processes.
        is_first: whether this process shows progress bars and warnings.
    """

    def __init__(self, world: World) -> None:
        self.world, self.is_first = world, world.rank == 0

    def seed(self, seed: int) -> int:
        """Seed of the draws of this process."""
        return seed + _PRIME * self.world.rank

    def batches(self, optimizer: str | None, size: int | None, seed: int, num_data: int, start: int | None) -> Any:
        """The rows of each step (:mod:`pyro_nngp.inference.svi.batches`)."""
        return Subsample(num_data, size, seed, start) if optimizer == "lbfgs" else Minibatches(num_data, size, seed)

    def first_rows(self, count: int | None, device: torch.device | None) -> Tensor | None:
        """The first rows of this process, at most `count`; None is all rows of the only process."""
        return None if count is None else torch.arange(count, device=device)

    def local_rows(self, rows: Tensor) -> Tensor:
        """Local numbers of those among some rows of the data that this process has."""
        return rows

    def sum_gradients(self, loss: Tensor, params: list[Tensor], sparse: set[int]) -> Tensor:
        """Replace the gradients of shared parameters by their sums; returns the loss of all processes.

        Args:
            loss: the part of this process; NaN if it has none, which all processes then see.
            params: the shared parameters, in the same order on each process.
            sparse: identities of parameters with gradients that are sparse in the rows; a row counts if any process
                uses it.
        """
        return loss

    def without_loss(self, error: Exception, cause: Exception, like: Tensor) -> Tensor:
        """Raise the error of a loss that this process cannot evaluate, or return NaN for all processes to see."""
        raise error from cause

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return bool(self.world.max(int(flag)))

    def sum(self, value: float) -> float:
        """Sum over the processes."""
        return float(self.world.sum(torch.tensor(value, dtype=torch.float64)))

    def of_first(self, value: float) -> float:
        """The value of the first process."""
        return self.sum(value if self.is_first else 0.0)

    def check_shared(self, free: list[Tensor]) -> None:
        """Raise if parameters with a row per datum are to be trained by gradients on several processes.

        Raises:
            ValueError: names the cure.
        """

    def check_same(self, descriptions: Callable[[], dict[str, str]]) -> None:
        """Raise on all processes unless each has the same descriptions of a run.

        Args:
            descriptions: settings, and digests of starting values, by name (:mod:`pyro_nngp.inference.identity`).

        Raises:
            ProcessError: names what differs.
        """
        if self.world.size > 1:
            check_same_run("fit", self.world, descriptions())

    def shared(self, params: dict[str, Tensor], solved: set[int]) -> dict[str, Tensor]:
        """The parameters that are not rows of one process, some of which are solved for."""
        return params

    def snapshot(self, params: dict[str, Tensor], modules: list[nn.Module]) -> dict[str, Any]:
        """Copies of all parameters and of the modules' buffers."""
        state = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
        return {"params": {name: param.detach().clone() for name, param in params.items()}, "modules": state}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Any], params: dict[str, Tensor], modules: list[nn.Module]) -> None:
        """Restore a snapshot, in place."""
        for module, state in zip(modules, snapshot["modules"], strict=True):
            module.load_state_dict(state)
        for name, value in snapshot["params"].items():
            params[name].copy_(value)

    def described(self, descriptions: dict[str, str]) -> dict[str, str]:
        """The descriptions of a run, with the data of all processes."""
        return descriptions

    def store(self, path: str | PathLike[str]) -> RunStore:
        """The file, or folder, of the checkpoints of a run."""
        return RunStore(path)


class ShardedRanks(Ranks):
    """One of several processes of a run, each with rows of its own.

    Args:
        method: the method that is trained.
        shard: its rows.
    """

    def __init__(self, method: Any, shard: ShardedData) -> None:
        super().__init__(shard.world)
        self.method, self.shard = method, shard

    def batches(self, optimizer: str | None, size: int | None, seed: int, num_data: int, start: int | None) -> Any:
        if optimizer == "lbfgs":
            return LocalSubsample(Subsample(num_data, size, seed, start), self.shard)
        return LocalMinibatches(self.shard, size, self.seed(seed))

    def first_rows(self, count: int | None, device: torch.device | None) -> Tensor:
        return torch.arange(min(self.shard.num_own, count or self.shard.num_own), device=device)

    def local_rows(self, rows: Tensor) -> Tensor:
        return local_numbers(self.shard, rows)

    def sum_gradients(self, loss: Tensor, params: list[Tensor], sparse: set[int]) -> Tensor:
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

    def without_loss(self, error: Exception, cause: Exception, like: Tensor) -> Tensor:
        return like.new_tensor(math.nan)

    def check_shared(self, free: list[Tensor]) -> None:
        named = dict(self.method.named_parameters())
        local = {id(named[name]) for name in training_state(self.method)["rows"] if name in named}
        if any(id(param) in local for param in free):
            cure = "Leave solve_every out, so that they are solved for."
            fail("fit", "parameters", "of the hyperparameters alone with ShardedData", "some of each datum", cure)

    def shared(self, params: dict[str, Tensor], solved: set[int]) -> dict[str, Tensor]:
        return {name: param for name, param in params.items() if id(param) not in solved}

    def snapshot(self, params: dict[str, Tensor], modules: list[nn.Module]) -> dict[str, Any]:
        return training_state(self.method)

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Any], params: dict[str, Tensor], modules: list[nn.Module]) -> None:
        load_training_state(self.method, snapshot)

    def described(self, descriptions: dict[str, str]) -> dict[str, str]:
        return described(descriptions, self.shard)

    def store(self, path: str | PathLike[str]) -> RunStore:
        return RunStore(path, self.shard)


def _sparse(grad: Tensor, rows: Tensor) -> Tensor:
    """Some ascending rows of a dense gradient as a sparse tensor."""
    return torch.sparse_coo_tensor(rows[None], grad[rows], grad.shape, is_coalesced=True, check_invariants=False)
