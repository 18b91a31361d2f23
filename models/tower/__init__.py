"""Base classes of the methods: data and sites, predictions, and conditioning on observed neighbors."""

from pyro_nngp.models.base.joint import Fantasies
from pyro_nngp.models.tower.draws_of_y import DrawsOfY
from pyro_nngp.models.tower.gaussian_response import GaussianResponseMethod
from pyro_nngp.models.tower.leave_one_out import Densities, Draw, LeaveOneOutMethod
from pyro_nngp.models.tower.method import GPMethod
from pyro_nngp.models.tower.neighbor_choice import NeighborChoice, first_neighbors
from pyro_nngp.models.tower.new_data import GrowingData, warn_untrained
from pyro_nngp.models.tower.predictive import PredictiveMethod
from pyro_nngp.models.tower.response import ResponseMethod, draws_given_observations
from pyro_nngp.models.tower.sites import ByRow, Plates, latents_first, rows_of

__all__ = [
    "ByRow",
    "Densities",
    "Draw",
    "DrawsOfY",
    "Fantasies",
    "GPMethod",
    "GaussianResponseMethod",
    "GrowingData",
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
