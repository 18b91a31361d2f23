"""Shared parts of methods: construction, programs, posteriors, and predictions from them."""

from pyro_nngp.models.base.draws import Draw, Samples
from pyro_nngp.models.base.joint import Fantasies
from pyro_nngp.models.base.method import Method
from pyro_nngp.models.base.posterior import Observed, Posterior
from pyro_nngp.models.base.program import Program

__all__ = ["Draw", "Fantasies", "Method", "Observed", "Posterior", "Program", "Samples"]
