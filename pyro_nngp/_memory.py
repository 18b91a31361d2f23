"""Memory for large results and temporaries: its size, and fewer page faults on CPUs.

The first access to a page costs about a microsecond. For matrices of tens of megabytes this adds up to about the time
of factorizing them.
"""

import contextlib
import errno
import math
import mmap
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from pyro_nngp._checks import fail

Call = TypeVar("Call", bound=Callable)

_ALLOCATOR = re.compile("allocate memory|bad_alloc|out of memory")
_SIZE = re.compile(r"allocate ([\d.]+) (bytes|[KMGTPE]i?B)")
_LARGE = 2**23
_KEPT = 2**24
_REUSED = 2**28
_LIMIT: ContextVar[int | None] = ContextVar("block_limit", default=None)
_unused: deque[mmap.mmap] = deque()  # changed in single operations: garbage may be collected anywhere


@contextlib.contextmanager
def block_limit(entries: int) -> Iterator[None]:
    """Limit the temporaries of all blocked computations within this block; results do not change.

    Args:
        entries: most entries at a time, >= 1; a row that needs more is computed alone.
    """
    token = _LIMIT.set(entries)
    try:
        yield
    finally:
        _LIMIT.reset(token)


@contextlib.contextmanager
def memory_errors(where: str, cure: str) -> Iterator[None]:
    """Raise one ``MemoryError`` with the size and the cure, whichever library runs out of memory in this block.

    The innermost block counts. Functions can be decorated with it.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        text, message = str(error), "to fit into the memory that is left"
        is_ours = ": expected " in text
        is_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if is_ours or not (is_memory or isinstance(error, torch.OutOfMemoryError) or _ALLOCATOR.search(text)):
            raise
        found = _SIZE.search(text)
        size = "an allocation that failed" if found is None else _in_words(found[1], found[2])
        fail(where, "the computation", message, size, cure, MemoryError, error)


def _in_words(number: str, unit: str) -> str:
    """Size of an allocation, of bytes in GiB."""
    return f"{float(number) / 2**30:.3g} GiB in one piece" if unit == "bytes" else f"{number} {unit} in one piece"


def names_memory(cure: str) -> Callable[[Call], Call]:
    """Decorate a method of an object with :func:`memory_errors`, by the names of class and method."""

    def decorate(method: Call) -> Call:
        @wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with memory_errors(f"{type(self).__name__}.{method.__name__}", cure):
                return method(self, *args, **kwargs)

        return cast(Call, run)

    return decorate


def at_once(usual: int, row_entries: int) -> int:
    """Number of rows in a block of `usual` entries, or of as many as :func:`block_limit` allows; at least one."""
    return max(1, min(usual, _LIMIT.get() or usual) // max(1, row_entries))


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialized tensor, in large pages if it is large and the system has them."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(_block(size), dtype=dtype).view(shape)


def reused(size: int) -> Tensor:
    """A buffer of `size` bytes on the CPU, which a later call gets again once no tensor uses it.

    The process keeps up to 256 MB.
    """
    if not _LARGE <= size <= _REUSED or not hasattr(mmap, "MADV_HUGEPAGE"):
        return empty((size,), torch.uint8)
    block = _unused_block(size) or _block(size)
    array = np.frombuffer(block, np.uint8, size)
    weakref.finalize(array, _give_back, block).atexit = False
    return torch.from_numpy(array)  # holds the array as long as a tensor has its memory


def _block(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the system is built without large pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _unused_block(size: int) -> mmap.mmap | None:
    """An unused block of up to twice the size."""
    with contextlib.suppress(IndexError):  # another thread took the last one
        for _ in range(len(_unused)):
            block = _unused.popleft()
            if size <= len(block) <= 2 * size:
                return block
            _unused.append(block)
    return None


def _give_back(block: mmap.mmap) -> None:
    _unused.append(block)
    with contextlib.suppress(IndexError):
        while sum(map(len, tuple(_unused))) > _REUSED:
            _unused.popleft()


def keep_freed() -> None:
    """Let temporaries of later operations reuse freed memory instead of returning it to the system each time.

    glibc keeps freed memory up to twice the largest block that was ever freed. This allocates and frees one of 16 MB
    without touching it. Other allocators are not affected.
    """
    torch.empty(_KEPT, dtype=torch.uint8)
