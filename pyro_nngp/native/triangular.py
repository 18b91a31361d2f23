"""The compiled substitution in a sparse unit triangle, for CPUs: `triangular.cpp`.

Cost: O(N K) for each right-hand side.
"""

import ctypes

import torch
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._tape import operation
from pyro_nngp.native import enabled, loaded
from pyro_nngp.native.boundary import address, contiguous
from pyro_nngp.native.structures import Triangle

_WHERE = "solve_triangular"


def supported(w: Tensor, right: Tensor) -> bool:
    """Whether compiled code is available, switched on, and covers this device and dtype."""
    return (
        w.device.type == right.device.type == "cpu"
        and w.dtype in (torch.float32, torch.float64)
        and right.dtype == w.dtype
        and enabled()
    )


@operation
def solve(w: Tensor, neighbors: Tensor, right: Tensor, order: Tensor, transposed: bool) -> Tensor:
    """Solutions (L, N, S) of (I - A) u = right, or (I - A)' u = right.

    Args:
        w: weights (L, N, K); the value at a -1 is ignored.
        neighbors: rows of the neighbors (N, K), -1 padded.
        right: right-hand sides (L, N, S).
        order: the rows, (N,), each after its neighbors.
        transposed: whether to solve with the transpose.

    Raises:
        ValueError, TypeError: for other shapes, dtypes or devices.
        IndexError: if `neighbors` or `order` hold other numbers than rows.
    """
    for arg, tensor, rank in (("neighbors", neighbors, 2), ("right", right, 3)):
        if tensor.dim() != rank:
            fail(_WHERE, arg, f"with {rank} dimensions", tensor.dim(), "Give one row for each row of the triangle.")
    u = contiguous(_WHERE, "right", right).clone()
    if u.dtype not in (torch.float32, torch.float64):
        fail(_WHERE, "right", "of dtype torch.float32 or torch.float64", u.dtype, "Convert it.", TypeError)
    (n, k), num_sets, num_right = neighbors.shape, len(right), right.shape[-1]
    layout = {
        "w": (contiguous(_WHERE, "w", w), (num_sets, n, k), u.dtype),
        "neighbors": (contiguous(_WHERE, "neighbors", neighbors), (n, k), torch.int64),
        "order": (contiguous(_WHERE, "order", order), (n,), torch.int64),
        "u": (u, (num_sets, n, num_right), u.dtype),
    }
    pointers = {name: address(_WHERE, name, *expected) for name, expected in layout.items()}
    sizes = {"num_sets": num_sets, "num_rows": n, "num_neighbors": k, "num_right": num_right}
    triangle = Triangle(**sizes, transposed=transposed, **pointers)
    if loaded().nn_triangular_solve(ctypes.byref(triangle), u.dtype == torch.float64):
        raise IndexError(f"{_WHERE}: expected neighbors and order below the number of rows, {n}")
    return u
