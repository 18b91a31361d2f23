"""Memory for large results and temporaries: split into blocks, and on CPUs without a page fault for each page.

The first touch of a page costs about a microsecond, which over matrices of tens of megabytes adds up to a time like
that of factorizing them.
"""

import contextlib
import math
import mmap
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

_LARGE = 2**23
_KEPT = 2**24
_BLOCK_ENTRIES = 2**24


def in_blocks(
    compute: Callable[[slice], tuple[Tensor, ...]], num_rows: int, row_entries: int, dim: int = 0
) -> tuple[Tensor, ...]:
    """Results for all rows, computed for a block of rows at a time: one whose temporaries have some 2^24 entries.

    Results without gradients go into memory that is there before: if they were kept in between, they would scatter it
    and leave holes too small for the temporaries of the next block.

    Args:
        compute: gives some results for a slice of the rows.
        num_rows: how many rows there are.
        row_entries: entries of the temporaries of one row.
        dim: that of the rows in the results.
    """
    size = max(1, _BLOCK_ENTRIES // row_entries)
    first, *rest = [slice(start, start + size) for start in range(0, max(1, num_rows), size)]
    results = compute(first)
    if not rest:
        return results
    if any(result.requires_grad for result in results):
        return tuple(torch.cat(parts, dim) for parts in zip(results, *map(compute, rest), strict=True))
    rows_first = [result.movedim(dim, 0) for result in results]
    whole = [result.new_empty(num_rows, *result.shape[1:]) for result in rows_first]
    for part, found in chain([(first, results)], ((part, compute(part)) for part in rest)):
        for result, values in zip(whole, found, strict=True):
            result[part] = values.movedim(dim, 0)
    return tuple(result.movedim(0, dim) for result in whole)


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
