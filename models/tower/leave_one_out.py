r"""Leave-one-out predictive densities of the data, with latent values integrated out.

.. math:: \log p(y_i \mid y_{-i}, \theta), \qquad i = 1..N

at hyperparameters :math:`\theta`. Over posterior draws of them, the weights that leave out a datum are

.. math:: p(\theta \mid y_{-i}) \propto \frac{p(\theta \mid y)}{p(y_i \mid y_{-i}, \theta)},

which is what ``az.loo`` computes if these densities are the log likelihood, however the data depend on each other
(Vehtari et al. 2016, section 3.6; Burkner, Gabry, Vehtari 2021). Densities given a draw of the latent values are no
substitute: the draws depend on y_i, and one weight per draw has to account for all latent values at once.

Cost: that of the method's :meth:`LeaveOneOutMethod.leave_one_out`, once or per posterior draw. Symbols: N data, I
requested rows, T outputs, S draws, L latent functions.

Reference: Burkner, Gabry, Vehtari (2021), "Efficient leave-one-out cross-validation for Bayesian non-factorized normal
and Student-t models", Computational Statistics.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import check_batch, fail, undefined
from pyro_nngp._memory import at_once
from pyro_nngp.hyperparameters import place_draws, pyro_entry
from pyro_nngp.hyperparameters.priors import (
    count_draws,
    map_draws,
    modules_with_priors,
    place_hyperparameters,
    place_together,
)
from pyro_nngp.kernels import Kernel
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.means import ConstantMean
from pyro_nngp.models.tower.method import GPMethod

Draw: TypeAlias = Mapping[str, Tensor]
"""Values of all sites in one posterior draw."""

Densities: TypeAlias = Callable[[Draw | None], Tensor]
"""Log densities at the hyperparameters that have been set: under the guide, or given a posterior draw."""


_ENTRIES = 2**22  # entries of temporaries of several posterior draws that are held at once


class LeaveOneOutMethod(GPMethod):
    """A method that predicts each datum from all others; a subclass defines :meth:`leave_one_out`.

    Attributes:
        loo_kind: description of the densities, for exports.
        draws_together: whether predictions take several posterior draws at once, as batch dimensions.
        maps_draws: whether they take one draw, and run under ``torch.vmap``.
    """

    loo_kind: str = "leave-one-out, latent values integrated out"
    draws_together = maps_draws = False

    @property
    def takes_draws_together(self) -> bool:
        """Whether predictions take several posterior draws at once, with the priors that the model has."""
        known = Kernel, Likelihood, ConstantMean
        parts = (part for part in modules_with_priors(self) if part is not self)
        return self.draws_together and all(isinstance(part, known) for part in parts)

    @property
    def takes_draws_mapped(self) -> bool:
        """Whether several posterior draws go through ``torch.vmap``, with the priors that the model has.

        Parts with priors that are not of this package may look at values, and get one draw after the other.
        """
        return self.maps_draws and all(is_ours(part) for part in modules_with_priors(self))

    def draws_at_once(self, where: str, samples: Mapping[str, Tensor], entries: int | None) -> int:
        """How many posterior draws are taken at once, if one of them needs temporaries of so many entries; None: one.

        Raises:
            ValueError, TypeError: for malformed samples.
        """
        can = entries is not None and self.shard is None and (self.takes_draws_together or self.takes_draws_mapped)
        return min(count_draws(where, samples), at_once(_ENTRIES, cast(int, entries)) if can else 1)

    def loo_entries(self, rows: Int[Tensor, " I"] | None, num_neighbors: int | None) -> int | None:
        """Entries of temporaries at one posterior draw, where densities take several draws at once; else None."""
        return None

    @property
    def has_loo(self) -> bool:
        """Whether the method defines :meth:`leave_one_out` and has a likelihood."""
        return self.likelihood is not None and type(self).leave_one_out is not LeaveOneOutMethod.leave_one_out

    @pyro_entry
    @torch.inference_mode(False)  # sites come from gradients
    @torch.no_grad()
    def loo(
        self,
        idx: Int[Tensor, " I"] | None = None,
        *,
        num_neighbors: int | None = None,
        samples: Mapping[str, Tensor] | None = None,
    ) -> Float[Tensor, "... I"]:
        """Log density of each datum given all others, with latent values integrated out.

        The sum estimates the log density of N new data if hyperparameters are few relative to the data. Neighbors and
        inducing points are not changed.

        Args:
            idx: rows of the data; None is all. On several processes own rows, different ones on each; all processes
                must call it at the same time.
            num_neighbors: neighbors of each datum, among the others; None is the method's choice. Methods with inducing
                points take None.
            samples: posterior draws of the hyperparameters, such as ``mcmc.get_samples()``. None takes the
                present hyperparameters, and those with priors at the median of their guide.

        Returns:
            Log densities (I,), (T, I) for T outputs with independent latent functions; with S posterior draws one such
            tensor for each, draws first, as Pareto-smoothed importance sampling takes them.

        Raises:
            ValueError, TypeError: for malformed rows, a number of neighbors out of range, a model without likelihood,
                or a hyperparameter that is missing in `samples`.

        Cost: O(N K^3), for latent values under a likelihood that is not Gaussian per natural-gradient step;
        O(N M^2 + M^3) with M inducing points. Once, or for each draw; several draws are taken at once by methods that
        condition on observations of the neighbors, and with Gaussian data by those with inducing points.
        """
        view, idx, num_neighbors = self.with_neighbors_of(idx, num_neighbors)
        if view is not self:
            return view.loo(idx, num_neighbors=num_neighbors, samples=samples)
        densities = self._densities(idx, num_neighbors, samples is not None)
        if samples is None:
            self._place_medians()
            return densities(None)
        where = f"{type(self).__name__}.loo"
        most = self.draws_at_once(where, samples, self.loo_entries(idx, num_neighbors))
        if most > 1 and self.takes_draws_together:
            return torch.cat([densities(d) for d in place_together(where, self, samples, most, self.num_plates)])
        if most > 1:
            return torch.cat(list(map_draws(where, self, samples, most, densities)))
        return torch.stack([densities(draw) for draw, _ in place_draws(where, self, samples)])

    @torch.inference_mode(False)
    @torch.no_grad()
    def loo_by_draw(
        self, idx: Int[Tensor, " I"] | None = None, *, num_neighbors: int | None = None, from_guide: bool = False
    ) -> Callable[[Draw], Float[Tensor, "*T I"]]:
        """:meth:`loo` as a function of one posterior draw at a time, for streaming.

        Args:
            idx: rows of the data; None is all.
            num_neighbors: as in :meth:`loo`.
            from_guide: whether the draws are from the method's guide instead of a posterior of its model. Latent values
                other than hyperparameters are then integrated over the guide.

        Raises:
            ValueError, TypeError: as in :meth:`loo`.
        """
        view, idx, num_neighbors = self.with_neighbors_of(idx, num_neighbors)
        if view is not self:
            return view.loo_by_draw(idx, num_neighbors=num_neighbors, from_guide=from_guide)
        densities, found = self._densities(idx, num_neighbors, not from_guide), None

        def at(draw: Draw) -> Tensor:
            nonlocal found
            if found is None or not from_guide or self.hyper_guide.has_sites:
                found = self._densities_at(draw, densities, from_guide)
            return found

        return at

    def with_neighbors_of(
        self, idx: Int[Tensor, " I"] | None, num_neighbors: int | None
    ) -> tuple["LeaveOneOutMethod", Int[Tensor, " I"] | None, int | None]:
        """The method that has the neighbors of some rows: this one, or on several processes a copy.

        Returns:
            The method, the rows as it numbers them, and the number of neighbors.
        """
        return self, idx, num_neighbors

    def leave_one_out(self, rows: Int[Tensor, " I"], num_neighbors: int | None, sampled: bool) -> Densities:
        """A function that computes log densities of some rows of the data; it is called with hyperparameters set.

        Args:
            rows: rows of the data.
            num_neighbors: neighbors of each datum; None is the method's choice.
            sampled: whether hyperparameters come from posterior draws of the model instead of the guide. Where
                :meth:`loo_entries` is a number, the function also takes several, and returns (S, *T, I).
        """
        undefined(self, "leave_one_out", "method", "Define it for loo, or score held-out data.")

    def refuse_neighbors(self, num_neighbors: int | None) -> None:
        """Raise if a number of neighbors is given where densities are from inducing points."""
        if num_neighbors is not None:
            where, cure = f"{type(self).__name__}.loo", "All other data count, through the inducing points."
            fail(where, "num_neighbors", "to be None with inducing points", num_neighbors, cure)

    def scores(self, rows: Tensor, moments: Callable[[Likelihood, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Densities:
        """Log densities of y at some rows from leave-one-out means and variances of f at all rows.

        Args:
            rows: rows of the data.
            moments: maps the likelihood, y (outputs first) and the mean function (of the shape of f) to the moments.
        """
        own, every = slice(self.num_data), torch.arange(self.num_data, device=self.x.device)
        y = cast(Tensor, self._targets(every))

        def densities(draw: Draw | None) -> Tensor:
            likelihood = self.likelihood_at(own)
            mean = self._mean_at(self.x[own], own).expand(*self.latent_shape, -1)
            return likelihood.marginal(*moments(likelihood, y, mean)).log_prob(y)[..., rows]

        return densities

    def _densities(self, idx: Tensor | None, num_neighbors: int | None, sampled: bool) -> Densities:
        where = f"{type(self).__name__}.loo"
        if self.likelihood is None:
            fail(where, "a likelihood", "in the model", None, "Score the whole program.")
        if idx is not None:
            check_batch(where, "idx", idx, self.num_data)
        rows = torch.arange(self.num_data, device=self.x.device) if idx is None else idx
        return self.leave_one_out(rows, num_neighbors, sampled)

    @pyro_entry
    @torch.inference_mode(False)
    @torch.no_grad()
    def _densities_at(self, draw: Draw, densities: Densities, from_guide: bool) -> Tensor:
        place_hyperparameters(f"{type(self).__name__}.loo", self, draw)
        return densities(None if from_guide else draw)


def is_ours(part: object) -> bool:
    """Whether an object's class is of this package, and so known to run under ``torch.vmap``."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]
