"""Random numbers of the package's own, apart from the global random state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def seeded(seed: int | None, like: Tensor) -> Iterator[None]:
    """Draw random numbers from a seed and leave the global random state alone; None draws from the latter.

    Args:
        seed: of the CPU's generator, and of that of the accelerator where `like` is.
        like: a tensor on the device of the draws.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[like.device.index] if like.is_cuda else []):
        torch.manual_seed(seed)
        yield
