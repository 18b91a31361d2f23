"""Coefficients of the mean function in the solution for Gaussian sites.

The level of a :class:`~pyro_nngp.means.ConstantMean` that is learned is at its optimum, by generalized least squares on
the sites. Coefficients of a :class:`~pyro_nngp.means.LinearMean` with normal priors have their joint posterior: the
marginal means of u, f less the mean function, follow them linearly, so that it is normal for given sites. Other mean
functions have neither.

Cost: O(p N K) per iteration of conjugate gradients. Symbols: N points, K neighbors, p coefficients, L latent functions.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from pyro_nngp.coefficients import condition_coefficients
from pyro_nngp.means import ConstantMean, LinearMean
from pyro_nngp.variational.latent_prior import LatentPrior
from pyro_nngp.variational.natural_gradient import Total


def parameters_but_level(method: nn.Module) -> list[Tensor]:
    """The parameters that the evidence of pseudo-observations depends on.

    The level of the mean is not among them: at a solution the gradient in it is zero. Pseudo-observations are buffers.

    Args:
        method: kernel, likelihood, mean function and the guide of their priors are its parts.
    """
    left_out = set(map(id, MeanCoefficients(method._modules.get("mean")).level_parameters()))
    return [value for value in method.parameters() if id(value) not in left_out]


class MeanCoefficients:
    """The coefficients of a mean function that are solved for with the sites.

    Args:
        mean: the mean function as a module; None or another callable has no such coefficients.
    """

    def __init__(self, mean: Any) -> None:
        self._mean = mean

    # The level of a constant mean function.

    def level_parameters(self) -> list[nn.Parameter]:
        """The level of a constant mean function, if it has no prior."""
        mean = self._mean
        return mean.solved_parameters() if isinstance(mean, ConstantMean) and mean.is_free else []

    def solved_parameters(self) -> list[nn.Parameter]:
        """The level of a constant mean function, if it is learned."""
        return self.level_parameters() if isinstance(self._mean, ConstantMean) and self._mean.is_learned else []

    def solved_values(self) -> list[Tensor]:
        """All that a solution changes: the level that is learned, or the joint posterior of the coefficients."""
        posterior = [self._mean.posterior_loc, self._mean.posterior_tril] if self.has_posterior else []
        return [*self.solved_parameters(), *posterior]

    def level(self) -> Float[Tensor, " *L"] | None:
        """The level of a constant mean function that is learned, () or (L,); None for other mean functions."""
        return self._mean.value.detach() if self.solved_parameters() else None

    def free_levels(self, values: Tensor) -> Bool[Tensor, " *L"]:
        """Which levels are not held, on the device of some values."""
        return self._mean.free(values)

    def assign_level(self, value: Float[Tensor, " *L"]) -> None:
        """Set the level of a constant mean function."""
        self._mean.assign(value.reshape(1, -1))

    # The joint posterior of the coefficients of a linear mean function.

    @property
    def num_normal(self) -> int:
        """The number p of coefficients with normal priors, which may have a joint posterior."""
        return 1 + len(self._mean.center) if isinstance(self._mean, LinearMean) and self._mean.is_normal else 0

    @property
    def has_posterior(self) -> bool:
        """Whether the coefficients have a joint posterior."""
        return isinstance(self._mean, LinearMean) and self._mean.has_posterior

    def adjusted(
        self, values: Float[Tensor, "*L U"], slopes: Callable[[], Float[Tensor, "*L p U"]]
    ) -> Float[Tensor, "*out U"]:
        """Values at the present coefficients from those at their posterior means; without a posterior, the same.

        Args:
            values: at the posterior means.
            slopes: a function that returns how much the values fall per unit of each coefficient.
        """
        change = self._deviation()
        return values if change is None else values - _combined(slopes(), change, bool(self._mean.own_shape))

    def _deviation(self) -> Float[Tensor, "*shape"] | None:
        """Coefficients less their posterior means, where they are not at these; None without a posterior."""
        if not self.has_posterior:
            return None
        change = self._mean.deviation()
        return change if bool(change.any()) else None

    def basis(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N p"]:
        """Values of the mean function at points, per unit of each coefficient."""
        return self._mean.basis(x)

    def condition(
        self,
        latent: LatentPrior,
        x: Float[Tensor, "N D"],
        residual: Float[Tensor, "*L N"],
        precision: Float[Tensor, "*L N"],
        total: Total,
    ) -> tuple[Float[Tensor, "*L p N"], Float[Tensor, "*L N"]]:
        """Set the posterior of the coefficients given the sites, and the coefficients to its mean, in one exact step.

        Args:
            latent: the prior of u.
            x: the points.
            residual: targets of the sites less the mean of f at the present coefficients.
            precision: of the sites.
            total: the sum over the data of all processes from that over the present N.

        Returns:
            How much the marginal means of u fall per unit of each coefficient, and how much they fall by this step.
        """
        mean, basis = self._mean, self.basis(x).mT.to(residual)
        gain, curvature = latent.coefficients(basis, precision)
        slope = total((basis @ (precision * residual)[..., None])[..., 0])
        now = mean.posterior_loc.reshape(len(basis), *mean.own_shape).clone()
        by_latent = (now.mT if mean.own_shape else now).to(curvature)  # (*L, p)
        linear = slope + (curvature @ by_latent[..., None])[..., 0]
        change = condition_coefficients(mean, curvature, linear).to(now) - now
        return gain, _combined(gain, change.to(gain), bool(mean.own_shape))


def _combined(
    table: Float[Tensor, "*L p U"], change: Float[Tensor, "*shape"], has_own: bool
) -> Float[Tensor, "*out U"]:
    """Combinations of the rows of a table with coefficients: one set for all latent functions, or for each."""
    return ((change.mT if has_own else change)[..., None] * table).sum(-2)
