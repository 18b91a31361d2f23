"""Export of posterior draws to ArviZ.

Public names are in :mod:`pyro_nngp.inference`.
"""
