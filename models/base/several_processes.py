"""A method's rows on several processes: their distribution, the halo, and the state that training changes.

The halo of a process holds copies of rows of others that are near its rows. Symbols: n local rows.
"""

from typing import Any

from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.distributed import ShardedData
from pyro_nngp.models.base import extension

_OF_GRAPH = ("graph.x", "graph.neighbors", "graph.context", "graph.rank")
_OF_Q = ("q.pattern", "q.response", "q.context", "q.rank")  # what families keep of the graph and of y


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
    method._distributed(choose)


def fetch_halo(method: Any) -> None:
    """Fetch the rows of the halo again, after the neighbors have changed."""
    for name, value in method.rows.with_halo(method._modules.get("graph")).items():
        setattr(method, name, value)


def training_state(method: Any) -> dict[str, dict[str, Tensor]]:
    """Copies of what training changes: "shared" tensors, and "rows" of parameters with a row per local datum."""
    tables = _row_tables(method)
    fixed = {*method.shard.values, *tables, "data_neighbors", *((*_OF_GRAPH, *_OF_Q) if _has_halo(method) else ())}
    state = {name: value.detach().clone() for name, value in method.state_dict().items() if name not in fixed}
    rows = {name: table.detach()[: method.num_data].clone() for name, table in tables.items()}
    return {"shared": state, "rows": rows}


def load_training_state(method: Any, state: dict[str, dict[str, Tensor]]) -> None:
    """Restore what :func:`training_state` returned; all processes must do so at the same time."""
    method.load_state_dict(state["shared"], strict=False)
    if _has_halo(method):
        method.graph.refresh()
    method._neighbors_changed()
    tables = _row_tables(method)  # their entries belong to the neighbors of the state, which the method has now
    for name, value in state["rows"].items():
        tables[name].data[: method.num_data] = value.to(method.x.device)
    if tables:
        method._neighbors_changed()  # for the rows of the halo


def check_whole(
    method: Any,
    what: str,
    cure: str = "Copy the hyperparameters by start=gp into a method built on tensors, on one process.",
) -> None:
    """Raise ``TypeError`` for an operation that is not there on several processes."""
    if not method.rows.is_whole:
        fail(f"{type(method).__name__}.{what}", "method", "with all rows", "one of ShardedData", cure, TypeError)


def _has_halo(method: Any) -> bool:
    """Whether the graph's points are rows of the data; inducing points are the same on all processes."""
    return hasattr(method._modules.get("graph"), "halo")


def _row_tables(method: Any) -> dict[str, Tensor]:
    """Tables of q with a row per datum, by name."""
    return {f"q.{name}": table for name, table in method._row_tables().items()}


__all__ = ["check_whole", "distribute", "fetch_halo", "load_training_state", "training_state"]
