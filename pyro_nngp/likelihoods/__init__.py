"""Likelihoods p(y | f): Pyro conditionals with their expected log-densities and marginals over a normal f.

See :class:`Likelihood` for the protocol and how to write one.
"""

from pyro_nngp.likelihoods.base import Likelihood, Marginal
from pyro_nngp.likelihoods.continuous import Gamma, Gaussian, HeteroskedasticGaussian, LogNormal, StudentT
from pyro_nngp.likelihoods.convolved import convolved
from pyro_nngp.likelihoods.discrete import Bernoulli, Binomial, Categorical, NegativeBinomial, Ordinal, Poisson
from pyro_nngp.likelihoods.polya_gamma import PolyaGammaBound

__all__ = [
    "Bernoulli",
    "Binomial",
    "Categorical",
    "Gamma",
    "Gaussian",
    "HeteroskedasticGaussian",
    "Likelihood",
    "LogNormal",
    "Marginal",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "PolyaGammaBound",
    "StudentT",
    "convolved",
]
