"""Calibration, importance-sampling diagnostics, and comparison with the exact Gaussian process."""

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

__all__ = [
    "NNReport",
    "Reliability",
    "compare_to_exact",
    "coverage_curve",
    "pit",
    "plot_coverage",
    "plot_pit",
    "plot_reliability",
    "psis_khat",
    "reliability",
    "sbc_ranks",
    "symmetry",
    "uniformity",
]
