"""Base classes of the methods: data and sites, predictions, and conditioning on observed neighbors."""

from pyro_nngp.models.base.draws_of_y import DrawsOfY
from pyro_nngp.models.base.gaussian_response import GaussianResponseMethod
from pyro_nngp.models.base.joint import Fantasies
from pyro_nngp.models.base.latent_predictions import LatentPredictions
from pyro_nngp.models.base.leave_one_out import Densities, Draw, LeaveOneOutMethod
from pyro_nngp.models.base.method import GPMethod
from pyro_nngp.models.base.neighbor_choice import NeighborChoice, first_neighbors
from pyro_nngp.models.base.new_data import GrowingData, warn_untrained
from pyro_nngp.models.base.predictive import PredictiveMethod
from pyro_nngp.models.base.response import ResponseMethod, draws_given_observations
from pyro_nngp.models.base.sites import ByRow, Plates, latents_first, rows_of

__all__ = [
    "ByRow",
    "Densities",
    "Draw",
    "DrawsOfY",
    "Fantasies",
    "GPMethod",
    "GaussianResponseMethod",
    "GrowingData",
    "LatentPredictions",
    "LeaveOneOutMethod",
    "NeighborChoice",
    "Plates",
    "PredictiveMethod",
    "ResponseMethod",
    "draws_given_observations",
    "first_neighbors",
    "latents_first",
    "rows_of",
    "warn_untrained",
]
