"""Orderings, exact and approximate neighbor search, and tables of neighbors."""

from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.neighbors.leave_one_out import NearestOthers
from pyro_nngp.neighbors.ordering import make_ordering, time_ordering
from pyro_nngp.neighbors.search import SearchIndex, nearest, nearest_predecessors
from pyro_nngp.neighbors.symmetric import SymmetricGraph
from pyro_nngp.neighbors.table import Batch, NeighborTable

__all__ = [
    "Batch",
    "NearestOthers",
    "NeighborGraph",
    "NeighborTable",
    "SearchIndex",
    "SymmetricGraph",
    "make_ordering",
    "nearest",
    "nearest_predecessors",
    "time_ordering",
]
