"""Stochastic variational inference: the training loop, the state of a run, an optimizer for rows.

Public names are in :mod:`pyro_nngp.inference`.
"""
