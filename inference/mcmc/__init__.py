"""Stochastic-gradient MCMC for any Pyro model, and Gibbs sampling with Polya-Gamma variables."""

from pyro_nngp.inference.mcmc.chains import SGMCMC, step_size_refinement
from pyro_nngp.inference.mcmc.polya_gamma_gibbs import PolyaGammaGibbs
from pyro_nngp.inference.mcmc.potential import Minibatch
from pyro_nngp.inference.mcmc.schedules import Cyclical, PolynomialDecay
from pyro_nngp.inference.mcmc.sghmc import SGHMC
from pyro_nngp.inference.mcmc.sgld import SGLD
from pyro_nngp.inference.mcmc.sgnht import SGNHT

__all__ = [
    "SGHMC",
    "SGLD",
    "SGMCMC",
    "SGNHT",
    "Cyclical",
    "Minibatch",
    "PolyaGammaGibbs",
    "PolynomialDecay",
    "step_size_refinement",
]
