r"""Joint draws of y at new points: draws of f, then of the likelihood with its fitted hyperparameters.

.. math:: f^{(s)} \sim p(f \mid \text{data}), \qquad y^{(s)}_p \sim p(y \mid f^{(s)}_p, \theta)

with :math:`\theta` as in predictive distributions: of each posterior draw, or the medians of the guide.

Cost: that of the draws of f. Symbols: P new points, L latent functions, T outputs, S draws.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import fail
from pyro_nngp._random import seeded
from pyro_nngp.data.tables import Table, at_tables
from pyro_nngp.hyperparameters import place_draws, pyro_entry
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.models.tower.leave_one_out import LeaveOneOutMethod
from pyro_nngp.models.tower.sites import ByRow


class DrawsOfY(LeaveOneOutMethod):
    """A method whose joint draws of f, of ``sample``, become draws of y."""

    sample: Any

    @at_tables
    @pyro_entry
    @torch.no_grad()
    def sample_y(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        num_samples: int,
        *,
        seed: int | None = None,
        samples: Mapping[str, Tensor] | None = None,
        offset: Float[Tensor, "P *L"] | Table | None = None,
        trials: Float[Tensor, " P"] | Int[Tensor, " P"] | Table | None = None,
        limits: Float[Tensor, " P"] | Table | None = None,
        **options: Any,
    ) -> Float[Tensor, "S *T P"] | Int[Tensor, "S *T P"]:
        """Joint posterior predictive draws of y at new points, correlated within a draw as f is.

        Args:
            x_new: new inputs.
            num_samples: S.
            seed: makes the draws reproducible and leaves the global random state alone; None uses the global state.
            samples: posterior draws of all sites, as ``sample`` takes them; None draws f from the guide and y with the
                hyperparameters of ``predict``.
            offset: known part of f at the new points, as the constructor takes it; None is 0.
            trials: numbers of trials at the new points, of ``Binomial()``; None is one each.
            limits: limits of detection at the new points, of ``Censored()``; None draws values that nothing limits.
            options: further arguments of ``sample``, such as `num_neighbors`.

        Raises:
            ValueError, TypeError: as ``sample``, and if the model has no likelihood.

        Cost: that of ``sample``.
        """
        where = f"{type(self).__name__}.sample_y"
        if self.likelihood is None:
            fail(where, "a likelihood", "in the model", None, "Take sample for draws of f.")
        with seeded(seed, x_new):
            f = self.sample(x_new, num_samples, samples=samples, offset=offset, **options)
            by_row = self.new_by_row(x_new, trials, limits)
            if samples is None:
                self._place_medians()
                return self._y_given(f, by_row)
            parts = []
            for _, count in place_draws(where, self, samples, num_samples):  # its hyperparameters in turn
                parts.append(self._y_given(f[:count], by_row))
                f = f[count:]
        return torch.cat(parts)

    def _y_given(self, f: Float[Tensor, "... P"], by_row: ByRow) -> Tensor:
        """A draw of y, (*S, *T, P), for each value of f at the present hyperparameters."""
        if cast(Likelihood, self.likelihood).num_latents is not None:
            f = f.movedim(-2, 0)
        return self._predictive_of_y(f, torch.zeros_like(f), by_row).sample()

    def _predictive_of_y(self, loc: Tensor, var: Tensor, by_row: ByRow) -> Distribution:
        """Predictive distribution of y for moments of f at the present hyperparameters."""
        return cast(Likelihood, self.likelihood).bind().for_rows(**by_row).marginal(loc, var)
