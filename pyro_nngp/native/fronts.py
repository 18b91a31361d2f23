"""Compiled solutions with a Cholesky factor that is stored front by front, for CPUs: `fronts.cpp`.

Cost: two passes over the blocks for each right-hand side.
"""

import ctypes

import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.native import loaded
from pyro_nngp.native.boundary import address, contiguous
from pyro_nngp.native.structures import Fronts

_WHERE = "solve_fronts"


def solve(sizes: Tensor, widths: Tensor, borders: Tensor, blocks: Tensor, right: Tensor) -> Tensor:
    """Solutions (N, L), of float64.

    Args:
        sizes: number s of points of the node of each front, children first, (F,). Nodes follow each other in `right`.
        widths: number b of points at the border of each front, (F,).
        borders: places of the points at the borders, one front after the other.
        blocks: of each front the inverse of L11 L11', (s, s), and Y', (s, b).
        right: right-hand sides (N, L).

    Raises:
        ValueError, TypeError: for other shapes, dtypes or devices.
        IndexError: for borders that do not come after their node.
    """
    if right.dim() != 2 or sizes.dim() != 1:
        ranks, cure = f"{right.dim()}, {sizes.dim()}", "Give a row for each point."
        fail(_WHERE, "right and sizes", "with 2 and 1 dimensions", ranks, cure)
    z, count = contiguous(_WHERE, "right", right).clone(), len(sizes)
    tables = {"sizes": sizes, "widths": widths, "borders": borders, "blocks": blocks}
    layout = {name: (contiguous(_WHERE, name, table), tuple(table.shape)) for name, table in tables.items()}
    pointers = {name: address(_WHERE, name, *layout[name], torch.int64) for name in ("sizes", "borders")}
    pointers["widths"] = address(_WHERE, "widths", layout["widths"][0], (count,), torch.int64)
    if count and min(int(sizes.min()), int(widths.min())) < 0:
        fail(_WHERE, "sizes and widths", ">= 0", "a negative number", "Count the points.")
    needed = int((sizes * (sizes + widths)).sum())
    for name, size, found in (("right", int(sizes.sum()), len(z)), ("borders", int(widths.sum()), borders.numel())):
        if size != found:
            fail(_WHERE, name, f"of {size} rows", found, "Give a row for each point.")
    pointers["blocks"] = address(_WHERE, "blocks", layout["blocks"][0], (needed,), torch.float64)
    pointers["z"] = address(_WHERE, "right", z, tuple(z.shape), torch.float64)
    fronts = Fronts(num_fronts=count, num_points=len(z), num_right=z.shape[1], **pointers)
    if loaded().nn_fronts_solve(ctypes.byref(fronts)):
        expectation, numbers = f"after their node and below {len(z)}", f"{int(borders.min())}..{int(borders.max())}"
        fail(_WHERE, "borders", expectation, numbers, "Eliminate children first.", IndexError)
    return z
