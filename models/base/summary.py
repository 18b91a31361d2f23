"""Table of a method's hyperparameters: estimates, and intervals for those with priors.

Cost: O(hyperparameters).
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from pyro.nn import PyroModule
from torch import Tensor

from pyro_nngp._checks import check_number, fail
from pyro_nngp.hyperparameters import HyperparameterGuide
from pyro_nngp.hyperparameters.description import parameters, prior_name

if TYPE_CHECKING:
    from pandas import DataFrame


def summarize(method: Any, guide: HyperparameterGuide, probability: float) -> "DataFrame":
    """The table of :meth:`~pyro_nngp.models.base.Method.summary`."""
    from pandas import DataFrame  # a dependency of ArviZ; the import takes half a second

    where, cure = f"{type(method).__name__}.summary", "Pass a number such as 0.95."
    check_number(where, "probability", probability, cure=cure)
    if not 0 < probability < 1:
        fail(where, "probability", "in (0, 1)", probability, cure)
    tail = (1 - probability) / 2
    quantiles = [guide.quantiles(level) for level in (0.5, tail, 1 - tail)]
    rows: dict[str, list[Any]] = {}
    for path, part in method.named_modules():
        if not isinstance(part, PyroModule):
            continue
        own, prefix = (method._hyperparameters, "") if part is method else (None, f"{path}.")
        for name, value in parameters(part):
            if own is None or name in own:
                none = torch.full_like(value, math.nan)
                rows |= _rows(f"{prefix}{name}", [value, none, none], "")
        for name in part._pyro_samples:
            if (part, name) in quantiles[0] and (own is None or name in own):
                values = [quantile[part, name] for quantile in quantiles]
                rows |= _rows(f"{prefix}{name}", values, prior_name(part, name))
    return DataFrame.from_dict(rows, orient="index", columns=["estimate", "lower", "upper", "prior"])


def _rows(path: str, values: list[Tensor], prior: str) -> dict[str, list[Any]]:
    """One row for each entry of a hyperparameter, by name."""
    entries = zip(*(value.flatten().tolist() for value in values), strict=True)
    names = [path] if values[0].dim() == 0 else [f"{path}[{','.join(map(str, i))}]" for i in _indices(values[0])]
    return {name: [*entry, prior] for name, entry in zip(names, entries, strict=True)}


def _indices(value: Tensor) -> Iterator[tuple[int, ...]]:
    return (tuple(row) for row in torch.ones(value.shape).nonzero().tolist())
