"""Inference for any Pyro program: variational inference, stochastic-gradient MCMC, export and diagnostics."""

from pyro_nngp.inference.arviz.elpd import elpd
from pyro_nngp.inference.arviz.export import to_arviz
from pyro_nngp.inference.arviz.pointwise import PointwiseLogLikelihood
from pyro_nngp.inference.arviz.sbc import sbc_to_arviz
from pyro_nngp.inference.autoguide.auto_nngp import AutoNNGP
from pyro_nngp.inference.checkpoint import CheckpointError
from pyro_nngp.inference.cross_validation import CrossValidation, Score, cross_validate
from pyro_nngp.inference.diagnostics.calibration import (
    Reliability,
    coverage_curve,
    pit,
    psis_khat,
    reliability,
    sbc_ranks,
    symmetry,
    uniformity,
)
from pyro_nngp.inference.diagnostics.exact_comparison import NNReport, compare_to_exact
from pyro_nngp.inference.diagnostics.plots import plot_coverage, plot_pit, plot_reliability
from pyro_nngp.inference.elbo import IntegratedELBO, PredictiveLogLikelihood
from pyro_nngp.inference.mcmc.chains import SGMCMC, step_size_refinement
from pyro_nngp.inference.mcmc.minibatch import Minibatch
from pyro_nngp.inference.mcmc.polya_gamma_gibbs import PolyaGammaGibbs
from pyro_nngp.inference.mcmc.quick_nuts import QuickNUTS
from pyro_nngp.inference.mcmc.recorder import Recorder
from pyro_nngp.inference.mcmc.schedules import Cyclical, PolynomialDecay
from pyro_nngp.inference.mcmc.sghmc import SGHMC
from pyro_nngp.inference.mcmc.sgld import SGLD
from pyro_nngp.inference.mcmc.sgnht import SGNHT
from pyro_nngp.inference.svi.loop import fit
from pyro_nngp.inference.svi.options import Checkpoint, Schedule, Validation
from pyro_nngp.inference.svi.result import ConvergenceWarning, FitResult
from pyro_nngp.inference.svi.row_adam import RowAdam
from pyro_nngp.inference.svi.train_state import DivergenceError

__all__ = [
    "SGHMC",
    "SGLD",
    "SGMCMC",
    "SGNHT",
    "AutoNNGP",
    "Checkpoint",
    "CheckpointError",
    "ConvergenceWarning",
    "CrossValidation",
    "Cyclical",
    "DivergenceError",
    "FitResult",
    "IntegratedELBO",
    "Minibatch",
    "NNReport",
    "PointwiseLogLikelihood",
    "PolyaGammaGibbs",
    "PolynomialDecay",
    "PredictiveLogLikelihood",
    "QuickNUTS",
    "Recorder",
    "Reliability",
    "RowAdam",
    "Schedule",
    "Score",
    "Validation",
    "compare_to_exact",
    "coverage_curve",
    "cross_validate",
    "elpd",
    "fit",
    "pit",
    "plot_coverage",
    "plot_pit",
    "plot_reliability",
    "psis_khat",
    "reliability",
    "sbc_ranks",
    "sbc_to_arviz",
    "step_size_refinement",
    "symmetry",
    "to_arviz",
    "uniformity",
]
