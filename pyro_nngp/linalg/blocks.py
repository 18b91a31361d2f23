"""Results for many rows, computed for a block of rows at a time, so that temporaries stay bounded."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from pyro_nngp._memory import at_once

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
    size = at_once(_BLOCK_ENTRIES, row_entries)
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
