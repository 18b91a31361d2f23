"""New data: rows appended to a method in place, and light copies that are conditioned on further rows.

Hyperparameters stay as they are. What a method keeps per datum follows: neighbors of the new rows (old sets stay where
there is an ordering), q of the new rows, from the old q of all others as the start, and the posterior of coefficients
of the mean that the method solves for.

Symbols: N data, P new rows, T outputs, S fantasies.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyro_nngp._checks import check_batch, check_new_inputs, check_same_kind, check_tensor, fail, warn
from pyro_nngp.data.tables import BY_ROW, read_rows, without_missing
from pyro_nngp.models.base.arguments import check_by_row, check_data

_OF_DATA = frozenset({"x", "y", *BY_ROW, "data_neighbors", "graph.x", "graph.order", "graph.neighbors"})


def extend(method: Any, x: Any, y: Any, by_row: dict[str, Any]) -> None:
    """Append rows in place; see :meth:`~pyro_nngp.models.base.Method.extend`."""
    where = f"{type(method).__name__}.extend"
    if torch.is_inference_mode_enabled():
        cure = "Its tensors could not be trained: extend outside, and predict inside."
        fail(where, "gradients", "to be possible", "torch.inference_mode()", cure, RuntimeError)
    inputs, targets, others = read_rows(where, method, x, y, by_row)
    inputs, targets, values = without_missing(where, inputs, targets, others)
    with _restored_on_failure(method):
        _append(method, where, inputs, targets, others | values)


def condition_on(method: Any, x: Any, y: Any, by_row: dict[str, Any]) -> Any:
    """A copy with more data; see :meth:`~pyro_nngp.models.base.Method.condition_on`."""
    where = f"{type(method).__name__}.condition_on"
    inputs, targets, others = read_rows(where, method, x, y, by_row)
    new = _sharing_copy(method)
    if isinstance(targets, Tensor) and targets.dim() == 2 and method.y is not None and method.y.dim() == 1:
        targets = new._repeat_targets(where, targets)
    _append(new, where, inputs, targets, others)
    return new


@torch.inference_mode(False)
@torch.no_grad()
def subset(method: Any, rows: Tensor) -> Any:
    """A copy on some of the rows; see :meth:`~pyro_nngp.models.base.Method.subset`."""
    where = f"{type(method).__name__}.subset"
    check_batch(where, "rows", rows, method.num_data)
    if len(rows) < 2:
        fail(where, "rows", "to hold two or more rows", len(rows), "Methods condition each point on others.")
    tables = [value for name, value in method.named_buffers() if name in _OF_DATA]
    new = copy.deepcopy(method, {id(value): value for value in tables})
    new._keep_rows(rows)
    return new


def check_rows(method: Any, values: Mapping[str, Tensor]) -> None:
    """Check the local rows of one of several processes, and code their targets as the method does."""
    where, by_row = type(method).__name__, {name: values.get(name) for name in BY_ROW}
    check_data(where, values["x"], values["y"], method.likelihood)
    check_by_row(where, values["x"], values["y"], method.likelihood, method.latent_shape, by_row)
    values["y"] = method._coded(values["y"]).to(method.y.dtype)  # type: ignore[index]


def check_names_by_row(where: str, method: Any, by_row: Mapping[str, Any]) -> None:
    """Raise unless offset, weights, trials and limits are given for new rows where the method has them."""
    for name in BY_ROW:
        if (getattr(method, name) is None) != (by_row.get(name) is None):
            expectation = "of the new rows" if by_row.get(name) is None else "None, as the method has none"
            actual = "None" if by_row.get(name) is None else "values"
            fail(where, name, expectation, actual, "Give what the constructor got.")


def warn_untrained(where: str) -> None:
    """Warn that q(u) does not know the new rows."""
    warn(f"{where}: q(u) at the inducing points has not seen the new rows, which only training can change: call fit.")


@torch.no_grad()
def _append(method: Any, where: str, x: Any, y: Any, by_row: dict[str, Any]) -> None:
    check_new_inputs(where, x, method.x)
    if (y is None) != (method.y is None):
        expectation = "to be None, as the method has no targets" if method.y is None else "of shape (P, ...)"
        fail(where, "y", expectation, getattr(y, "shape", None), "Give what the constructor got.")
    if y is not None:
        check_tensor(where, "y", y)
        check_same_kind(where, x=method.x, y=y)
        y = method._coded(y)
        if y.shape != (len(x), *method.y.shape[1:]):
            expectation = f"of shape {(len(x), *method.y.shape[1:])}"
            fail(where, "y", expectation, tuple(y.shape), "One row of y per row of x.")
        if y.is_floating_point():
            method._targets.check(where, y)
        if method.likelihood is not None and not method.likelihood.differs_by_row:
            method._targets.check_support(method.likelihood, y)
    check_names_by_row(where, method, by_row)
    checked = check_by_row(where, x, y, method.likelihood, method.latent_shape, by_row)
    values = {name: value for name, value in checked.items() if value is not None}
    for name, value in values.items():
        shape = (len(x), *getattr(method, name).shape[1:])
        if value.shape != shape:
            fail(where, name, f"of shape {shape}", tuple(value.shape), "Give what the constructor got.")
    method._append_rows(x.detach(), None if y is None else y.detach().to(method.y), values)


@contextmanager
def _restored_on_failure(method: Any) -> Iterator[None]:
    """Put all parts of the method and their values back if the block raises."""
    parts = [(part, {key: _copied(value) for key, value in vars(part).items()}) for part in method.modules()]
    state = {name: value.clone() for name, value in method.state_dict().items()}
    try:
        yield
    except BaseException:
        for part, attributes in parts:
            vars(part).clear()
            vars(part).update(attributes)
        method.load_state_dict(state)
        raise


def _sharing_copy(method: Any) -> Any:
    """A copy that has hyperparameters and data in common with the method, but not q."""
    parts = [method._modules.get(name) for name in method._own_state]
    excluded = {id(value) for part in parts if part is not None for value in (*part.parameters(), *part.buffers())}
    tables = [value for name, value in method.named_buffers() if name in _OF_DATA]
    shared = [value for value in (*method.parameters(), *tables) if id(value) not in excluded]
    return copy.deepcopy(method, {id(value): value for value in shared})


def _copied(value: Any) -> Any:
    """A copy of a dictionary, such as the buffers of a module; anything else itself."""
    return value.copy() if isinstance(value, dict) else value
