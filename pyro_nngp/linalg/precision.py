r"""The precision of a nearest-neighbor prior, :math:`\Lambda = (I - A)^\top V^{-1} (I - A)`, in the forms solvers want.

In double precision, whatever the dtype of the prior. Cost: O(N K) per product, by SciPy's sparse matrices on a CPU (a
ninth of the time of gathering and scattering there: N = 219,082, K = 32); for rows of the matrix O(K^2) time and memory
each, on average, since they hold the neighbors, the children and the children's other neighbors of a point. Symbols: N
points, K neighbors, L latent functions.
"""

from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from torch import Tensor

_DENSE_FASTER = 100  # flops of a dense matrix product in the time of one of a sparse one


class PriorPrecision:
    """Products with the precision, its diagonal, and the matrix itself.

    Args:
        w: weights of the prior's conditionals, 0 where there is no neighbor.
        var: their variances.
        neighbors: rows of the neighbors, -1 padded.
    """

    def __init__(self, w: Float[Tensor, "N K"], var: Float[Tensor, " N"], neighbors: Int[Tensor, "N K"]) -> None:
        rows = torch.arange(len(var), device=var.device)[:, None]
        self._columns = torch.cat([rows, torch.where(neighbors < 0, rows, neighbors)], -1)
        self._root = torch.cat([torch.ones_like(w[:, :1]), -w], -1).double() / var.double().sqrt()[:, None]

    def __len__(self) -> int:
        return len(self._root)

    def product(self, m: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        r""":math:`\Lambda m`."""
        if m.device.type == "cpu":
            rows = m.reshape(-1, len(self)).numpy()
            found = [torch.from_numpy(self._matrix.T @ (self._matrix @ row)) for row in rows]
            return torch.stack(found).view(m.shape)
        residual = (self._root * m[..., self._columns]).sum(-1, keepdim=True)
        return torch.zeros_like(m).index_add_(-1, self._columns.flatten(), (self._root * residual).flatten(-2))

    def diagonal(self) -> Float[Tensor, " N"]:
        """Inverse variances of each value given all others."""
        return self._root.new_zeros(len(self)).index_add_(0, self._columns.flatten(), self._root.square().flatten())

    def row_bounds(self) -> np.ndarray:
        """For each row at least as many entries as it has."""
        return np.bincount(self._matrix.indices, minlength=len(self)) * self._columns.shape[1]

    def sparse(self, rows: np.ndarray | None = None) -> csr_array:
        """Rows of the matrix (None: all) in SciPy's format, with sorted columns."""
        by_column = self._matrix.T.tocsr()
        found = ((by_column if rows is None else by_column[rows]) @ self._matrix).tocsr()
        found.sort_indices()
        return found

    @cached_property
    def _matrix(self) -> csr_array:
        return square_matrix(self._root, self._columns)

    def dense(self) -> Float[Tensor, "N N"]:
        """The matrix, on the device of the prior."""
        if self._columns.shape[1] ** 2 * _DENSE_FASTER < len(self) ** 2:
            return torch.from_numpy(self.sparse().toarray()).to(self._root.device)
        root = self._root.new_zeros(len(self), len(self)).scatter_add(-1, self._columns, self._root)
        return root.mT @ root


def square_matrix(table: Float[Tensor, "N W"], columns: Int[Tensor, "N W"]) -> csr_array:
    """The matrix with the entries of each row of `table` at `columns`; those at one place add."""
    n, width = table.shape
    start = np.arange(0, n * width + 1, width)
    return csr_array((table.cpu().numpy().ravel(), columns.cpu().numpy().ravel(), start), shape=(n, n))
