"""Stochastic variational inference: the training loop, the state of a run, an optimizer of rows.

Public names are in :mod:`pyro_nngp.inference`.
"""
