r"""The neighbor graph of NPVI (Liu and Liu 2019, section 3.1): nearest neighbors in both directions.

Points i and j are joined if either is among the K nearest of the other, whatever their order; each edge points from the
earlier to the later of the two. A point with more than K parents loses the latest of them; one with fewer than
min(K, i - 1) gets its nearest other predecessors as well.

Differs from the paper: nothing; "add more neighbors" is read as the nearest predecessors that are not yet parents.

Cost: two searches and sorts of O(N K) edges. Symbols: N points, K neighbors, E edges.
"""

from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.neighbors.graph import NeighborGraph

Neighbors: TypeAlias = tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]
"""Neighbors of each point and their distances."""


class SymmetricGraph(NeighborGraph):
    """A neighbor graph whose edges join nearest neighbors in both directions.

    Arguments and attributes are as in :class:`~pyro_nngp.neighbors.graph.NeighborGraph`.

    Row i of `neighbors` holds the parents of point i, nearest first; min(K, i - 1) of them for the i-th in the
    ordering.

    Reference: Liu, Liu (2019), "Amortized variational inference with graph convolutional networks for Gaussian
    processes", AISTATS.
    """

    def find_neighbors(self, k: int) -> Int[Tensor, "N K"]:
        index, positions = self._searcher()
        every = torch.arange(self.num_points, device=self.order.device)
        near = index.nearest(self._scaled(self.x)[self.order], k, every)
        return self._rows(_parents(every, near, index.predecessors(k)))[positions]

    def _neighbors_from(self, start: int, k: int) -> Int[Tensor, "R k"]:
        return self.find_neighbors(k)[start:]


def _parents(every: Int[Tensor, " N"], near: Neighbors, before: Neighbors) -> Int[Tensor, "N K"]:
    """Parents by position in the ordering, nearest first, from the nearest others and the nearest predecessors."""
    points = every[:, None].expand_as(near[0])
    edges = torch.maximum(points, near[0]).flatten(), torch.minimum(points, near[0]).flatten(), near[1].flatten()
    return select_parents(edges, before, len(every))


def select_parents(
    edges: tuple[Int[Tensor, " E"], Int[Tensor, " E"], Float[Tensor, " E"]], before: Neighbors, num_points: int
) -> Int[Tensor, "n K"]:
    """Parents of some points by position in the ordering, nearest first, -1 padded.

    Args:
        edges: of points that are near each other, the row 0..n-1 of the later one, the position of the earlier one, and
            their distance; any order, repeats are allowed.
        before: positions of the K nearest predecessors of each of the n points, -1 padded, and their distances.
        num_points: N, of all points that have positions.
    """
    n, k = before[0].shape
    rows = torch.arange(n, device=before[0].device).repeat_interleave(k)
    child, parent = torch.cat([edges[0], rows]), torch.cat([edges[1], before[0].flatten()])
    distance = torch.cat([edges[2], before[1].flatten()])
    further = (torch.arange(len(child), device=child.device) >= len(edges[0])).long()  # 0 for an edge
    real = parent >= 0
    child, parent, distance, further = (values[real] for values in (child, parent, distance, further))

    # one entry for each pair, an edge where there is one, by child and parent
    pair = child * num_points + parent
    by_pair = (2 * pair + further).argsort()
    first = torch.ones_like(by_pair, dtype=torch.bool)
    first[1:] = pair[by_pair].diff() != 0
    child, parent, distance, further = (values[by_pair][first] for values in (child, parent, distance, further))

    # of each child's entries the first K: edges by the place of the parent, then further predecessors by distance
    chosen = _by(child, torch.where(further > 0, distance, -torch.inf))
    chosen = chosen[_ranks(child[chosen]) < k].sort().values
    child, parent, distance = child[chosen], parent[chosen], distance[chosen]

    order = _by(child, distance)
    table = torch.full((n, k), -1, dtype=torch.int64, device=child.device)
    table[child[order], _ranks(child[order])] = parent[order]
    return table


def _by(child: Int[Tensor, " E"], key: Float[Tensor, " E"]) -> Int[Tensor, " E"]:
    """Order by child and, within a child, by key; ties stay as they are."""
    order = key.argsort(stable=True)
    return order[child[order].argsort(stable=True)]


def _ranks(child: Int[Tensor, " E"]) -> Int[Tensor, " E"]:
    """Number of entries of the same child before each entry, for children in ascending order."""
    _, count = child.unique_consecutive(return_counts=True)
    start = (count.cumsum(0) - count).repeat_interleave(count)
    return torch.arange(len(child), device=child.device) - start
