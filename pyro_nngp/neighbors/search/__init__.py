"""Nearest-neighbor search: one index over several backends, with exact answers."""

from pyro_nngp.neighbors.search.index import SearchIndex, nearest, nearest_predecessors

__all__ = [
    "SearchIndex",
    "nearest",
    "nearest_predecessors",
]
