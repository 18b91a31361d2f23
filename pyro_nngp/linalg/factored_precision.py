r"""A Gaussian whose precision is :math:`F^\top F`, with a root F that is sparse but for some dense columns.

Least-squares problems have this form: each row of F is a Gaussian factor of the density, the conditional of a value
given its neighbors or an observation. With the sparse columns R and the dense ones E,

.. math:: F = [R, E], \qquad F^\top F = \begin{pmatrix} S & R^\top E \\ E^\top R & E^\top E \end{pmatrix}, \quad
   S = R^\top R .

S has a sparse Cholesky factor (:mod:`pyro_nngp.linalg.multifrontal`); the dense columns follow from their Schur
complement. A draw is a solution for a random right-hand side, :math:`P^{-1} F^\top \epsilon`, whose covariance is
:math:`P^{-1}`.

Cost: that of the factor, which grows with the number of inputs of a process; a solution takes two substitutions. In
double precision on a CPU. Symbols: r rows in tables of f rows with k entries each, m sparse and p dense columns.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import cho_solve
from scipy.sparse import vstack
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.linalg.multifrontal import MultifrontalFactor
from pyro_nngp.linalg.nested_dissection import Elimination
from pyro_nngp.linalg.nuggets import NotPositiveDefiniteError
from pyro_nngp.linalg.sparse_rows import SparseRows


class FactoredPrecision:
    """P = F' F with F = [sparse, dense]: solutions, draws, covariances and the determinant.

    Args:
        sparse: R in tables, whose rows follow each other.
        dense: E, (r, p).
        plan: the order of elimination for the columns of the tables.

    Raises:
        ValueError: if the numbers of rows differ.
        NotPositiveDefiniteError: if P is singular.
    """

    def __init__(self, sparse: Sequence[SparseRows], dense: Float[np.ndarray, "r p"], plan: Elimination) -> None:
        rows = sum(len(table.values) for table in sparse), dense.shape[0]
        if rows[0] != rows[1]:
            fail("FactoredPrecision", "sparse, dense", "with the same number of rows", rows, "One row per factor.")
        m = len(plan.order)
        self._sparse, self._dense = vstack([table.matrix(m) for table in sparse], format="csr"), dense
        self._factor = MultifrontalFactor(plan, [table.values for table in sparse], torch.zeros(m, dtype=torch.float64))
        self._border = self._sparse.T @ dense
        self._solved = self._factor.solve(torch.from_numpy(self._border.T)).numpy().T
        try:
            self._tril = np.linalg.cholesky(dense.T @ dense - self._border.T @ self._solved)
        except np.linalg.LinAlgError as cause:
            raise NotPositiveDefiniteError("FactoredPrecision: the dense columns are linearly dependent.") from cause

    def __len__(self) -> int:
        return self._sparse.shape[1] + self._dense.shape[1]

    def log_det(self) -> float:
        r""":math:`\log |P|`."""
        return self._factor.log_det + 2 * float(np.log(np.diag(self._tril)).sum())

    def root_product(self, x: Float[Tensor, "*S d"]) -> Float[Tensor, "*S r"]:
        """F x, whose squared norm is the quadratic form x' P x."""
        m = self._sparse.shape[1]
        flat = x.detach().double().cpu().reshape(-1, len(self)).numpy()
        product = (self._sparse @ flat[:, :m].T).T + flat[:, m:] @ self._dense.T
        return torch.from_numpy(product).reshape(*x.shape[:-1], -1)

    def root_transposed(self, rows: Float[Tensor, "*S r"]) -> Float[Tensor, "*S d"]:
        """F' rows."""
        flat = rows.reshape(-1, rows.shape[-1]).numpy()
        product = np.concatenate([(self._sparse.T @ flat.T).T, flat @ self._dense], -1)
        return torch.from_numpy(product).reshape(*rows.shape[:-1], -1)

    def solve(self, right: Float[Tensor, "*S d"]) -> Float[Tensor, "*S d"]:
        """Solve P x = right."""
        m = self._sparse.shape[1]
        flat = right.reshape(-1, len(self))
        half = self._factor.solve(flat[:, :m])
        dense = cho_solve((self._tril, True), flat[:, m:].numpy().T - self._border.T @ half.numpy().T).T
        solution = torch.cat([half - torch.from_numpy(dense @ self._solved.T), torch.from_numpy(dense)], -1)
        return solution.reshape(right.shape)

    def dense_covariance(self) -> Float[np.ndarray, "p p"]:
        """Covariance of the values of the dense columns."""
        return cho_solve((self._tril, True), np.eye(self._dense.shape[1]))

    def dense_tril(self) -> Float[np.ndarray, "p p"]:
        """Cholesky factor of the precision of the values of the dense columns."""
        return self._tril

    def slope(self) -> Float[np.ndarray, "m p"]:
        """Derivative of the conditional mean of the sparse columns' values by the dense columns' values."""
        return -self._solved

    def sparse_covariances(self, tables: Sequence[int]) -> list[Float[Tensor, "f k k"]]:
        """Covariances among the sparse columns of each row of some tables, given the dense ones."""
        return self._factor.covariances(tables)

    def draw(self, count: int) -> Float[Tensor, "S d"]:
        """Draws from N(0, P^-1)."""
        return self.solve(self.root_transposed(torch.randn(count, self._sparse.shape[0], dtype=torch.float64)))

    def log_prob(self, residual: Float[Tensor, "*S d"]) -> Float[Tensor, "*S"]:
        """Log density of N(0, P^-1)."""
        square = self.root_product(residual).square().sum(-1)
        return 0.5 * (self.log_det() - square - len(self) * math.log(2 * math.pi))
