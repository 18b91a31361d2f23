"""The state of a method that training changes, where its rows are on several processes.

The data are not in it, nor is what follows from the rest: neighbors and halo. Symbols: n local rows.
"""

from typing import Any

import torch
from torch import Tensor

_OF_GRAPH = ("graph.x", "graph.neighbors", "graph.context", "graph.rank")
_OF_Q = ("q.pattern", "q.response", "q.context", "q.rank")  # what families keep of the graph and of y


def training_state(method: Any) -> dict[str, dict[str, Tensor]]:
    """Copies of what training changes: "shared" tensors, and "rows" of parameters with a row per local datum."""
    tables = _row_tables(method)
    fixed = {*method.shard.values, *tables, "data_neighbors", *((*_OF_GRAPH, *_OF_Q) if _has_halo(method) else ())}
    state = {name: value.detach().clone() for name, value in method.state_dict().items() if name not in fixed}
    rows = {name: table.detach()[: method.num_data].clone() for name, table in tables.items()}
    return {"shared": state, "rows": rows}


@torch.no_grad()
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


def _has_halo(method: Any) -> bool:
    """Whether the graph's points are rows of the data; inducing points are the same on all processes."""
    return hasattr(method._modules.get("graph"), "halo")


def _row_tables(method: Any) -> dict[str, Tensor]:
    """Tables of q with a row per datum, by name."""
    return {f"q.{name}": table for name, table in method._row_tables().items()}


__all__ = ["load_training_state", "training_state"]
