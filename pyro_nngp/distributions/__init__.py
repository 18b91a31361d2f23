"""Distributions over the values of a function at many points, and the Kullback-Leibler divergence between them."""

from pyro_nngp.distributions.full_scale import FullScaleNNGP
from pyro_nngp.distributions.mixture import Mixture
from pyro_nngp.distributions.nngp import NNGP, in_plate
from pyro_nngp.distributions.normal_laplace import NormalLaplace
from pyro_nngp.distributions.polya_gamma import PolyaGamma
from pyro_nngp.distributions.positive import GeneralizedPareto, InverseGaussian, Tweedie
from pyro_nngp.distributions.reparam import FullScaleReparam, NNGPReparam
from pyro_nngp.distributions.sparse_cholesky import SparseCholeskyNormal

__all__ = [
    "NNGP",
    "FullScaleNNGP",
    "FullScaleReparam",
    "GeneralizedPareto",
    "InverseGaussian",
    "Mixture",
    "NNGPReparam",
    "NormalLaplace",
    "PolyaGamma",
    "SparseCholeskyNormal",
    "Tweedie",
    "in_plate",
]
