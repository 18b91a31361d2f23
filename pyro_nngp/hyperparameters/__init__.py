"""Pyro modules that hold their parameters, positive hyperparameters, priors and their guide."""

from pyro_nngp.hyperparameters.module import GPModule, bound_copy, freeze, release, unset_hyperparameters
from pyro_nngp.hyperparameters.positive import Hyperparameter, Unset, between, lognormal_priors, positive
from pyro_nngp.hyperparameters.priors import HyperparameterGuide, check_same_sites
from pyro_nngp.hyperparameters.scaled import Scaled, assign, scaled

__all__ = [
    "GPModule",
    "Hyperparameter",
    "HyperparameterGuide",
    "Scaled",
    "Unset",
    "assign",
    "between",
    "bound_copy",
    "check_same_sites",
    "freeze",
    "lognormal_priors",
    "positive",
    "release",
    "scaled",
    "unset_hyperparameters",
]
