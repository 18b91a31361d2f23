"""Calibration, importance-sampling diagnostics, comparison with the exact Gaussian process.

Public names are in :mod:`pyro_nngp.inference`.
"""
