"""A method's rows on several processes: their distribution, and the halo.

The halo of a process holds copies of rows of others that are near its rows. Symbols: n local rows.
"""

from typing import Any

from pyro_nngp._checks import fail
from pyro_nngp.distributed import ShardedData
from pyro_nngp.models.base import construction, extension


def distribute(method: Any, data: ShardedData, choose: bool) -> None:
    """Replace the sample that a method was built on by the local rows, and find their neighbors among all rows.

    A method that takes ShardedData has it as ``_distribute``, which its constructor calls; all processes must do so at
    the same time.

    Args:
        method: the method, built on the sample.
        data: the rows.
        choose: whether the number of neighbors was not given.

    Raises:
        ValueError: for targets outside the support of the likelihood.
    """
    extension.check_rows(method, data.values)
    method.shard = data
    table = method._sharded_table(data, choose)
    if table is not None:
        method.graph = table
    fetch_halo(method)
    construction.free_bounded_levels(method)
    method._distributed(choose)


def fetch_halo(method: Any) -> None:
    """Fetch the rows of the halo again, after the neighbors have changed."""
    for name, value in method.rows.with_halo(method._modules.get("graph")).items():
        setattr(method, name, value)


def check_whole(
    method: Any,
    what: str,
    cure: str = "Copy the hyperparameters by start=gp into a method built on tensors, on one process.",
) -> None:
    """Raise ``TypeError`` for an operation that is not there on several processes."""
    if not method.rows.is_whole:
        fail(f"{type(method).__name__}.{what}", "method", "with all rows", "one of ShardedData", cure, TypeError)


__all__ = ["check_whole", "distribute", "fetch_halo"]
