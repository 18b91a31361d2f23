r"""The Vecchia factor (I - A, V) of a nearest-neighbor Gaussian process, and the operations on it.

The conditionals :math:`u_j \mid u_{n(j)} \sim N(w_j^\top u_{n(j)}, v_j)` are the joint distribution

.. math:: u \sim N(0, \Lambda^{-1}), \quad \Lambda = (I - A)^\top V^{-1} (I - A), \qquad
   u = G z, \quad G = (I - A)^{-1} V^{1/2}, \quad z \sim N(0, I),

with the weights in the rows of A and the variances on the diagonal of V: a sparse Cholesky factor of the precision.

Given Gaussian observations of u with precisions :math:`\tau`, the posterior of the white values z has the precision

.. math:: I + G^\top \mathrm{diag}(\tau)\, G .

All its eigenvalues are at least 1, and only as many exceed 1 as there are directions that the data determine. So
conjugate gradients take few steps however ill-conditioned the prior is, and a residual bounds the error of z. (The
system for u itself is as ill-conditioned as the prior: on 2,000 points with a Matern-5/2 kernel it took more than 1,000
steps, the system for z 20.) The preconditioner is :math:`I + V \mathrm{diag}(\tau)`, the matrix of independent points;
in u it is the Vecchia approximation with diagonal update of Kündig and Sigrist (2025), :math:`(I - A)^\top (V^{-1} +
\mathrm{diag}\, \tau) (I - A)`. It saves no steps where noise is large, and half of them where noise is small. The
first points of a graph precondition better where they describe the process (:mod:`pyro_nngp.linalg.coarse_level`).

Cost: O(N K) time and memory per product or solve. Rows of the precision take O(K^2) time and memory each, on average,
since they hold the neighbors, the children and the children's other neighbors of a point. Symbols: N points, K
neighbors, L latent functions.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.linalg.coarse_level import CoarseLevel
from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients, warn_of_residual
from pyro_nngp.linalg.dense_factor import add_diagonal, cholesky
from pyro_nngp.linalg.level_scheduling import dependency_levels
from pyro_nngp.linalg.multifrontal import MultifrontalFactor
from pyro_nngp.linalg.nested_dissection import Elimination, families_of
from pyro_nngp.linalg.sparse_rows import SparseRows, root_entries
from pyro_nngp.linalg.sparse_triangular import ON_CPU_UP_TO, SparseTriangle, solve_triangular

_DENSE_FASTER = 100  # a sparse matrix product takes this many times as long per flop as a dense one


class VecchiaFactor:
    """(I - A, V): products, solves, draws, and the precision itself.

    Results have the dtype and device of the weights; :meth:`prepared` is the form for iterative solvers. Triangular
    solves are differentiable in `w` and `var`, and so are :meth:`color`, :meth:`color_transposed`, :meth:`whiten` and
    :meth:`log_det`; the precision and :meth:`solve` are not.

    Weights and variances may have batch dimensions, (*S, N, K) and (*S, N), which broadcast against the batch of values
    that :meth:`color`, :meth:`whiten` and :meth:`solve` take; the precision is for one set alone.

    Args:
        w: weights of the conditionals (N, K); the value is ignored where there is no neighbor.
        var: their variances (N,), positive.
        neighbors: rows of the neighbors (N, K), -1 padded.
        levels: dependency levels of the neighbors, see
            :func:`~pyro_nngp.linalg.level_scheduling.dependency_levels`; None computes them when they are needed.
        coarse: preconditioner of :meth:`solve`; None has the one of independent points alone.

    Raises:
        ValueError: if shapes disagree.
    """

    def __init__(
        self,
        w: Float[Tensor, "*S N K"],
        var: Float[Tensor, "*S N"],
        neighbors: Int[Tensor, "N K"],
        levels: list[Int[Tensor, " _"]] | None = None,
        coarse: CoarseLevel | None = None,
    ) -> None:
        if w.shape[-2:] != neighbors.shape or var.shape != w.shape[:-1]:
            shapes = tuple(w.shape), tuple(var.shape), tuple(neighbors.shape)
            cure = "Give one weight per neighbor and one variance per point."
            fail("VecchiaFactor", "w, var, neighbors", "of shapes (N, K), (N,), (N, K)", shapes, cure)
        self.w, self.var, self.neighbors = w.masked_fill(neighbors < 0, 0.0), var, neighbors
        self._levels, self._coarse = levels, coarse
        self._triangle: SparseTriangle | None = None

    def __len__(self) -> int:
        return self.var.shape[-1]

    @property
    def rows(self) -> Int[Tensor, " N"]:
        """Row numbers."""
        return torch.arange(len(self), device=self.var.device)

    def total(self, part: Tensor) -> Tensor:
        """Sum over all processes; here all rows are on one."""
        return part

    def near(self, u: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N K"]:
        """Values at the neighbors; arbitrary where there is none."""
        return u[..., self.neighbors.clamp(min=0)]

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions of the weights."""
        return self.var.shape[:-1]

    @property
    def levels(self) -> list[Int[Tensor, " _"]]:
        """Dependency levels of the neighbors."""
        if self._levels is None:
            self._levels = dependency_levels(self.neighbors)
        return self._levels

    def sets(self, batch_shape: torch.Size) -> Iterator["VecchiaFactor"]:
        """One factor for each index of the batch shape, or of a wider one."""
        n, k = self.neighbors.shape
        every = self.w.expand(*batch_shape, n, k).reshape(-1, n, k), self.var.expand(*batch_shape, n).reshape(-1, n)
        return (VecchiaFactor(w, var, self.neighbors, self.levels) for w, var in zip(*every, strict=True))

    def prepared(self) -> "VecchiaFactor":
        """This factor for iterative solvers: detached, in double precision, and with the triangle prepared.

        Without gradients a solve with the triangle is then one pass over its rows in their order of dependency, by
        compiled code or SciPy's SuperLU, on the CPU unless there are more than a million rows on a GPU. Preparing it
        pays from about five solves on.
        """
        if self._triangle is not None:
            return self
        w, var = self.w.detach().double(), self.var.detach().double()
        prepared = VecchiaFactor(w, var, self.neighbors, self.levels, self._coarse)
        if not self.batch_shape and (self.w.device.type == "cpu" or len(self) <= ON_CPU_UP_TO):
            prepared._triangle = SparseTriangle(prepared.w, prepared.neighbors, prepared.levels)
        return prepared

    # The root G of the covariance.

    def color(self, z: Float[Tensor, "*L N"]) -> Float[Tensor, "*R N"]:
        """G z: map white values to u."""
        return self._substitute(self.var.sqrt() * z)

    def color_transposed(self, u: Float[Tensor, "*L N"]) -> Float[Tensor, "*R N"]:
        """G' u."""
        return self.var.sqrt() * self._substitute(u, transposed=True)

    def whiten(self, u: Float[Tensor, "*L N"]) -> Float[Tensor, "*R N"]:
        """G^-1 u: map values to white ones."""
        return self.residual(u) / self.var.sqrt()

    def whiten_transposed(self, z: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        """G^-T z, in double precision, for one set of weights."""
        weights = self._root * z.double()[..., None]
        return torch.zeros_like(z, dtype=weights.dtype).index_add_(-1, self._columns.flatten(), weights.flatten(-2))

    def residual(self, u: Float[Tensor, "*L N"]) -> Float[Tensor, "*R N"]:
        """(I - A) u: each value minus its expectation given its neighbors."""
        return u - (self.w * self.near(u)).sum(-1)

    def log_det(self) -> Float[Tensor, "*S"]:
        r""":math:`\log |\Lambda| = -\sum_j \log v_j`."""
        return -self.var.log().sum(-1)

    def _substitute(self, right: Tensor, transposed: bool = False) -> Tensor:
        if self._triangle is not None:
            return self._triangle.solve(right, transposed)
        return solve_triangular(self.w, self.neighbors, right, self.levels, transposed=transposed)

    # The precision, in double precision whatever the dtype of the factor.

    @cached_property
    def _columns(self) -> Tensor:
        return families_of(self.neighbors)

    @cached_property
    def _root(self) -> Tensor:
        """Entries of V^-1/2 (I - A) at the columns."""
        if self.batch_shape:
            cure = "Take the precision of each set alone."
            fail("VecchiaFactor", "the precision", "of one set", f"batch_shape {tuple(self.batch_shape)}", cure)
        return root_entries(self.w.detach().double(), self.var.detach().double())

    @cached_property
    def _matrix(self) -> csr_array:
        return self.root().matrix(len(self))

    def root(self) -> SparseRows:
        r""":math:`V^{-1/2} (I - A)`, whose square is :math:`\Lambda`."""
        return SparseRows(self._columns, self._root)

    def product(self, m: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        r""":math:`\Lambda m`, by SciPy's sparse matrices on a CPU, nine times as fast as gathering and scattering."""
        if m.device.type == "cpu":
            columns = np.ascontiguousarray(m.reshape(-1, len(self)).numpy().T)
            return torch.from_numpy((self._matrix.T @ (self._matrix @ columns)).T).reshape(m.shape)
        residual = (self._root * m[..., self._columns]).sum(-1, keepdim=True)
        return torch.zeros_like(m).index_add_(-1, self._columns.flatten(), (self._root * residual).flatten(-2))

    def diagonal(self) -> Float[Tensor, " N"]:
        r"""Diagonal of :math:`\Lambda`: the inverse variances of each value given all others."""
        return self._root.new_zeros(len(self)).index_add_(0, self._columns.flatten(), self._root.square().flatten())

    def row_bounds(self) -> np.ndarray:
        r"""An upper bound on the number of entries of each row of :math:`\Lambda`."""
        return np.bincount(self._matrix.indices, minlength=len(self)) * self._columns.shape[1]

    def sparse(self, rows: np.ndarray | None = None) -> csr_array:
        r"""Rows of :math:`\Lambda` (None: all) in SciPy's format, with sorted columns."""
        by_column = self._matrix.T.tocsr()
        precision = ((by_column if rows is None else by_column[rows]) @ self._matrix).tocsr()
        precision.sort_indices()
        return precision

    def dense(self, sparse_from: int = _DENSE_FASTER) -> Float[Tensor, "N N"]:
        r""":math:`\Lambda` as one matrix, on the device of the factor.

        Args:
            sparse_from: how many times as long per flop a sparse product takes as a dense one; decides between them.
        """
        if self._columns.shape[1] ** 2 * sparse_from < len(self) ** 2:
            return torch.from_numpy(self.sparse().toarray()).to(self._root.device)
        root = self._root.new_zeros(len(self), len(self)).scatter_add(-1, self._columns, self._root)
        return root.mT @ root

    # The posterior under Gaussian observations.

    def multifrontal(self, plan: Elimination, precision: Float[Tensor, " N"]) -> MultifrontalFactor:
        r"""Sparse Cholesky factor of :math:`\Lambda + \mathrm{diag}(\tau)`, by a plan for :func:`families_of`."""
        return MultifrontalFactor(plan, [self._root], precision.double())

    def posterior_tril(self, precision: Float[Tensor, "*S N"]) -> Float[Tensor, "*S N N"]:
        r"""Dense Cholesky factor of :math:`\Lambda + \mathrm{diag}(\tau)`, in double precision."""
        return cholesky(add_diagonal(self.dense(), precision.double()), 0.0)

    def solve(
        self,
        right: Float[Tensor, "*L N"],
        precision: Float[Tensor, "*L N"],
        start: Float[Tensor, "*L N"] | None = None,
        tolerance: float = 1e-5,
        max_iterations: int = 1000,
        size: Float[Tensor, "*L"] | None = None,
    ) -> Float[Tensor, "*L N"]:
        """Solve (I + G' diag(precision) G) z = right by conjugate gradients.

        Args:
            right: right-hand sides.
            precision: tau >= 0.
            start: z to start from; None is zero.
            tolerance: on the residual relative to `size`; it bounds the error of z relative to that, too.
            max_iterations: largest number of iterations; a warning reports if they did not suffice.
            size: unit of the residual; None is the norm of the right-hand side.

        Returns:
            z, of the shape of `right`.
        """
        home = right.device
        if self._triangle is not None:
            order, substitute = self._triangle.order, self._triangle.solve_ordered
            right, precision, root = (part.cpu()[..., order] for part in (right, precision, self.var.sqrt()))
            start, size = None if start is None else start.cpu()[..., order], None if size is None else size.cpu()
        else:
            order, substitute, root = None, self._substitute, self.var.sqrt()

        def product(z: Tensor) -> Tensor:
            return z + root * substitute(precision * substitute(root * z), transposed=True)

        diagonal, precondition = 1 + root.square() * precision, None
        if self._coarse is not None and order is not None:
            precondition = self._coarse.preconditioner(order, self.w.cpu(), self.var.cpu(), precision)
        z, worst = conjugate_gradients(
            product, right, start, diagonal, tolerance, max_iterations, size=size, precondition=precondition
        )
        if order is not None:
            z = torch.empty_like(z).index_copy_(-1, order, z).to(home)
        if not worst <= tolerance:
            warn_of_residual("VecchiaFactor.solve", worst, max_iterations)
        return z


def determines(var: Float[Tensor, "*#L N"], precision: Float[Tensor, "*#L N"]) -> bool:
    """Whether observations say more than neighbors do, at the median."""
    return bool((var * precision).median() > 1)
