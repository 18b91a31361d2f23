"""Memory for large results and temporaries: how much at once, and on CPUs without a page fault for each page.

The first touch of a page costs about a microsecond, which over matrices of tens of megabytes adds up to a time like
that of factorizing them.
"""

import contextlib
import math
import mmap
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

_LARGE = 2**23
_KEPT = 2**24
_LIMIT: ContextVar[int | None] = ContextVar("block_limit", default=None)


@contextlib.contextmanager
def block_limit(entries: int) -> Iterator[None]:
    """Hold at most so many entries of temporaries at once, in everything that works in blocks; results are the same.

    Args:
        entries: >= 1; where one row needs more, it is worked on alone.
    """
    token = _LIMIT.set(entries)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def at_once(usual: int, row_entries: int) -> int:
    """Rows of a block: as many as have `usual` entries, or those of :func:`block_limit`, and one at least."""
    return max(1, min(usual, _LIMIT.get() or usual) // max(1, row_entries))


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """`torch.empty`, large ones in large pages where the system has them."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # from a system built without them
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=dtype).view(shape)


def keep_freed() -> None:
    """Let temporaries of later operations reuse freed memory instead of returning it to the system each time.

    glibc keeps freed memory up to twice the largest block that it has seen freed; this shows it one of 16 MB, which no
    one touches. Other allocators take no notice.
    """
    torch.empty(_KEPT, dtype=torch.uint8)
