"""Engines that know no method: variational inference, stochastic-gradient MCMC, export and diagnostics."""

from pyro_nngp.inference.arviz import to_arviz
from pyro_nngp.inference.calibration import (
    Reliability,
    coverage_curve,
    pit,
    psis_khat,
    reliability,
    sbc_ranks,
    symmetry,
    uniformity,
)
from pyro_nngp.inference.calibration_plots import plot_coverage, plot_pit, plot_reliability
from pyro_nngp.inference.chains import SGMCMC, step_size_refinement
from pyro_nngp.inference.checkpoint import CheckpointError
from pyro_nngp.inference.elbo import IntegratedELBO, PredictiveELBO
from pyro_nngp.inference.gibbs import PolyaGammaGibbs
from pyro_nngp.inference.nn_report import NNReport, nn_versus_exact
from pyro_nngp.inference.potential import Minibatch
from pyro_nngp.inference.row_adam import RowAdam
from pyro_nngp.inference.schedules import Cyclical, PolynomialDecay
from pyro_nngp.inference.sghmc import SGHMC
from pyro_nngp.inference.sgld import SGLD
from pyro_nngp.inference.sgnht import SGNHT
from pyro_nngp.inference.svi import DivergenceError, FitResult, fit

__all__ = [
    "SGHMC",
    "SGLD",
    "SGMCMC",
    "SGNHT",
    "CheckpointError",
    "Cyclical",
    "DivergenceError",
    "FitResult",
    "IntegratedELBO",
    "Minibatch",
    "NNReport",
    "PolyaGammaGibbs",
    "PolynomialDecay",
    "PredictiveELBO",
    "Reliability",
    "RowAdam",
    "coverage_curve",
    "fit",
    "nn_versus_exact",
    "pit",
    "plot_coverage",
    "plot_pit",
    "plot_reliability",
    "psis_khat",
    "reliability",
    "sbc_ranks",
    "step_size_refinement",
    "symmetry",
    "to_arviz",
    "uniformity",
]
