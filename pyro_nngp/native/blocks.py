"""Compiled access to blocks of a dense square matrix, for CPUs: `blocks.cpp`.

Cost: O(F k^2) for F blocks of k rows.
"""

import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.native import enabled, loaded
from pyro_nngp.native.boundary import address, contiguous


def supported(matrix: Tensor) -> bool:
    """Whether compiled code is available, switched on, and covers this matrix."""
    return matrix.device.type == "cpu" and matrix.dtype == torch.float64 and matrix.is_contiguous() and enabled()


def add(matrix: Tensor, places: Tensor, blocks: Tensor) -> None:
    """Add blocks to a matrix, in place.

    Args:
        matrix: (m, m), of float64.
        places: rows and columns of each block, (F, k); those that repeat add up.
        blocks: (F, k, k).

    Raises:
        ValueError, TypeError: for other shapes, dtypes or devices.
        IndexError: for places that the matrix does not have.
    """
    _run("add", matrix, places, contiguous("add", "blocks", blocks), False)


def take(matrix: Tensor, places: Tensor) -> Tensor:
    """Blocks (F, k, k) of a matrix; arguments and errors as in :func:`add`."""
    blocks = matrix.new_empty(*places.shape, places.shape[-1])
    _run("take", matrix, places, blocks, True)
    return blocks


def _run(where: str, matrix: Tensor, places: Tensor, blocks: Tensor, take: bool) -> None:
    if matrix.dim() != 2 or places.dim() != 2:
        fail(where, "matrix and places", "with 2 dimensions", f"{matrix.dim()}, {places.dim()}", "Give a row a block.")
    (count, width), size = places.shape, len(matrix)
    places = contiguous(where, "places", places)
    at = address(where, "matrix", matrix, (size, size), torch.float64)
    rows = address(where, "places", places, (count, width), torch.int64)
    values = address(where, "blocks", blocks, (count, width, width), torch.float64)
    if loaded().nn_blocks(at, size, rows, count, width, values, take):
        numbers = f"{int(places.min())}..{int(places.max())}"
        fail(where, "places", f"in 0..{size - 1}", numbers, "Give rows of the matrix.", IndexError)
