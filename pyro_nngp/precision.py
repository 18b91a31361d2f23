r"""The precision of a nearest-neighbor prior, :math:`\Lambda = (I - A)^\top V^{-1} (I - A)`, in the forms solvers want.

In double precision, whatever the dtype of the prior. Cost: O(N K) per product; O(N K^2) for the sparse matrix, whose
rows hold the neighbors, the children and the children's other neighbors of a point. Symbols: N points, K neighbors,
L latent functions.
"""

import torch
from jaxtyping import Float, Int
from scipy import sparse
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
        self._columns = torch.cat([rows, neighbors.clamp(min=0)], -1)
        self._root = torch.cat([torch.ones_like(w[:, :1]), -w], -1).double() / var.double().sqrt()[:, None]

    def __len__(self) -> int:
        return len(self._root)

    def product(self, m: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        r""":math:`\Lambda m`."""
        residual = (self._root * m[..., self._columns]).sum(-1, keepdim=True)
        return torch.zeros_like(m).index_add_(-1, self._columns.flatten(), (self._root * residual).flatten(-2))

    def diagonal(self) -> Float[Tensor, " N"]:
        """Inverse variances of each value given all others."""
        return self._root.new_zeros(len(self)).index_add_(0, self._columns.flatten(), self._root.square().flatten())

    def sparse(self) -> sparse.csr_array:
        """The matrix in SciPy's row format, with sorted columns."""
        width = self._columns.shape[1]
        table, columns = self._root.cpu().numpy(), self._columns.cpu().numpy()
        start = torch.arange(0, len(self) * width + 1, width).numpy()
        root = sparse.csr_array((table.ravel(), columns.ravel(), start), shape=(len(self), len(self)))
        product = (root.T @ root).tocsr()
        product.sort_indices()
        return product

    def dense(self) -> Float[Tensor, "N N"]:
        """The matrix, on the device of the prior."""
        if self._columns.shape[1] ** 2 * _DENSE_FASTER < len(self) ** 2:
            return torch.from_numpy(self.sparse().toarray()).to(self._root.device)
        root = self._root.new_zeros(len(self), len(self)).scatter_add(-1, self._columns, self._root)
        return root.mT @ root
