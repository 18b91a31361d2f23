"""What the methods share: data and sites, predictions, and conditioning on observed neighbors."""

from pyro_nngp.models.base.method import GPMethod, Plates
from pyro_nngp.models.base.predictive import Draw, PredictiveMethod
from pyro_nngp.models.base.response import GaussianResponseMethod, ResponseMethod, draws_given_observations

__all__ = [
    "Draw",
    "GPMethod",
    "GaussianResponseMethod",
    "Plates",
    "PredictiveMethod",
    "ResponseMethod",
    "draws_given_observations",
]
