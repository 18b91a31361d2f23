"""Linear algebra that knows no Gaussian process: Cholesky factors, sparse triangular systems, conjugate gradients."""

from pyro_nngp.linalg.blocks import in_blocks
from pyro_nngp.linalg.cholesky import DEFAULT_JITTER, NotPositiveDefiniteError, quiet_nuggets, report_nuggets
from pyro_nngp.linalg.gaussian_sampling import draw_posterior
from pyro_nngp.linalg.level_scheduling import dependency_levels
from pyro_nngp.linalg.sparse_triangular import SparseTriangle, solve_triangular
from pyro_nngp.linalg.vecchia_factor import VecchiaFactor

__all__ = [
    "DEFAULT_JITTER",
    "NotPositiveDefiniteError",
    "SparseTriangle",
    "VecchiaFactor",
    "dependency_levels",
    "draw_posterior",
    "in_blocks",
    "quiet_nuggets",
    "report_nuggets",
    "solve_triangular",
]
