"""Bridges from the methods to other libraries, files and the shell.

Each module is imported by itself: :mod:`~pyro_nngp.adapters.sklearn` (estimators), :mod:`~pyro_nngp.adapters.botorch`
(models for Bayesian optimization), :mod:`~pyro_nngp.adapters.maps` (grids, rasters and their files),
:mod:`~pyro_nngp.adapters.plots` (pictures) and :mod:`~pyro_nngp.adapters.command_line`.
"""

__all__: list[str] = []
