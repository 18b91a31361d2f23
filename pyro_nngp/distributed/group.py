"""The process group of a run under ``torchrun``."""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pyro_nngp._checks import fail
from pyro_nngp.distributed.world import World

_TIMEOUT = timedelta(minutes=5)


def join_group(backend: str = "gloo", timeout: timedelta = _TIMEOUT) -> World:
    """Join the processes that ``torchrun`` has started; under plain ``python`` there is one process, without a group.

    Unlike ``torch.distributed.init_process_group()`` it can be relied on after a restart. An agent of ``torchrun``
    keeps one store for all its starts (torch 2.13, ``dynamic_rendezvous.py``). A process that restarts may read there
    where another one listened that has died, and wait for it forever, whatever the timeout. Here the number of the
    start is part of each name in the store.

    Args:
        backend: "gloo" on CPUs, "nccl" on GPUs; set the device of the process before.
        timeout: how long a process waits for the others.

    Raises:
        RuntimeError: if there is a process group already.
    """
    if dist.is_initialized():
        cure = "Use it: methods notice it by themselves."
        fail("join_group", "the process", "to be in no group", "one in a group", cure, RuntimeError)
    if dist.is_torchelastic_launched():
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        start = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        dist.init_process_group(
            backend, store=dist.PrefixStore(start, store), rank=rank, world_size=size, timeout=timeout
        )
    return World()
