"""Plots of models, their training and their maps. Plots of calibration are in ``inference.diagnostics``."""

from pyro_nngp.adapters.plots.maps import plot_map
from pyro_nngp.adapters.plots.models import plot_band, plot_dependence, plot_relevance
from pyro_nngp.adapters.plots.scores import plot_residuals, plot_scores
from pyro_nngp.adapters.plots.training import plot_fit, plot_neighbors
from pyro_nngp.adapters.plots.variogram import plot_variogram

__all__ = [
    "plot_band",
    "plot_dependence",
    "plot_fit",
    "plot_map",
    "plot_neighbors",
    "plot_relevance",
    "plot_residuals",
    "plot_scores",
    "plot_variogram",
]
