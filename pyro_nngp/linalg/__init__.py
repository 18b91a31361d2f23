"""Linear algebra without Gaussian processes: Cholesky factors, sparse triangular systems, conjugate gradients."""

from pyro_nngp.linalg.blocks import in_blocks
from pyro_nngp.linalg.dense_factor import (
    add_diagonal,
    cholesky,
    factor_inverse,
    factor_log_det,
    factor_solve,
    half_solve,
    reverse_cholesky,
)
from pyro_nngp.linalg.nuggets import DEFAULT_JITTER, NotPositiveDefiniteError, report_nuggets
from pyro_nngp.linalg.sparse_triangular import solve_triangular
from pyro_nngp.linalg.vecchia_factor import VecchiaFactor

__all__ = [
    "DEFAULT_JITTER",
    "NotPositiveDefiniteError",
    "VecchiaFactor",
    "add_diagonal",
    "cholesky",
    "factor_inverse",
    "factor_log_det",
    "factor_solve",
    "half_solve",
    "in_blocks",
    "report_nuggets",
    "reverse_cholesky",
    "solve_triangular",
]
