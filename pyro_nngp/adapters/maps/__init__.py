"""Predictions on rasters and other grids, in bounded memory and into files."""

from pyro_nngp.adapters.maps.grid import predict_grid

__all__ = ["predict_grid"]
