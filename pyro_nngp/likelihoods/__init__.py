"""Likelihoods p(y | f): Pyro conditionals with their expected log-densities and marginals over a normal f.

See :class:`Likelihood` for the protocol and how to write one.
"""

from pyro_nngp.likelihoods.base import Likelihood, Marginal
from pyro_nngp.likelihoods.censored import Censored, IntervalCensored
from pyro_nngp.likelihoods.continuous import (
    AsymmetricLaplace,
    Gamma,
    Gaussian,
    HeteroskedasticGaussian,
    LogNormal,
    StudentT,
)
from pyro_nngp.likelihoods.counts import Binomial, NegativeBinomial, Poisson
from pyro_nngp.likelihoods.labels import Bernoulli, Categorical, Ordinal
from pyro_nngp.likelihoods.multinomial import BinomialSplit, binomial_splits, log_shares
from pyro_nngp.likelihoods.occupancy import Occupancy
from pyro_nngp.likelihoods.per_output import PerOutput
from pyro_nngp.likelihoods.polya_gamma import PolyaGammaBound
from pyro_nngp.likelihoods.positive import GeneralizedPareto, InverseGaussian, Tweedie
from pyro_nngp.likelihoods.proportions import Beta, BetaBinomial
from pyro_nngp.likelihoods.softmax_counts import Multinomial
from pyro_nngp.likelihoods.zeros import Hurdle, ZeroInflated, ZeroTruncated

__all__ = [
    "AsymmetricLaplace",
    "Bernoulli",
    "Beta",
    "BetaBinomial",
    "Binomial",
    "BinomialSplit",
    "Categorical",
    "Censored",
    "Gamma",
    "Gaussian",
    "GeneralizedPareto",
    "HeteroskedasticGaussian",
    "Hurdle",
    "IntervalCensored",
    "InverseGaussian",
    "Likelihood",
    "LogNormal",
    "Marginal",
    "Multinomial",
    "NegativeBinomial",
    "Occupancy",
    "Ordinal",
    "PerOutput",
    "Poisson",
    "PolyaGammaBound",
    "StudentT",
    "Tweedie",
    "ZeroInflated",
    "ZeroTruncated",
    "binomial_splits",
    "log_shares",
]
