"""Weights and variances of f(x) given the values at other points."""

from pyro_nngp.conditionals.inducing import whitened_conditional
from pyro_nngp.conditionals.nearest_neighbor import graph_conditional, nn_conditional

__all__ = ["graph_conditional", "nn_conditional", "whitened_conditional"]
