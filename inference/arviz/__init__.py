"""Export of posterior draws to ArviZ."""

from pyro_nngp.inference.arviz.elpd import elpd
from pyro_nngp.inference.arviz.export import to_arviz

__all__ = [
    "elpd",
    "to_arviz",
]
