"""Compute results for many rows in blocks of rows, so that temporary memory stays bounded."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from pyro_nngp._memory import at_once

_BLOCK_ENTRIES = 2**24


def in_blocks(
    compute: Callable[[slice], tuple[Tensor, ...]], num_rows: int, row_entries: int, dim: int = 0
) -> tuple[Tensor, ...]:
    """Compute results for all rows in blocks whose temporaries have about 2^24 entries.

    Results without gradients are written into memory allocated beforehand, since small results kept between blocks
    would fragment the memory for the temporaries.

    Args:
        compute: maps a slice of the rows to a tuple of results.
        num_rows: number of rows.
        row_entries: entries of temporaries per row.
        dim: dimension of the results that indexes rows.
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
    for part, block in chain([(first, results)], ((part, compute(part)) for part in rest)):
        for result, values in zip(whole, block, strict=True):
            result[part] = values.movedim(dim, 0)
    return tuple(result.movedim(0, dim) for result in whole)
