"""Orderings, exact and approximate neighbor search, and tables of neighbors."""

from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.neighbors.leave_one_out import NearestOthers
from pyro_nngp.neighbors.ordering import ORDERINGS, make_ordering, time_ordering
from pyro_nngp.neighbors.search import BACKENDS, SearchIndex, nearest, nearest_predecessors, recall
from pyro_nngp.neighbors.symmetric import SymmetricGraph
from pyro_nngp.neighbors.table import Batch, NeighborTable, distinct_rows, without_parents

__all__ = [
    "BACKENDS",
    "ORDERINGS",
    "Batch",
    "NearestOthers",
    "NeighborGraph",
    "NeighborTable",
    "SearchIndex",
    "SymmetricGraph",
    "distinct_rows",
    "make_ordering",
    "nearest",
    "nearest_predecessors",
    "recall",
    "time_ordering",
    "without_parents",
]
