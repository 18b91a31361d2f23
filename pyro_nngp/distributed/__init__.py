"""Data on several processes of ``torch.distributed``: rows by spatial cell, and what the processes exchange."""

from pyro_nngp.distributed.data import ShardedData
from pyro_nngp.distributed.factor import ShardedFactor
from pyro_nngp.distributed.group import join_group
from pyro_nngp.distributed.halo import Halo, Near
from pyro_nngp.distributed.points import ShardedPoints
from pyro_nngp.distributed.search import ShardedIndex
from pyro_nngp.distributed.sources import ParquetColumns
from pyro_nngp.distributed.table import ShardedGraph, ShardedNeighborhoods, ShardedOthers, ShardedTable
from pyro_nngp.distributed.world import ProcessError, Route, World

__all__ = [
    "Halo",
    "Near",
    "ParquetColumns",
    "ProcessError",
    "Route",
    "ShardedData",
    "ShardedFactor",
    "ShardedGraph",
    "ShardedIndex",
    "ShardedNeighborhoods",
    "ShardedOthers",
    "ShardedPoints",
    "ShardedTable",
    "World",
    "join_group",
]
