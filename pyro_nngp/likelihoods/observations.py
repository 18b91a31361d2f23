"""Gaussian observations of f: the form in which data give their first information on f."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class PseudoObservations(NamedTuple):
    """Gaussian observations of f, and their level.

    Attributes:
        level: a robust level of each latent function, () or (L,).
        obs: observations, (N,) or (L, N).
        noise: noise variances, of the shape of `obs`; None if the observations are targets themselves, whose noise is
            to be estimated.
    """

    level: Tensor
    obs: Tensor
    noise: Tensor | None

    @classmethod
    def of(cls, obs: Float[Tensor, "*L N"], noise: Float[Tensor, "*L N"] | None = None) -> "PseudoObservations":
        """Observations with their level: the median, or the mean by precision where the noise is known."""
        level = obs.median(-1).values if noise is None else (obs / noise).sum(-1) / (1 / noise).sum(-1)
        return cls(level, obs, noise)

    def without(self, offset: Float[Tensor, "*L N"]) -> "PseudoObservations":
        """Observations of f less a known part."""
        return PseudoObservations.of(self.obs - offset, self.noise)
