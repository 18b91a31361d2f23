"""One file per method: a Pyro model and its guide."""

from pyro_nngp.models.vnngp import VNNGP

__all__ = ["VNNGP"]
