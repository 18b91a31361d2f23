"""(I - A, V) of a nearest-neighbor prior, on one process or several."""

from typing import Any

import torch
from torch import Tensor

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributed.factor import ShardedFactor
from pyro_nngp.distributed.table import ShardedGraph
from pyro_nngp.distributions import NNGP
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.neighbors import NeighborGraph


@torch.no_grad()
def prior_factor(kernel: Any, graph: NeighborGraph, jitter: float) -> VecchiaFactor | ShardedFactor:
    """The factor of the prior at all rows, for iterative solvers; with a sharded graph all processes must call it.

    Args:
        kernel: bound.
        graph: the points and their neighbors.
        jitter: relative nugget.
    """
    if not isinstance(graph, ShardedGraph):
        return NNGP(kernel, graph, jitter=jitter).factor.prepared()

    def conditional(rows: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        return graph_conditional(kernel, graph.x[rows], graph.x, near, jitter=jitter)

    return ShardedFactor(graph, conditional)
