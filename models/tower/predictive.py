r"""Predictions: moments of f, predictive distribution of y and joint draws, from the guide or posterior draws.

Given posterior draws :math:`\theta_s` of hyperparameters and latent values, such as those of NUTS on ``model``,

.. math:: p(y \mid x, \text{data}) \approx \frac1S \sum_s p(y \mid x, \theta_s),

and the moments of f are those of the mixture. Without posterior draws, predictions integrate over the method's guide,
with hyperparameters that have priors at the median of their guide.

Cost: that of the method's moments, once or for each posterior draw, several of them at once where the method can;
neighbors are searched once. Symbols: P new points,
L latent functions, T outputs, S draws.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import torch
from jaxtyping import Float, Int
from pyro import poutine
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import check_num_neighbors, check_tensor, fail
from pyro_nngp._random import seeded
from pyro_nngp.data.tables import Table, at_tables
from pyro_nngp.distributions import Mixture
from pyro_nngp.distributions.mixture import mixture_moments
from pyro_nngp.hyperparameters import check_same_sites, place_draws, pyro_entry
from pyro_nngp.hyperparameters.priors import (
    Draws,
    count_draws,
    map_draws,
    place_hyperparameters,
    place_together,
)
from pyro_nngp.kernels import bind
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.means import BasisMean, LinearMean
from pyro_nngp.models.base.joint import Fantasies, condition_on_last, joint_posterior, union_of
from pyro_nngp.models.tower.draws_of_y import DrawsOfY
from pyro_nngp.models.tower.leave_one_out import Draw
from pyro_nngp.models.tower.sites import ByRow
from pyro_nngp.neighbors.table import distinct_rows

Result = TypeVar("Result")

Moments: TypeAlias = Callable[[Tensor, Any, Draw | None], tuple[Tensor, Tensor]]
"""Moments at new points with their plan: under the guide, or given a posterior draw."""


class PredictiveMethod(DrawsOfY):
    """A method with predictions at new points.

    A subclass defines :meth:`plan` and :meth:`moments`, :meth:`joint_plan` and :meth:`joint_draws`. Both are called
    with the hyperparameters placed, and read what else they need from the posterior draw, if they are given one.

    Attributes:
        draws_together: whether :meth:`moments` and :meth:`joint_draws` take several draws at once, as batch dimensions.
        maps_draws: whether they run under ``torch.vmap`` over draws.
        sites_determine_f: whether a posterior draw of the sites determines f at new points; otherwise predictions are
            from the guide only.
        bounds_evidence: whether the negative loss is a lower bound on the log evidence.
    """

    sites_determine_f = True
    bounds_evidence = True

    @at_tables
    def forward(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        *,
        num_neighbors: int | None = None,
        samples: Mapping[str, Tensor] | None = None,
        offset: Float[Tensor, "P *L"] | Table | None = None,
    ) -> tuple[Float[Tensor, "*L P"], Float[Tensor, "*L P"]]:
        """Posterior mean and variance of f at new points.

        Args:
            x_new: new inputs, a tensor or any table that the method takes as data.
            num_neighbors: neighbors per new point, among the points that the method conditions on; None is the method's
                choice. More neighbors than in training often help.
            samples: posterior draws of all sites, such as ``mcmc.get_samples()`` after NUTS on ``model``, to average
                over. None integrates over the guide, with hyperparameters that have priors at its median.
            offset: known part of f at the new points, as the constructor takes it; None is 0.

        Returns:
            Mean and variance, (P,), or (L, P) for L latent functions: tensors for a tensor; for a table the caller's
            kind, such as two Series with the index of a DataFrame.

        Raises:
            ValueError, TypeError: for malformed arguments, or a site that is missing in `samples`.
        """
        if self.shard is not None and self.predicts_from_rows:
            near = self._near("forward", x_new, num_neighbors)
            return near[0](x_new, num_neighbors=near[1], samples=samples, offset=offset)
        added = self.new_offset("forward", x_new, offset)
        pairs = self._at_draws("forward", x_new, num_neighbors, samples, self.moments, lambda *moments: moments)
        if samples is None:
            mean, variance = pairs[0]
        else:
            mean, variance = mixture_moments(*(torch.stack(values) for values in zip(*pairs, strict=True)))
        return mean + added, variance

    @at_tables
    @pyro_entry
    def predict(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        *,
        num_neighbors: int | None = None,
        samples: Mapping[str, Tensor] | None = None,
        offset: Float[Tensor, "P *L"] | Table | None = None,
        trials: Float[Tensor, " P"] | Int[Tensor, " P"] | Table | None = None,
        limits: Float[Tensor, " P"] | Table | None = None,
    ) -> Distribution:
        """Predictive distribution of y at new points, batch shape (P,), or (T, P) for T outputs.

        That of ``CoregionalizedLOO`` is joint over the outputs of a point: batch shape (P,), event shape (T,), so that
        its mean is (P, T).

        Args:
            x_new: new inputs.
            num_neighbors: as in :meth:`forward`.
            samples: as in :meth:`forward`; the result is then the mixture over the draws.
            offset: as in :meth:`forward`.
            trials: numbers of trials at the new points, of ``Binomial()``; None is one each.
            limits: limits of detection at the new points, of ``Censored()``; None predicts values that nothing limits.

        Returns:
            The marginal of the likelihood, f integrated out.

        Raises:
            ValueError, TypeError: as in :meth:`forward`, and if the model has no likelihood.
        """
        if self.likelihood is None:
            where, cure = f"{type(self).__name__}.predict", "Call the model for the moments of f instead."
            fail(where, "a likelihood", "in the model", None, cure)
        if self.shard is not None and self.predicts_from_rows:
            near = self._near("predict", x_new, num_neighbors)
            by_row = {"offset": offset, "trials": trials, "limits": limits}
            return near[0].predict(x_new, num_neighbors=near[1], samples=samples, **by_row)
        added = self.new_offset("predict", x_new, offset)
        each = self.new_by_row(x_new, trials, limits)

        def finish(loc: Tensor, spread: Tensor) -> Distribution:
            return self.predictive_of_moments(loc, spread, added, each)

        found = self._at_draws("predict", x_new, num_neighbors, samples, self.predictive_moments, finish)
        return found[0] if samples is None else Mixture(found)

    @pyro_entry
    def joint(
        self,
        x_new: Float[Tensor, "... q D"],
        *,
        num_neighbors: int | None = None,
        fantasies: Fantasies | None = None,
    ) -> tuple[Float[Tensor, "... q"], Float[Tensor, "... q q"]]:
        r"""Joint posterior of f at sets of a few points: means and covariance matrices, differentiable in `x_new`.

        Of methods with Gaussian observations or pseudo-observations of one output, at the present hyperparameters (with
        priors, the median of their guide). Coefficients of the mean whose joint posterior the method has are integrated
        over. For many points at once take :meth:`sample`.

        Args:
            x_new: sets of q points; each set is predicted jointly, from the neighbors of all its points.
            num_neighbors: as in :meth:`forward`.
            fantasies: observations to condition on in addition, with batch dimensions that broadcast against those of
                `x_new`.

        Returns:
            Means (\*B, q) and covariances (\*B, q, q).

        Raises:
            ValueError, TypeError: for malformed arguments, several outputs, or a method without such observations.

        Cost: O((q K)^3) for each set.
        """
        where = f"{type(self).__name__}.joint"
        if self.latent_shape:
            fail(where, "method", "with one output", self.latent_shape, "Build one model per output.")
        if fantasies is not None and not isinstance(self.likelihood, Gaussian):
            cure = "Condition on one set of observations: condition_on."
            fail(where, "fantasies", "of a Gaussian likelihood", type(self.likelihood).__name__, cure, TypeError)
        check_tensor(where, "x_new", x_new)
        if x_new.dim() < 2:
            fail(where, "x_new", "of shape (..., q, D)", tuple(x_new.shape), "Use x_new[None] for a single point.")
        flat = x_new.reshape(-1, x_new.shape[-1])
        if self.shard is not None and self.predicts_from_rows:
            view, k = self._near("joint", flat, num_neighbors)
            return view.joint(x_new, num_neighbors=k, fantasies=fantasies)
        self._check_new("joint", flat)
        self._place_medians()
        k = self.neighbors_or_default(num_neighbors)
        near = union_of(self.plan(flat.detach(), k).reshape(*x_new.shape[:-2], -1))
        rows, places = distinct_rows(near.clamp(min=0))
        residual, noise = (value.expand(len(rows))[places] for value in self.residuals(rows))
        points, real = self.x[near.clamp(min=0)], near >= 0
        if fantasies is not None:
            batch = torch.broadcast_shapes(x_new.shape[:-2], fantasies.x.shape[:-2])
            x_new, more = (v.expand(*batch, *v.shape[-2:]) for v in (x_new, fantasies.x))
            x_new, points = torch.cat([x_new, more], -2), points.expand(*batch, *points.shape[-2:])
        weights, cov = joint_posterior(bind(self.kernel), x_new, points, noise, real, self.jitter)
        loc = self._mean_at_sets(x_new) + (weights @ residual[..., None])[..., 0]
        if self._has_posterior:
            mean = cast(LinearMean, self.mean)
            root = (self._basis_at_sets(x_new) - weights @ self._basis_at_sets(points)) @ mean.posterior_tril.to(loc)
            cov = cov + root @ root.mT
        if fantasies is None:
            return loc, cov
        added = cast(Gaussian, self.likelihood).variance.to(loc).expand(fantasies.x.shape[:-1])
        return condition_on_last(loc, cov, fantasies.y, added)

    def _near(
        self, method: str, x_new: Tensor, num_neighbors: int | None, jointly: bool = False
    ) -> tuple["PredictiveMethod", int]:
        """A copy on the rows near new points of this process, and the number of neighbors.

        With `jointly` these may also be other new points, and the rows are in a graph.
        """
        self._check_new(method, x_new)
        k = self.neighbors_or_default(num_neighbors)
        return self.near(x_new, min(k, self.num_rows) if jointly else k, jointly), k

    def _mean_at_sets(self, x: Float[Tensor, "... q D"]) -> Float[Tensor, "... q"]:
        return self._mean_at(x.reshape(-1, x.shape[-1])).reshape(x.shape[:-1])

    def _basis_at_sets(self, x: Float[Tensor, "... q D"]) -> Float[Tensor, "... q p"]:
        return cast(LinearMean, self.mean).basis(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    @property
    def _has_posterior(self) -> bool:
        """Whether the coefficients of the mean have a joint posterior."""
        return isinstance(self.mean, BasisMean) and self.mean.has_posterior

    def prediction_neighbors(self) -> int:
        """The default number of neighbors in predictions."""
        self.undefined("prediction_neighbors")

    def neighbors_or_default(self, num_neighbors: int | None) -> int:
        """The number of neighbors that predictions take where `num_neighbors` may be None."""
        return self.prediction_neighbors() if num_neighbors is None else num_neighbors

    def neighbors_of_draws(self, num_neighbors: int | None) -> int | None:
        """The number of neighbors that predictions at posterior draws take; None is that of other predictions."""
        return num_neighbors

    def residuals(self, rows: Int[Tensor, " U"]) -> tuple[Float[Tensor, "*L U"], Float[Tensor, "*L U"]]:
        """Gaussian observations of f at some rows of the data, less the mean function, and their noise variances."""
        cure = "Take a method such as Vecchia or VNNGP."
        fail(type(self).__name__, "method", "with Gaussian observations of f at the data", "another", cure, TypeError)

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
        offset: Float[Tensor, "P *L"] | Table | None = None,
    ) -> Float[Tensor, "S *L P"]:
        """Joint posterior draws of f at new points, correlated within a draw.

        Args:
            x_new: new inputs.
            num_samples: S.
            num_neighbors: neighbors per new point, among the points that the method conditions on and the new ones;
                None is the method's choice.
            seed: makes the draws reproducible and leaves the global random state alone; None uses the global state.
            samples: as in :meth:`forward`; evenly spaced draws are used, some repeatedly if there are fewer than S.
            offset: as in :meth:`forward`.

        Raises:
            ValueError, TypeError: as in :meth:`forward`.

        Cost: once for all draws, or for each draw where hyperparameters differ between them, several at once where the
        method can.
        """
        self._check_sample(x_new, num_samples, seed)
        if self.shard is not None and self.predicts_from_rows:
            near, k = self._near("sample", x_new, num_neighbors, True)
            return near.sample(x_new, num_samples, num_neighbors=k, seed=seed, samples=samples, offset=offset)
        added = self.new_offset("sample", x_new, offset)
        num_neighbors = num_neighbors if samples is None else self.neighbors_of_draws(num_neighbors)
        with seeded(seed, x_new):
            plan = self.joint_plan(x_new, num_neighbors, 0 if seed is None else seed)
            if samples is None:
                counts = self._hyperparameter_draws(num_samples, self._most_draws(len(x_new)))
                draws = [self.joint_draws(x_new, plan, count, None) for count in counts]
            else:
                draws = self._joint_at_draws(f"{type(self).__name__}.sample", x_new, plan, samples, num_samples)
        return torch.cat(draws) + added

    @at_tables
    @pyro_entry
    @torch.no_grad()
    def predictions_by_draw(
        self,
        x_new: Float[Tensor, "P D"] | Table,
        *,
        num_neighbors: int | None = None,
        seed: int = 0,
        offset: Float[Tensor, "P *L"] | Table | None = None,
        trials: Float[Tensor, " P"] | Int[Tensor, " P"] | Table | None = None,
        limits: Float[Tensor, " P"] | Table | None = None,
        from_guide: bool = False,
    ) -> Callable[[Draw], tuple[Tensor, Tensor | None]]:
        """Joint draws of f and y at new points as a function of one posterior draw at a time, for streaming.

        Args:
            x_new: new inputs.
            num_neighbors: as in :meth:`sample`.
            seed: seed of the order of the new points; the draws use the global random state.
            offset: as in :meth:`forward`.
            trials: as in :meth:`predict`.
            limits: as in :meth:`predict`.
            from_guide: whether the posterior draws are from the guide. A method whose sites determine no f at new
                points then draws f from its guide, at the hyperparameters of each draw.

        Returns:
            A function from the values of all sites to f, (*L, P), and y, (*T, P); None for y without a likelihood.

        Raises:
            ValueError, TypeError: as in :meth:`sample`.
        """
        if self.shard is not None and self.predicts_from_rows:
            near, k = self._near("predictions_by_draw", x_new, num_neighbors, True)
            by_row = {"offset": offset, "trials": trials, "limits": limits}
            return near.predictions_by_draw(x_new, num_neighbors=k, seed=seed, from_guide=from_guide, **by_row)
        self._check_new("predictions_by_draw", x_new)
        anew = from_guide and not self.sites_determine_f
        num_neighbors = num_neighbors if anew else self.neighbors_of_draws(num_neighbors)
        plan, added = self.joint_plan(x_new, num_neighbors, seed), self.new_offset("predict", x_new, offset)
        each = self.new_by_row(x_new, trials, limits)
        return lambda draw: self._predictions_at(draw, x_new, plan, added, each, anew)

    @pyro_entry
    @torch.no_grad()
    def _predictions_at(
        self, draw: Draw, x_new: Tensor, plan: Any, added: Tensor, by_row: ByRow, anew: bool
    ) -> tuple[Tensor, Tensor | None]:
        place_hyperparameters(f"{type(self).__name__}.predictions_by_draw", self, draw)
        f = self.joint_draws(x_new, plan, 1, None if anew else draw)[0] + added
        return f, None if self.likelihood is None else self._y_given(f, by_row)

    def _at_draws(
        self,
        method: str,
        x_new: Tensor,
        num_neighbors: int | None,
        samples: Mapping[str, Tensor] | None,
        moments: Moments,
        finish: Callable[[Tensor, Tensor], Result],
    ) -> list[Result]:
        """What `finish` makes of `moments` at new points: under the guide, or at each posterior draw.

        Hyperparameters are placed for both.
        """
        self._check_new(method, x_new)
        num_neighbors = num_neighbors if samples is None else self.neighbors_of_draws(num_neighbors)
        plan, where = self.plan(x_new, num_neighbors), f"{type(self).__name__}.{method}"
        if samples is None:
            self._place_medians()
            return [finish(*moments(x_new, plan, None))]
        with torch.no_grad():
            found = self._moments_at_draws(where, x_new, plan, samples, moments)
            return [finish(*pair) for pair, _ in zip(found, place_draws(where, self, samples), strict=True)]

    def _moments_at_draws(
        self, where: str, x_new: Tensor, plan: Any, samples: Mapping[str, Tensor], moments: Moments
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Moments at each posterior draw, computed for several at once where the method can."""
        most = self.draws_at_once(where, samples, self.draw_entries(len(x_new), plan))
        if most < 2:
            yield from (moments(x_new, plan, draw) for draw, _ in place_draws(where, self, samples))
        elif self.takes_draws_together:
            for draws in place_together(where, self, samples, most, self.num_plates):
                shape = draws.count, *self.latent_shape, len(x_new)
                yield from zip(*(value.expand(shape) for value in moments(x_new, plan, draws)), strict=True)
        else:
            for pairs in map_draws(where, self, samples, most, lambda draw: moments(x_new, plan, draw)):
                yield from zip(*pairs, strict=True)

    def _joint_at_draws(
        self, where: str, x_new: Tensor, plan: Any, samples: Mapping[str, Tensor], total: int
    ) -> list[Tensor]:
        """Joint draws at evenly spaced posterior draws, for several at once where the method can."""
        num_draws = count_draws(where, samples)
        rows = torch.linspace(0, num_draws - 1, total).round().long()
        rows, counts = rows.unique_consecutive(return_counts=True)
        chosen = {name: value[rows.to(value.device)] for name, value in samples.items()}
        most = self.draws_at_once(where, chosen, self.draw_entries(len(x_new), plan))
        if most < 2:
            return [self.joint_draws(x_new, plan, *pair[::-1]) for pair in place_draws(where, self, samples, total)]
        at_draws: Iterator[Tensor]
        if self.takes_draws_together:
            at_draws = (
                self.joint_draws(x_new, plan, int(counts.max()), draws).movedim(1, 0)
                for draws in place_together(where, self, chosen, most, self.num_plates)
            )
        else:
            at_draws = map_draws(
                where, self, chosen, most, lambda draw: self.joint_draws(x_new, plan, int(counts.max()), draw)
            )
        values = (each for found in at_draws for each in found)
        return [found[:count] for found, count in zip(values, counts.tolist(), strict=True)]

    def draw_entries(self, num_new: int, plan: Any) -> int | None:
        """Entries of temporaries of :meth:`moments` or :meth:`joint_draws` at one posterior draw and P new points.

        As many draws are taken at once as memory allows; None takes one after the other.

        Args:
            num_new: P.
            plan: of either method; by default a tensor (P, K), or a tuple that ends in one.
        """
        if not (self.draws_together or self.maps_draws):
            return None
        return (plan[-1] if isinstance(plan, tuple) else plan).numel()

    def plan(self, x_new: Tensor, num_neighbors: int | None) -> Any:
        """Precompute for :meth:`moments` what does not depend on hyperparameters, such as neighbors."""
        self.undefined("plan")

    def moments(self, x_new: Tensor, plan: Any, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """Mean and variance of f, (*L, P) each: under the guide, or given a posterior draw.

        Where a method sets ``draws_together``, `draw` may hold several, and the hyperparameters batch dimensions
        (S, 1, ..), with a 1 for each plate of the model: results are (S, *L, P). With ``maps_draws`` it is always one,
        under ``torch.vmap``.
        """
        self.undefined("moments")

    def predictive_moments(self, x_new: Tensor, plan: Any, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """What :meth:`predictive_of_moments` takes, of :meth:`moments` by default; computed as these are."""
        return self.moments(x_new, plan, draw)

    def predictive_of_moments(self, loc: Tensor, spread: Tensor, added: Tensor, by_row: ByRow) -> Distribution:
        """Predictive distribution of y at the present hyperparameters; `added` is the offset."""
        return self._predictive_of_y(loc + added, spread, by_row)

    def joint_plan(self, x_new: Tensor, num_neighbors: int | None, seed: int) -> Any:
        """Precompute for :meth:`joint_draws` what does not depend on hyperparameters; `seed` orders new points."""
        self.undefined("joint_plan")

    def joint_draws(self, x_new: Tensor, plan: Any, count: int, draw: Draw | None) -> Tensor:
        """Joint draws of f, (count, *L, P): under the guide, or given a posterior draw.

        Where `draw` holds S of them, as of :meth:`moments`, (count, S, *L, P).
        """
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

    def _drawn(self, draw: Draw, site: str, shape: tuple[int, ...]) -> Tensor:
        """The value of a latent site in a posterior draw."""
        where, name = type(self).__name__, self.site(site)
        if name not in draw:
            cure = f"A site that was reparametrized comes from Predictive(model, samples, return_sites=[{name!r}])."
            fail(where, "samples", f"to hold the site {name!r}", sorted(draw), cure)
        value = draw[name]
        first = (draw.count,) if isinstance(draw, Draws) else ()
        own = value.shape[len(first) :]
        while len(own) > len(shape) and own[0] == 1:  # Predictive puts dimensions of one in front
            own = own[1:]
        if own != shape:
            expectation = f"of shape (S, {', '.join(map(str, shape))})"
            cure = "Pass draws of the model on all data, as get_samples() of the run returns them."
            fail(where, f"samples[{name!r}]", expectation, ("S", *own), cure)
        return value.reshape(*first, *shape)

    def _check_neighbors(self, num_neighbors: int | None, limit: int) -> None:
        if num_neighbors is not None:
            check_num_neighbors(type(self).__name__, num_neighbors, limit)
