"""Targets of a method: which values they may have, and whether some outputs of a row may be missing.

Symbols: N data, T outputs.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_finite, fail
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.plausibility.data import warn_of_spreads


class Targets:
    """Targets of outputs that share a kernel and a noise: a row has all of them."""

    def check(self, where: str, y: Tensor) -> None:
        """Raise unless the values are finite."""
        if y.dim() == 2 and y.is_floating_point():
            missing = y.isnan()
            partly = int((missing.any(-1) & ~missing.all(-1)).sum())
            if partly:
                cure = "Take LMC or CoregionalizedLOO, or one model per output."
                fail(where, "y", "with all outputs of a row or none", f"{partly} rows with some missing", cure)
        check_finite(where, "y", y)

    def check_likelihood(self, where: str, likelihood: Likelihood) -> None:
        """Raise for a likelihood of outputs that are modeled apart."""
        if isinstance(likelihood, Likelihood) and likelihood.takes_missing:
            cure = "Take LMC, or one model per output."
            fail(where, "likelihood", "of one output", type(likelihood).__name__, cure, TypeError)

    def check_support(self, likelihood: Likelihood, y: Tensor) -> None:
        """Raise unless the values are in the support of the likelihood, whose hyperparameters all rows share."""
        likelihood.check(y)

    def warn_of_spreads(
        self, where: str, likelihood: Likelihood, spread: Float[Tensor, " T"], constant: list[bool]
    ) -> None:
        """Warn if outputs, those that are constant left out, differ in spread."""
        if likelihood.num_latents is None:
            warn_of_spreads(where, spread.masked_fill(torch.tensor(constant, device=spread.device), 0.0))


class SeparateTargets(Targets):
    """Targets of outputs that have scales of their own, NaN where one is missing."""

    def check(self, where: str, y: Tensor) -> None:
        check_finite(where, "y", y.masked_fill(y.isnan(), 0.0))

    def check_likelihood(self, where: str, likelihood: Likelihood) -> None:
        pass

    def check_support(self, likelihood: Likelihood, y: Tensor) -> None:
        likelihood.check(y.movedim(0, -1) if likelihood.takes_missing else y.nan_to_num())

    def warn_of_spreads(
        self, where: str, likelihood: Likelihood, spread: Float[Tensor, " T"], constant: list[bool]
    ) -> None:
        pass


__all__ = ["SeparateTargets", "Targets"]
