"""Pyro modules that hold their parameters, positive hyperparameters, priors and their guide."""

from pyro_nngp.hyperparameters.module import GPModule, bound_copy, freeze, pyro_entry, release, unset_hyperparameters
from pyro_nngp.hyperparameters.positive import Hyperparameter, Unset, between, lognormal_priors, positive
from pyro_nngp.hyperparameters.priors import HyperparameterGuide, check_same_sites, place_draws, read_hyperparameters
from pyro_nngp.hyperparameters.scaled import Scaled, assign, scaled
from pyro_nngp.hyperparameters.sets import each_set, stacked

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
    "each_set",
    "freeze",
    "lognormal_priors",
    "place_draws",
    "positive",
    "pyro_entry",
    "read_hyperparameters",
    "release",
    "scaled",
    "stacked",
    "unset_hyperparameters",
]
