"""Dependency levels: the rows of a neighbor table in groups that can be treated in parallel, one group after the other.

Cost: O(N K), in one vectorized pass per group: hundreds of groups for 10^5 points in random order, thousands in
coordinate order.

Symbols: N rows, K neighbors.
"""

import numpy as np
import torch
from jaxtyping import Int
from scipy import sparse
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._indexing import distinct


def dependency_levels(neighbors: Int[Tensor, "N K"]) -> list[Int[Tensor, " _"]]:
    """Rows grouped so that all neighbors of a row are in earlier groups; the first group has no neighbors.

    Args:
        neighbors: rows that each row depends on, -1 padded.

    Raises:
        ValueError: if the dependencies form a cycle, or an entry is not a row.
    """
    with torch._C._DisableFuncTorch():  # they are numbers within torch.func as well, and levels are kept beyond it
        return _levels(neighbors)


def _levels(neighbors: Tensor) -> list[Tensor]:
    table = neighbors.cpu().numpy()
    n = len(table)
    if table.size and (table.min() < -1 or table.max() >= n):
        actual = f"{table.min()}..{table.max()}"
        fail("dependency_levels", "neighbors", f"in -1..{n - 1}", actual, "Give row numbers, -1 for none.")
    real = table >= 0
    waiting = real.sum(1)
    start = np.append(0, waiting.cumsum())
    arcs = sparse.csr_array((np.ones(start[-1], np.int8), table[real], start), shape=(n, n)).tocsc()
    start, dependents = arcs.indptr, arcs.indices  # the dependents of row i are at start[i]:start[i + 1]
    level, levels = np.flatnonzero(waiting == 0), []
    while len(level):
        levels.append(torch.from_numpy(level).to(neighbors.device))
        count = start[level + 1] - start[level]
        offset = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        freed = dependents[np.repeat(start[level], count) + offset]
        np.subtract.at(waiting, freed, 1)
        level = distinct(freed[waiting[freed] == 0]).astype(np.int64)
    placed = sum(map(len, levels))
    if placed < n:
        cure = "Let each row depend only on rows before it in some ordering."
        fail("dependency_levels", "neighbors", "to form no cycle", f"one among {n - placed} rows", cure)
    return levels
