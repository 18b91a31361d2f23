"""Families of the variational distribution q, as the argument `guide` of a method takes them.

They are descriptions without parameters: a method builds its q from one, with a mean and a spread per point. Symbols: M
points, L latent functions.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_int


@dataclass(frozen=True, eq=False)
class PseudoObservations:
    """The Gaussian posterior of one pseudo-observation of each latent value, which ``solve`` finds.

    Its intervals cover f; the theory is in :mod:`pyro_nngp.variational.observed`. For inducing points at the data.
    """


@dataclass(frozen=True, eq=False)
class MeanField:
    """Independent normal values at the points.

    Attributes:
        loc: initial mean without the mean function, (M,) or (M, L); None is the method's choice.
        scale: initial standard deviation; None is the method's choice.
    """

    loc: Float[Tensor, "M *L"] | None = None
    scale: float | None = None


@dataclass(frozen=True, eq=False)
class FullRank:
    """Normal values with a dense Cholesky factor of their covariance.

    Attributes:
        loc: initial mean without the mean function, (M,) or (M, L); None is the method's choice.
        scale: initial standard deviation; None is the method's choice.
    """

    loc: Float[Tensor, "M *L"] | None = None
    scale: float | None = None


@dataclass(frozen=True, eq=False)
class SparseCholesky:
    """Normal values with a Cholesky factor that is sparse on the nearest neighbors of each point.

    Attributes:
        num_columns: off-diagonal entries per row, at most the neighbors of the prior; None is all of these.
        loc: initial mean without the mean function, (M,) or (M, L); None is zero.
        scale: initial standard deviation; None is a tenth of the spread of f in the data.
    """

    num_columns: int | None = None
    loc: Float[Tensor, "M *L"] | None = None
    scale: float | None = None


@dataclass(frozen=True, eq=False)
class Amortized:
    """Normal values whose distribution a network computes from the data around each point.

    Attributes:
        encoder: a torch module as of :mod:`pyro_nngp.variational.encoders`.
        num_columns: off-diagonal entries per row of the Cholesky factor; None is the method's choice.
    """

    encoder: Any
    num_columns: int | None = None

    def __post_init__(self) -> None:
        if self.num_columns is not None:
            check_int("Amortized", "num_columns", self.num_columns, 0)


__all__ = ["Amortized", "FullRank", "MeanField", "PseudoObservations", "SparseCholesky"]
