"""Predictions on rasters and other grids, in bounded memory and into files."""

from pyro_nngp.maps.grid import predict_grid
from pyro_nngp.maps.plots import plot_map

__all__ = ["plot_map", "predict_grid"]
