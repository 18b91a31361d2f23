"""Pyro modules that own their parameters, positive hyperparameters, priors and their guide."""

from pyro_nngp.hyperparameters.module import GPModule, bound_copy, pyro_entry, release
from pyro_nngp.hyperparameters.positive import Hyperparameter, lognormal_priors, positive
from pyro_nngp.hyperparameters.priors import HyperparameterGuide, check_same_sites, place_draws, read_hyperparameters

__all__ = [
    "GPModule",
    "Hyperparameter",
    "HyperparameterGuide",
    "bound_copy",
    "check_same_sites",
    "lognormal_priors",
    "place_draws",
    "positive",
    "pyro_entry",
    "read_hyperparameters",
    "release",
]
