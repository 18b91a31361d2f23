"""Engines that know no method: variational inference, stochastic-gradient MCMC, export and diagnostics."""

from pyro_nngp.inference.elbo import IntegratedELBO
from pyro_nngp.inference.svi import DivergenceError, FitResult, fit

__all__ = ["DivergenceError", "FitResult", "IntegratedELBO", "fit"]
