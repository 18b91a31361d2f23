r"""Predictions: moments of f, predictive distribution of y and joint draws, from the guide or posterior draws.

Given posterior draws :math:`\theta_s` of hyperparameters and latent values, such as those of NUTS on ``model``,

.. math:: p(y \mid x, \text{data}) \approx \frac1S \sum_s p(y \mid x, \theta_s),

and the moments of f are those of the mixture. Without posterior draws, predictions integrate over the method's guide,
with hyperparameters that have priors at the median of their guide.

Cost: that of the method's moments, once or for each posterior draw; neighbors are searched once. Symbols: P new points,
L latent functions, T outputs, S draws.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from pyro import poutine
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import check_num_neighbors, fail
from pyro_nngp._random import seeded
from pyro_nngp.data.tables import Table, at_tables
from pyro_nngp.distributions import Mixture
from pyro_nngp.distributions.mixture import mixture_moments
from pyro_nngp.hyperparameters import check_same_sites, place_draws, pyro_entry
from pyro_nngp.hyperparameters.priors import place_hyperparameters
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.models.base.leave_one_out import Draw, LeaveOneOutMethod

Result = TypeVar("Result")


class PredictiveMethod(LeaveOneOutMethod):
    """A method with predictions at new points.

    A subclass defines :meth:`plan` and :meth:`moments`, :meth:`joint_plan` and :meth:`joint_draws`. They are called
    with the hyperparameters set, and read other sites from the posterior draw if they get one.
    """

    @at_tables
    def forward(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        *,
        num_neighbors: int | None = None,
        samples: Mapping[str, Tensor] | None = None,
    ) -> tuple[Float[Tensor, "*L P"], Float[Tensor, "*L P"]]:
        """Posterior mean and variance of f at new points.

        Args:
            x_new: new inputs, a tensor or any table that the method takes as data.
            num_neighbors: neighbors per new point, among the points that the method conditions on; None is the method's
                choice. More neighbors than in training often help.
            samples: posterior draws of all sites, such as ``mcmc.get_samples()`` after NUTS on ``model``, to average
                over. None integrates over the guide, with hyperparameters that have priors at its median.

        Returns:
            Mean and variance, (P,), or (L, P) for L latent functions: tensors for a tensor; for a table the caller's
            kind, such as two Series with the index of a DataFrame.

        Raises:
            ValueError, TypeError: for malformed arguments, or a site that is missing in `samples`.
        """
        pairs = self._at_draws("forward", x_new, num_neighbors, samples, self.moments)
        if samples is None:
            return pairs[0]
        return mixture_moments(*(torch.stack(values) for values in zip(*pairs, strict=True)))

    @at_tables
    @pyro_entry
    def predict(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        *,
        num_neighbors: int | None = None,
        samples: Mapping[str, Tensor] | None = None,
    ) -> Distribution:
        """Predictive distribution of y at new points, batch shape (P,), or (T, P) for T outputs.

        Args:
            x_new: new inputs.
            num_neighbors: as in :meth:`forward`.
            samples: as in :meth:`forward`; the result is then the mixture over the draws.

        Returns:
            The marginal of the likelihood, f integrated out.

        Raises:
            ValueError, TypeError: as in :meth:`forward`, and if the model has no likelihood.
        """
        if self.likelihood is None:
            where, cure = f"{type(self).__name__}.predict", "Call the model for the moments of f instead."
            fail(where, "a likelihood", "in the model", None, cure)
        found = self._at_draws("predict", x_new, num_neighbors, samples, self._predictive_at)
        return found[0] if samples is None else Mixture(found)

    @at_tables
    @pyro_entry
    @torch.no_grad()
    def sample(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        num_samples: int,
        *,
        num_neighbors: int | None = None,
        seed: int | None = None,
        samples: Mapping[str, Tensor] | None = None,
    ) -> Float[Tensor, "S *L P"]:
        """Joint posterior draws of f at new points, correlated within a draw.

        Args:
            x_new: new inputs.
            num_samples: S.
            num_neighbors: neighbors per new point, among the points that the method conditions on and the new ones;
                None is the method's choice.
            seed: makes the draws reproducible and leaves the global random state alone; None uses the global state.
            samples: as in :meth:`forward`; evenly spaced draws are used, some repeatedly if there are fewer than S.

        Raises:
            ValueError, TypeError: as in :meth:`forward`.

        Cost: once for all draws, or per draw where hyperparameters differ between draws.
        """
        self._check_sample(x_new, num_samples, seed)
        with seeded(seed, x_new):
            plan = self.joint_plan(x_new, num_neighbors, 0 if seed is None else seed)
            if samples is None:
                counts = self._hyperparameter_draws(num_samples, self._most_draws(len(x_new)))
                draws = [self.joint_draws(x_new, plan, count, None) for count in counts]
            else:
                given = place_draws(f"{type(self).__name__}.sample", self, samples, num_samples)
                draws = [self.joint_draws(x_new, plan, count, draw) for draw, count in given]
        return torch.cat(draws)

    @at_tables
    @pyro_entry
    @torch.no_grad()
    def predictions_by_draw(
        self, x_new: Float[Tensor, "P D"] | Table, *, num_neighbors: int | None = None, seed: int = 0
    ) -> Callable[[Draw], tuple[Tensor, Tensor | None]]:
        """Joint draws of f and y at new points as a function of one posterior draw at a time, for streaming.

        Args:
            x_new: new inputs.
            num_neighbors: as in :meth:`sample`.
            seed: seed of the order of the new points; the draws use the global random state.

        Returns:
            A function from the values of all sites to f, (*L, P), and y, (*T, P); None for y without a likelihood.

        Raises:
            ValueError, TypeError: as in :meth:`sample`.
        """
        self._check_new("predictions_by_draw", x_new)
        plan = self.joint_plan(x_new, num_neighbors, seed)
        return lambda draw: self._predictions_at(draw, x_new, plan)

    @pyro_entry
    @torch.no_grad()
    def _predictions_at(self, draw: Draw, x_new: Tensor, plan: Any) -> tuple[Tensor, Tensor | None]:
        place_hyperparameters(f"{type(self).__name__}.predictions_by_draw", self, draw)
        f = self.joint_draws(x_new, plan, 1, draw)[0]
        return f, None if self.likelihood is None else self._predictive_of_y(f, torch.zeros_like(f)).sample()

    def _at_draws(
        self,
        method: str,
        x_new: Tensor,
        num_neighbors: int | None,
        samples: Mapping[str, Tensor] | None,
        result: Callable[[Tensor, Any, Draw | None], Result],
    ) -> list[Result]:
        """Yield `result` for the new points and their plan: under the guide, or for each posterior draw."""
        self._check_new(method, x_new)
        plan = self.plan(x_new, num_neighbors)
        if samples is None:
            self._place_medians()
            return [result(x_new, plan, None)]
        with torch.no_grad():
            draws = place_draws(f"{type(self).__name__}.{method}", self, samples)
            return [result(x_new, plan, draw) for draw, _ in draws]

    def plan(self, x_new: Tensor, num_neighbors: int | None) -> Any:
        """Precompute for :meth:`moments` what does not depend on hyperparameters, such as neighbors."""
        self.undefined("plan")

    def moments(self, x_new: Tensor, plan: Any, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """Mean and variance of f, (*L, P) each: under the guide, or given a posterior draw."""
        self.undefined("moments")

    def _predictive_at(self, x_new: Tensor, plan: Any, draw: Draw | None) -> Distribution:
        """Predictive distribution of y: under the guide, or given a posterior draw."""
        return self._predictive_of_y(*self.moments(x_new, plan, draw))

    def joint_plan(self, x_new: Tensor, num_neighbors: int | None, seed: int) -> Any:
        """Precompute for :meth:`joint_draws` what does not depend on hyperparameters; `seed` orders new points."""
        self.undefined("joint_plan")

    def joint_draws(self, x_new: Tensor, plan: Any, count: int, draw: Draw | None) -> Tensor:
        """Joint draws of f, (count, *L, P): under the guide, or given a posterior draw."""
        self.undefined("joint_draws")

    def _hyperparameter_draws(self, num_samples: int, most: int | None = None) -> Iterator[int]:
        """Set the hyperparameters to each draw in turn, and yield the number of samples for each.

        With priors that is one sample each; without priors all samples at once, or `most` at a time.
        """
        check_same_sites(type(self).__name__, self, self.hyper_guide)
        block = 1 if self.hyper_guide.has_sites else num_samples if most is None else most
        for start in range(0, max(1, num_samples), max(1, block)):
            with poutine.block():
                self.hyper_guide()
            yield min(block, num_samples - start)

    def _most_draws(self, num_new: int) -> int | None:
        """The largest number of joint draws made at once; None is all of them."""
        return None

    def _predictive_of_y(self, loc: Tensor, var: Tensor) -> Distribution:
        """Predictive distribution of y for moments of f at the present hyperparameters."""
        return cast(Likelihood, self.likelihood).bind().marginal(loc, var)

    def _drawn(self, draw: Draw, site: str, shape: tuple[int, ...]) -> Tensor:
        """The value of a latent site in a posterior draw."""
        where, name = type(self).__name__, self.site(site)
        if name not in draw:
            cure = f"A site that was reparametrized comes from Predictive(model, samples, return_sites=[{name!r}])."
            fail(where, "samples", f"to hold the site {name!r}", sorted(draw), cure)
        value = draw[name]
        while value.dim() > len(shape) and len(value) == 1:  # Predictive adds leading dimensions of size one
            value = value[0]
        if value.shape != shape:
            expectation = f"of shape (S, {', '.join(map(str, shape))})"
            cure = "Pass draws of the model on all data, as get_samples() of the run returns them."
            fail(where, f"samples[{name!r}]", expectation, ("S", *value.shape), cure)
        return value

    def _check_neighbors(self, num_neighbors: int | None, limit: int) -> None:
        if num_neighbors is not None:
            check_num_neighbors(type(self).__name__, num_neighbors, limit)
