"""Table of a method's hyperparameters: estimates, and intervals with what they are.

Cost: the intervals (:mod:`pyro_nngp.models.base.intervals`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from pyro.nn import PyroModule
from torch import Tensor

from pyro_nngp._checks import check_fraction
from pyro_nngp.hyperparameters.description import parameters, prior_name
from pyro_nngp.likelihoods import Gaussian, StudentT
from pyro_nngp.means import LinearMean
from pyro_nngp.models.base.intervals import Intervals

if TYPE_CHECKING:
    from pandas import DataFrame

_COLUMNS = ["estimate", "lower", "upper", "prior", "unit", "note"]
_BY_COLUMN = {"lengthscale", "slope"}  # attributes with an entry for each input column


def summarize(method: Any, probability: float) -> "DataFrame":
    """The table of :meth:`~pyro_nngp.models.base.Method.summary`."""
    from pandas import DataFrame  # a dependency of ArviZ; the import takes half a second

    check_fraction(f"{type(method).__name__}.summary", "probability", probability, "Pass a number such as 0.95.")
    tail = (1 - probability) / 2
    quantiles = [method.hyper_guide.quantiles(level) for level in (0.5, tail, 1 - tail)]
    intervals, names = Intervals(method, probability), _Names(method)
    rows: dict[str, list[Any]] = {}
    for path, part in method.named_modules():
        if not isinstance(part, PyroModule):
            continue
        own, prefix = (method._hyperparameters, "") if part is method else (None, f"{path}.")
        for name, value in parameters(part):
            if own is None or name in own:
                lower, upper, notes = intervals.of(part, name, value)
                rows |= names.rows(prefix, part, name, [value, lower, upper], "", notes)
        for name in part._pyro_samples:
            if (part, name) in quantiles[0] and (own is None or name in own):
                values = [quantile[part, name] for quantile in quantiles]
                notes = ["quantiles of the guide"] * values[0].numel()
                rows |= names.rows(prefix, part, name, values, prior_name(part, name), notes)
    return DataFrame.from_dict(rows, orient="index", columns=_COLUMNS)


class _Names:
    """Names and units of hyperparameters, in terms of the columns of the data.

    Args:
        method: the method.
    """

    def __init__(self, method: Any) -> None:
        self._columns = method.columns or [f"x[{d}]" for d in range(method.x.shape[1])]
        self._has_columns = method.columns is not None
        self._outputs: tuple[Any, ...] = tuple(method.outputs or ())
        self._y = self._outputs[0] if len(self._outputs) == 1 else "y"
        self._f = self._y if isinstance(method.likelihood, Gaussian | StudentT) else "f"

    def rows(
        self, prefix: str, part: Any, name: str, values: list[Tensor], prior: str, notes: list[str]
    ) -> dict[str, list[Any]]:
        """One row for each entry of a hyperparameter, by name."""
        entries, shape = zip(*(value.flatten().tolist() for value in values), strict=True), tuple(values[0].shape)
        of_part = self._columns_of(part)
        found = {}
        for entry, index, note in zip(entries, _indices(values[0]), notes, strict=True):
            column = of_part[index[0]] if len(index) and name in _BY_COLUMN and shape[0] == len(of_part) else None
            labels = [str(i) for i in index]
            if column is not None and (self._has_columns or column not in self._columns):
                labels[0] = column
            elif len(self._outputs) > 1 and index and shape[0] == len(self._outputs):
                labels = [
                    str(self._outputs[index[0]]),
                    *(label for label, n in zip(labels[1:], shape[1:], strict=True) if n > 1),
                ]
            full = f"{prefix}{name}" + (f"[{','.join(labels)}]" if labels else "")
            found[full] = [*entry, prior, self._unit(prefix, name, column, of_part), note]
        return found

    def _columns_of(self, part: Any) -> list[str]:
        """Names of the columns, and of the waves of them, that a kernel or a mean function takes."""
        if isinstance(part, LinearMean):
            return part.labels(self._columns)
        active = getattr(part, "active_dims", None)
        return list(self._columns) if active is None else [self._columns[d] for d in torch.as_tensor(active).tolist()]

    def _unit(self, prefix: str, name: str, column: str | None, columns: list[str]) -> str:
        """The unit in words; empty where the value has none, or it depends on the rest of a kernel."""
        if name == "lengthscale":
            return column or (columns[0] if len(columns) == 1 else "x")
        units = {
            ("kernel.", "variance"): f"{self._f} squared",
            ("likelihood.", "variance"): f"{self._y} squared",
            ("likelihood.", "scale"): self._y,
            ("mean.", "value"): self._f,
            ("mean.", "slope"): f"{self._f} per {column}" if column in self._columns else self._f,
        }
        return units.get((prefix, name), "")


def _indices(value: Tensor) -> Iterator[Any]:
    return (tuple(row) for row in torch.ones(value.shape).nonzero().tolist()) if value.dim() else iter([()])
