"""Folds of the rows for cross-validation: at random, in groups that stay together, or in blocks of space.

Folds at random ask how a method interpolates between close neighbors, blocks how it bridges a gap, groups how it
predicts for a person or a site without data.

Cost: O(N log N). Symbols: N rows, D columns, F folds, G groups.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import check_int, check_seed, check_tensor, fail
from pyro_nngp._random import shuffled
from pyro_nngp.distributed.cells import Cells

USUAL_FOLDS = 10


def assign_folds(
    where: str,
    x: Float[Tensor, "N D"],
    folds: Any = None,
    blocks: float | Sequence[float] | None = None,
    num_blocks: int | None = None,
    groups: Any = None,
    seed: int = 0,
) -> Int[Tensor, " N"]:
    """The fold of each row, 0..F-1; arguments as in :func:`~pyro_nngp.inference.cross_validate`.

    Raises:
        ValueError, TypeError: for malformed arguments, or more folds than rows, groups or blocks.
    """
    check_seed(where, seed)
    given = {"blocks": blocks, "num_blocks": num_blocks, "groups": groups}
    names = [name for name, value in given.items() if value is not None]
    is_number = folds is None or isinstance(folds, int)
    if len(names) > 1 or (names and not is_number):
        actual, cure = " and ".join(names if is_number else ["folds of each row", *names]), "Give one of them."
        fail(where, "folds", "by one of folds, blocks, num_blocks and groups", actual, cure)
    if not is_number:
        return _checked(where, "folds", _numbered(where, "folds", folds, len(x)))
    if folds is not None:
        check_int(where, "folds", folds, 2, "It is the number of folds.")
    if groups is not None:
        parts = _checked(where, "groups", _numbered(where, "groups", groups, len(x)))
    elif blocks is not None:
        parts = _checked(where, "blocks", _cubes(where, x, blocks))
    elif num_blocks is not None:
        check_int(where, "num_blocks", num_blocks, 2, "It is the number of blocks.")
        if num_blocks > len(x):
            fail(where, "num_blocks", f"<= {len(x)}, the number of rows", num_blocks, "Take fewer blocks.")
        parts = Cells(x.cpu(), num_blocks)(x.cpu()).unique(return_inverse=True)[1]
    else:
        parts = torch.arange(len(x), device="cpu")
    count = int(parts.max()) + 1
    if folds is not None and folds > count:
        what = f"{names[0] if names else 'rows'}, of which there are {count}"
        fail(where, "folds", f"not to exceed the number of {what}", folds, "Take fewer folds.")
    return _dealt(parts, min(USUAL_FOLDS, count) if folds is None else folds, seed)


def _dealt(parts: Int[Tensor, " N"], folds: int, seed: int) -> Int[Tensor, " N"]:
    """Parts dealt to folds, the largest first and others in random order, each to the fold with the fewest rows."""
    sizes = parts.bincount()
    order = shuffled(len(sizes), seed)
    order = order[sizes[order].argsort(descending=True, stable=True)]
    if int(sizes.max()) == 1:
        return (order.argsort() % folds)[parts]
    fold, rows = torch.empty_like(sizes), [0] * folds
    for part, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fold[part] = smallest = rows.index(min(rows))
        rows[smallest] += size
    return fold[parts]


def _cubes(where: str, x: Float[Tensor, "N D"], sides: float | Sequence[float]) -> Int[Tensor, " N"]:
    """Numbers of the boxes of a regular grid that hold the rows."""
    listed = list(sides) if isinstance(sides, Sequence) else []
    each = [sides] * x.shape[1] if isinstance(sides, int | float) else listed
    numbers = all(isinstance(side, int | float) and not isinstance(side, bool) and side > 0 for side in each)
    if len(each) != x.shape[1] or not numbers:
        cure = "Give the side of a block in the units of x, or one for each column, inf for columns that do not count."
        fail(where, "blocks", f"to be a positive number, or {x.shape[1]} of them", f"{sides!r:.60}", cure)
    x = x.double().cpu()
    cells = torch.stack([_slabs(column, float(side)) for column, side in zip(x.unbind(1), each, strict=True)], 1)
    return cells.unique(dim=0, return_inverse=True)[1]


def _slabs(values: Float[Tensor, " N"], side: float) -> Float[Tensor, " N"]:
    low = values.min()
    return torch.zeros_like(values) if math.isinf(side) else ((values - low) / side).floor()


def _numbered(where: str, arg: str, labels: Any, num_rows: int) -> Int[Tensor, " N"]:
    """Numbers 0..G-1 of labels of any kind."""
    if isinstance(labels, Tensor):
        check_tensor(where, arg, labels)
    values = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    cure = (
        "Rows whose y is missing are not among them." if arg == "groups" else "Pass a number, or the fold of each row."
    )
    if values.shape != (num_rows,):
        actual = f"{values.shape}" if values.ndim else f"{labels!r:.40}"
        fail(where, arg, f"to have one label for each of {num_rows} rows", actual, cure)
    if values.dtype.kind in "fc" and np.isnan(values).any():
        fail(where, arg, "to be known", f"{int(np.isnan(values).sum())} NaN", "Give each row a label.")
    try:
        return torch.from_numpy(np.unique(values, return_inverse=True)[1].astype(np.int64))
    except TypeError as error:
        fail(
            where, arg, "to be labels of one kind", "mixed or missing ones", "Give each row a label.", TypeError, error
        )


def _checked(where: str, arg: str, parts: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Raise unless there are two parts or more."""
    if int(parts.max()) == 0:
        fail(where, arg, "to make two parts or more", "one", "Rows are predicted from those of other parts.")
    return parts


__all__ = ["USUAL_FOLDS", "assign_folds"]
