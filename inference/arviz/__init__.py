"""Export of posterior draws to ArviZ."""

from pyro_nngp.inference.arviz.export import to_arviz

__all__ = [
    "to_arviz",
]
