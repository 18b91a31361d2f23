"""Variational distributions q(u) of latent values and of auxiliary variables, and their optima."""

from pyro_nngp.variational.amortized import AmortizedGaussian
from pyro_nngp.variational.auxiliary import (
    Conjugate,
    LocalConjugate,
    LocalLogNormal,
    LogNormal,
    conjugate_posterior,
)
from pyro_nngp.variational.factors import prior_factor
from pyro_nngp.variational.families import Amortized, FullRank, MeanField, PseudoObservations, SparseCholesky
from pyro_nngp.variational.gaussian import (
    DenseGaussian,
    GivenGaussian,
    LocalGaussian,
    LocalTables,
    combined,
    combined_variance,
    factor,
    neighbor_variance,
)
from pyro_nngp.variational.leave_one_out import InducingLeaveOneOut, LatentLeaveOneOut, scattered
from pyro_nngp.variational.natural_gradient import variational_optimum
from pyro_nngp.variational.observed import ObservedGaussian

__all__ = [
    "Amortized",
    "AmortizedGaussian",
    "Conjugate",
    "DenseGaussian",
    "FullRank",
    "GivenGaussian",
    "InducingLeaveOneOut",
    "LatentLeaveOneOut",
    "LocalConjugate",
    "LocalGaussian",
    "LocalLogNormal",
    "LocalTables",
    "LogNormal",
    "MeanField",
    "ObservedGaussian",
    "PseudoObservations",
    "SparseCholesky",
    "combined",
    "combined_variance",
    "conjugate_posterior",
    "factor",
    "neighbor_variance",
    "prior_factor",
    "scattered",
    "variational_optimum",
]
