r"""The neighbor graph of NPVI (Liu and Liu 2019, section 3.1): nearest neighbors in both directions.

Points i and j are joined if either is among the K nearest of the other, whatever their order; each edge points from the
earlier to the later of the two. A point with more than K parents loses the latest of them; one with fewer than
min(K, i - 1) gets its nearest other predecessors as well.

Differs from the paper: nothing; "add more neighbors" is read as the nearest predecessors that are not yet parents.

Cost: two searches and sorts of O(N K) edges. Symbols: N points, K neighbors, E edges.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.neighbors.graph import NeighborGraph


class SymmetricGraph(NeighborGraph):
    """A :class:`~pyro_nngp.neighbors.graph.NeighborGraph` by the rule above; same arguments, same attributes.

    Row i of `neighbors` holds the parents of point i, nearest first; min(K, i - 1) of them for the i-th in the
    ordering.

    Reference: Liu, Liu (2019), "Amortized variational inference with graph convolutional networks for Gaussian
    processes", AISTATS.
    """

    def find_neighbors(self, k: int) -> Int[Tensor, "N K"]:
        index, positions = self._searcher()
        every = torch.arange(self.num_points, device=self.order.device)
        near = index.nearest(self._scaled(self.x)[self.order], k, every)
        return self._rows(_parents(*near, *index.predecessors(k)))[positions]

    def _neighbors_from(self, start: int, k: int) -> Int[Tensor, "R k"]:
        return self.find_neighbors(k)[start:]


def _parents(
    near: Int[Tensor, "N K"],
    near_distance: Float[Tensor, "N K"],
    before: Int[Tensor, "N K"],
    before_distance: Float[Tensor, "N K"],
) -> Int[Tensor, "N K"]:
    """Parents by position in the ordering, nearest first, from the nearest others and the nearest predecessors."""
    n, k = near.shape
    own = torch.arange(n, device=near.device)[:, None].expand(n, k)
    child = torch.cat([torch.maximum(own, near), own]).flatten()
    parent = torch.cat([torch.minimum(own, near), before]).flatten()
    distance = torch.cat([near_distance, before_distance]).flatten()
    further = torch.arange(2, device=near.device).repeat_interleave(n * k)  # 0 for an edge, 1 for a predecessor
    real = parent >= 0
    child, parent, distance, further = (values[real] for values in (child, parent, distance, further))

    # one entry for each pair, an edge where there is one, by child and parent
    pair = child * n + parent
    by_pair = (2 * pair + further).argsort()
    first = torch.ones_like(by_pair, dtype=torch.bool)
    first[1:] = pair[by_pair].diff() != 0
    child, parent, distance, further = (values[by_pair][first] for values in (child, parent, distance, further))

    # of each child's entries the first K: edges by the place of the parent, then further predecessors by distance
    chosen = _by(child, torch.where(further > 0, distance, -torch.inf))
    chosen = chosen[_ranks(child[chosen]) < k].sort().values
    child, parent, distance = child[chosen], parent[chosen], distance[chosen]

    order = _by(child, distance)
    table = torch.full((n, k), -1, dtype=torch.int64, device=near.device)
    table[child[order], _ranks(child[order])] = parent[order]
    return table


def _by(child: Int[Tensor, " E"], key: Float[Tensor, " E"]) -> Int[Tensor, " E"]:
    """The order by child and, among those of one child, by key; ties stay as they are."""
    order = key.argsort(stable=True)
    return order[child[order].argsort(stable=True)]


def _ranks(child: Int[Tensor, " E"]) -> Int[Tensor, " E"]:
    """How many entries of the same child come before each, for children in ascending order."""
    _, count = child.unique_consecutive(return_counts=True)
    start = (count.cumsum(0) - count).repeat_interleave(count)
    return torch.arange(len(child), device=child.device) - start
