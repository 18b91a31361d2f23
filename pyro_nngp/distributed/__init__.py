"""Data on several processes of ``torch.distributed``: rows by spatial cell, and what the processes exchange."""

from pyro_nngp.distributed.data import ShardedData
from pyro_nngp.distributed.group import join_group
from pyro_nngp.distributed.sources import ParquetColumns
from pyro_nngp.distributed.world import ProcessError, World

__all__ = [
    "ParquetColumns",
    "ProcessError",
    "ShardedData",
    "World",
    "join_group",
]
