r"""Solves with the triangle I - A of conditionals whose rows are on several processes, and with its transpose.

The rows that need no row of another process come first, then those that need such rows of others, and so on: the round
of a row is how often the longest chain of its dependencies crosses a border. In each round a process solves for its
rows of that round, and sends those that others need. So each row is computed once, as on one process, and each value of
the halo is sent once. In a random ordering rounds grow with the logarithm of the rows: 93 and 206 for a million rows in
two dimensions on 2 and 512 processes, K = 16 (benchmarks/results/shards.md).

Cost: O(n K), and as many exchanges as rounds. Symbols: n local rows, h rows of the halo, K neighbors, L right-hand
sides.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from torch import Tensor

from pyro_nngp.distributed.data import ShardedData
from pyro_nngp.distributed.halo import Halo
from pyro_nngp.linalg.level_scheduling import dependency_levels
from pyro_nngp.linalg.sparse_triangular import SparseTriangle


class Round(NamedTuple):
    """Work of a process in one round.

    Attributes:
        rows: local rows of the round.
        near: places among `rows` of their neighbors of the same round (n_k, K), -1 for others.
        levels: dependency levels of these.
        halo: the halo's rows that are computed in this round.
        places: where they are in the whole halo.
    """

    rows: Int[Tensor, " n_k"]
    near: Int[Tensor, "n_k K"]
    levels: list[Tensor]
    halo: Halo
    places: Int[Tensor, " h_k"]


def find_rounds(data: ShardedData, halo: Halo, neighbors: Int[Tensor, "n K"]) -> list[Round]:
    """The rounds of all processes, as many on each; all of them must call it at the same time.

    Args:
        data: the rows.
        halo: the rows of others.
        neighbors: places of the neighbors of local rows among these and the halo (n, K), -1 padded.
    """
    count, near = len(neighbors), neighbors.clamp(min=0)
    own = torch.where(neighbors < count, neighbors, -1)
    levels = dependency_levels(own)
    number = torch.zeros(count + len(halo), dtype=torch.int64)
    while True:
        before = number[:count].clone()
        added = torch.where(neighbors < 0, 0, (neighbors >= count).long())
        for rows in levels:
            asked = torch.where(neighbors[rows] < 0, 0, number[near[rows]] + added[rows])
            number[rows] = asked.amax(-1)
        number[count:] = halo.fetch(number[:count])
        if not data.world.max(int(not torch.equal(before, number[:count]))):
            break
    rounds, place = [], torch.empty(count, dtype=torch.int64)
    for k in range(data.world.max(int(number.max())) + 1):
        rows, places = (number[:count] == k).nonzero()[:, 0], (number[count:] == k).nonzero()[:, 0]
        place[rows] = torch.arange(len(rows))
        same = (own[rows] >= 0) & (number[own[rows].clamp(min=0)] == k)
        inner = torch.where(same, place[own[rows].clamp(min=0)], -1)
        within = dependency_levels(inner) if len(rows) else [rows]
        rounds.append(Round(rows, inner, within, Halo(data, halo.numbers[places]), places))
    return rounds


class ShardedTriangle:
    """I - A of all rows; all processes must call each method at the same time. All values are on the CPU.

    Args:
        rounds: from :func:`find_rounds`.
        w: weights of local rows (n, K), 0 where there is no neighbor.
        neighbors: as of :func:`find_rounds`.
        num_halo: h.
    """

    def __init__(
        self, rounds: list[Round], w: Float[Tensor, "n K"], neighbors: Int[Tensor, "n K"], num_halo: int
    ) -> None:
        self._rounds, self._size = rounds, len(w) + num_halo
        self._inner = [SparseTriangle(w[r.rows].masked_fill(r.near < 0, 0.0), r.near, r.levels) for r in rounds]
        self._outer = [_Earlier(w[r.rows].masked_fill(r.near >= 0, 0.0), neighbors[r.rows]) for r in rounds]

    def solve(self, right: Float[Tensor, "L n"], transposed: bool = False) -> Float[Tensor, "L n"]:
        """Solve (I - A) u = right, or (I - A)' u = right."""
        if transposed:
            return self._solve_transposed(right)
        count = right.shape[1]
        u = right.new_zeros(self._size, len(right))
        for part, triangle, earlier in zip(self._rounds, self._inner, self._outer, strict=True):
            if len(part.rows):
                u[part.rows] = triangle.solve(right[:, part.rows] + earlier.product(u)).mT
            u[count + part.places] = part.halo.fetch(u[:count])
        return u[:count].mT

    def _solve_transposed(self, right: Float[Tensor, "L n"]) -> Float[Tensor, "L n"]:
        count = right.shape[1]
        u = torch.cat([right.mT, right.new_zeros(self._size - count, len(right))])
        for part, triangle, earlier in zip(self._rounds[::-1], self._inner[::-1], self._outer[::-1], strict=True):
            part.halo.add_back(u[:count], u[count + part.places])
            if len(part.rows):
                solution = triangle.solve(u[part.rows].mT, transposed=True)
                u[part.rows] = solution.mT
                earlier.add_transposed(u, solution)
        return u[:count].mT


class _Earlier:
    """The weights of rows of earlier rounds and of the halo in the rows of one round."""

    def __init__(self, w: Float[Tensor, "n_k K"], neighbors: Int[Tensor, "n_k K"]) -> None:
        self._columns, places = neighbors.clamp(min=0).unique(return_inverse=True)
        self._matrix = sparse_rows(w, places.view_as(neighbors), len(self._columns))
        self._matrix.eliminate_zeros()
        self._transposed = self._matrix.T.tocsr()

    def product(self, u: Float[Tensor, "m L"]) -> Float[Tensor, "L n_k"]:
        return torch.from_numpy(self._matrix @ u[self._columns].numpy()).mT

    def add_transposed(self, u: Float[Tensor, "m L"], values: Float[Tensor, "L n_k"]) -> None:
        u.index_add_(0, self._columns, torch.from_numpy(self._transposed @ values.mT.numpy()))


def sparse_rows(entries: Float[Tensor, "n K"], columns: Int[Tensor, "n K"], num_columns: int) -> csr_array:
    """A sparse matrix with as many entries in each row."""
    pointers = np.arange(0, columns.numel() + 1, columns.shape[1])
    parts = entries.flatten().numpy(), columns.flatten().numpy(), pointers
    return csr_array(parts, shape=(len(columns), num_columns))
