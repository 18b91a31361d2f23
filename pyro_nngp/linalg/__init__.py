"""Linear algebra that knows no Gaussian process: Cholesky factors, sparse triangular systems, conjugate gradients."""

from pyro_nngp.linalg.blocks import empty, in_blocks, keep_freed
from pyro_nngp.linalg.cholesky import (
    DEFAULT_JITTER,
    NotPositiveDefiniteError,
    cholesky,
    cholesky_ex,
    factorise,
    local_cholesky,
)
from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients
from pyro_nngp.linalg.gaussian_sampling import draw_posterior
from pyro_nngp.linalg.level_scheduling import dependency_levels
from pyro_nngp.linalg.precision import PriorPrecision, square_matrix
from pyro_nngp.linalg.whitening import Whitening

__all__ = [
    "DEFAULT_JITTER",
    "NotPositiveDefiniteError",
    "PriorPrecision",
    "Whitening",
    "cholesky",
    "cholesky_ex",
    "conjugate_gradients",
    "dependency_levels",
    "draw_posterior",
    "empty",
    "factorise",
    "in_blocks",
    "keep_freed",
    "local_cholesky",
    "square_matrix",
]
