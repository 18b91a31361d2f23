"""Predictions from posterior draws of all sites: mixtures and joint draws."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import fail
from pyro_nngp._random import seeded
from pyro_nngp.data.tables import Table, at_tables
from pyro_nngp.distributions import Mixture
from pyro_nngp.distributions.mixture import mixture_moments
from pyro_nngp.hyperparameters import place_draws, pyro_entry
from pyro_nngp.hyperparameters.priors import count_draws, map_draws, place_hyperparameters
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.likelihoods.integrated import marginals
from pyro_nngp.models.base.draws_of_y import DrawsOfY
from pyro_nngp.models.base.leave_one_out import Draw
from pyro_nngp.models.base.sites import ByRow

Samples: TypeAlias = Mapping[str, Tensor]
"""Draws of all latent sites by name, as ``MCMC.get_samples()`` returns them."""

Moments: TypeAlias = tuple[Tensor, Tensor]

Result = TypeVar("Result")


class SampledMethod(DrawsOfY):
    """Base of methods without a guide, which predict from posterior draws of their sites."""

    likelihood: Likelihood

    def moments_given(self, x_new: Float[Tensor, "P D"]) -> Moments:
        """Means and variances of f at new points, (H, *T, P) for H hidden draws, at the sites' present values."""
        self.undefined("moments_given")

    def moment_entries(self, x_new: Float[Tensor, "P D"]) -> int | None:
        """Entries of temporaries of :meth:`moments_given` at one posterior draw; None takes one after the other."""
        return None

    def joint_entries(self, x_new: Float[Tensor, "P D"]) -> int | None:
        """The same of :meth:`joint_draws`."""
        return None

    def joint_draws(self, x_new: Float[Tensor, "P D"]) -> Float[Tensor, "*T P"]:
        """One joint draw of f at new points, at the sites' present values."""
        self.undefined("joint_draws")

    @at_tables
    @torch.no_grad()
    def forward(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        samples: Samples | None = None,
        *,
        offset: Float[Tensor, "P *L"] | Table | None = None,
    ) -> Moments:
        """Posterior mean and variance of f at new points.

        Args:
            x_new: new inputs.
            samples: posterior draws of all sites, as ``MCMC.get_samples()`` returns them; there is no default.
            offset: known part of f at the new points, as the constructor takes it; None is 0.

        Returns:
            Mean and variance, (P,), or (T, P) for T latent functions.

        Raises:
            ValueError: if there are no draws, a site is missing, or draws differ in number.

        Cost: O(M^3 + P M^2) per draw and layer, one draw and one block of points at a time; memory O(S P).
        """
        added = self.new_offset("forward", x_new, offset)
        mean, variance = mixture_moments(*self.moments(x_new, samples))
        return mean + added, variance

    @pyro_entry
    @torch.no_grad()
    def moments(self, x_new: Float[Tensor, "P D"], samples: Samples | None = None) -> Moments:
        """Mean and variance of f at new points given each posterior draw, for example to compare chains.

        Args:
            x_new: new inputs.
            samples: posterior draws of all sites.

        Returns:
            Means and variances, (S, P), or (S, T, P) for T latent functions.

        Raises:
            ValueError, TypeError: as in the call.

        Cost: as in the call.
        """
        pairs = [mixture_moments(loc, var) for _, loc, var in self._at_draws("moments", x_new, samples)]
        loc, var = (torch.stack(values) for values in zip(*pairs, strict=True))
        return loc, var

    @at_tables
    @pyro_entry
    @torch.no_grad()
    def predict(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        samples: Samples | None = None,
        *,
        offset: Float[Tensor, "P *L"] | Table | None = None,
        trials: Float[Tensor, " P"] | Int[Tensor, " P"] | Table | None = None,
        limits: Float[Tensor, " P"] | Table | None = None,
    ) -> Distribution:
        """Predictive distribution of y at new points, the mixture over posterior draws; arguments as in the call.

        `trials` are the numbers of trials at the new points, of ``Binomial()``; None is one each. `limits` are the
        limits of detection there, of ``Censored()``; None predicts values that nothing limits.

        Batch shape (P,), or (T, P) for T outputs. Its log density is the log-mean-exp over draws. Each draw is
        integrated over f, with its hyperparameters of the likelihood.
        """
        added, each = self.new_offset("predict", x_new, offset), self.new_by_row(x_new, trials, limits)
        found = [
            marginals(likelihood.for_rows(**each), loc + added, var)
            for likelihood, loc, var in self._at_draws("predict", x_new, samples)
        ]
        return Mixture([component for components in found for component in components])

    @at_tables
    @pyro_entry
    @torch.no_grad()
    def sample(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        num_samples: int,
        *,
        samples: Samples,
        seed: int | None = None,
        offset: Float[Tensor, "P *L"] | Table | None = None,
    ) -> Float[Tensor, "S *T P"]:
        """Joint posterior draws of f at new points, each from the exact process given one posterior draw.

        Args:
            x_new: new inputs.
            num_samples: S; evenly spaced posterior draws are used, some repeatedly if there are fewer.
            samples: posterior draws of all sites.
            seed: makes the draws reproducible and leaves the global random state alone; None uses the global state.
            offset: as in the call.

        Raises:
            ValueError, TypeError: as in the call.

        Cost: O(M^3 + P M^2 + P^3) per draw and layer.
        """
        self._check_sample(x_new, num_samples, seed)
        where, added = f"{type(self).__name__}.sample", self.new_offset("sample", x_new, offset)
        rows = torch.linspace(0, count_draws(where, samples) - 1, num_samples).round().long()
        chosen = {name: value[rows.to(value.device)] for name, value in samples.items()}
        with seeded(seed, x_new):
            draws = list(self._each_draw(where, chosen, self.joint_entries(x_new), lambda: self.joint_draws(x_new)))
        return torch.stack(draws) + added

    @at_tables
    def predictions_by_draw(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        *,
        offset: Float[Tensor, "P *L"] | Table | None = None,
        trials: Float[Tensor, " P"] | Int[Tensor, " P"] | Table | None = None,
        limits: Float[Tensor, " P"] | Table | None = None,
    ) -> Callable[[Draw], tuple[Tensor, Tensor]]:
        """Joint draws of f and y at new points as a function of one posterior draw at a time, for streaming.

        Args:
            x_new: new inputs.
            offset: as in the call.
            trials: as in :meth:`predict`.
            limits: as in :meth:`predict`.

        Raises:
            ValueError, TypeError: as in the call.
        """
        self._check_new("predictions_by_draw", x_new)
        added, each = self.new_offset("predict", x_new, offset), self.new_by_row(x_new, trials, limits)
        return lambda draw: self._predictions_at(draw, x_new, added, each)

    @pyro_entry
    @torch.no_grad()
    def _predictions_at(self, draw: Draw, x_new: Tensor, added: Tensor, by_row: ByRow) -> tuple[Tensor, Tensor]:
        place_hyperparameters(f"{type(self).__name__}.predictions_by_draw", self, draw)
        f = self.joint_draws(x_new) + added
        return f, self._y_given(f, by_row)

    def _at_draws(
        self, method: str, x_new: Tensor, samples: Samples | None
    ) -> Iterator[tuple[Likelihood, Tensor, Tensor]]:
        """The likelihood and the moments of f, (H, *T, P) for H hidden draws, for each posterior draw."""
        self._check_new(method, x_new)
        where = f"{type(self).__name__}.{method}"
        if samples is None:
            cure = "Sample its model, as by MCMC(SGHMC(gp.model), ...), and pass mcmc.get_samples()."
            fail(where, "samples", "posterior draws of all sites", None, cure, TypeError)
        pairs = self._each_draw(where, samples, self.moment_entries(x_new), lambda: self.moments_given(x_new))
        for pair, _ in zip(pairs, place_draws(where, self, samples), strict=True):
            yield self.likelihood.bind(), *pair

    def _each_draw(
        self, where: str, samples: Samples, entries: int | None, compute: Callable[[], Result]
    ) -> Iterator[Result]:
        """Results at each posterior draw, for several at once where memory allows."""
        most = self.draws_at_once(where, samples, entries)
        if most < 2:
            yield from (compute() for _ in place_draws(where, self, samples))
            return
        for found in map_draws(where, self, samples, most, lambda _: compute()):
            yield from zip(*found, strict=True) if isinstance(found, tuple) else found
