"""Stochastic-gradient MCMC for any Pyro model, and Gibbs sampling with Polya-Gamma variables.

Public names are in :mod:`pyro_nngp.inference`.
"""
