"""Inducing points: where they are placed, their priors, and layers of a deep sparse Gaussian process."""

from pyro_nngp.inducing.layer import SparseLayer, leading_axes, stacked_layers
from pyro_nngp.inducing.points import inducing_points, kmeans, nearest_inducing
from pyro_nngp.inducing.priors import Determinantal, InducingPrior, Strauss, inducing_prior

__all__ = [
    "Determinantal",
    "InducingPrior",
    "SparseLayer",
    "Strauss",
    "inducing_points",
    "inducing_prior",
    "kmeans",
    "leading_axes",
    "nearest_inducing",
    "stacked_layers",
]
