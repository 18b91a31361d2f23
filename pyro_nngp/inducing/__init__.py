"""Inducing points: where they are placed, their priors, and layers of a deep sparse Gaussian process."""

from pyro_nngp.inducing.layer import SparseLayer
from pyro_nngp.inducing.points import kmeans
from pyro_nngp.inducing.priors import Determinantal, InducingPrior, Strauss

__all__ = [
    "Determinantal",
    "InducingPrior",
    "SparseLayer",
    "Strauss",
    "kmeans",
]
