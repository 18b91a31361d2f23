"""The posterior of a linear model of coregionalization: latent functions u, and outputs f = mu + A u.

Symbols: N sites, D inputs, T outputs, L latent functions, K neighbors, B points, P new points, I scored rows, S draws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_nngp.bound import Bound
from pyro_nngp.coefficients import Trend
from pyro_nngp.conditionals.coregionalized import outputs_of
from pyro_nngp.distributions import NNGP
from pyro_nngp.means import BasisMean
from pyro_nngp.models.base.draws import Draw, drawn_values
from pyro_nngp.models.base.neighbor_choice import typical_noise
from pyro_nngp.models.base.output_arguments import check_loading
from pyro_nngp.models.base.posterior import Posterior
from pyro_nngp.variational.coregionalized import CoregionalizedObservations, given_outputs, given_values

Moments: TypeAlias = tuple[Tensor, Tensor, Tensor]  # loadings (P, T, L), means (L, P) and covariances (P, L, L)

_HELD = 1e-3  # loading of an output whose level is held, on the scale of a link


@dataclass(frozen=True)
class LatentFunctions(Posterior):
    """The latent functions u under q(u), or given their values in a posterior draw; f is A u plus the mean.

    Cost: O(P (K R)^3) for moments with R = min(T, L), O(P K L^2) per joint draw.

    Attributes:
        q: the family.
        draw: values of all sites in one posterior draw, u among them; None integrates over q(u).
        site: name of the site u.
        parameters: what the evidence of pseudo-observations depends on.
        mean: the mean function as a module.
        has_factors: whether the loadings are :class:`~pyro_nngp.loadings.FactorLoadings`.
    """

    q: CoregionalizedObservations
    draw: Draw | None
    site: str
    parameters: Sequence[Tensor]
    mean: Any
    has_factors: bool = False

    def loading(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "#B T L"]:
        """A at points, (B, T, L), or (1, T, L) where it is the same at all."""
        return loading_at(self.bound, x, len(self.q.loc))

    @property
    def u(self) -> Float[Tensor, "L N"]:
        """Values of the latent functions in the draw."""
        assert self.draw is not None
        return drawn_values(self.bound.where, self.draw, self.site, tuple(self.q.loc.shape))

    # Neighbors.

    def enough_neighbors(self) -> int:
        return self.q.enough_neighbors(self)

    joint_follows_moments = True

    def variances(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]) -> tuple[Tensor, Tensor]:
        x, noise = self.rows.x[rows], typical_noise(self.q.observations(self)[1])
        return outputs_of(self.loading(x), *self.q.given_observations(self, x, near))[1], noise

    # Values.

    def latent_moments(self, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P K"]) -> tuple[Tensor, Tensor]:
        """Means (L, P) and covariances (P, L, L) of the latent functions."""
        return self.q.moments(self, x_new, near) if self.draw is None else given_values(self, x_new, near, self.u)

    def find_trend(self) -> Trend | None:
        """None at posterior draws, and with factors, whose coefficients are many and solved for with the loadings."""
        mean = self.bound.mean_function
        return None if self.draw is not None or self.has_factors or mean.has_posterior else self.q.find_trend(self)

    def with_levels(self, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P K"]) -> Moments:
        """Loadings, means and covariances of the latent functions, and of levels, as further ones of variance 1."""
        loading, (loc, cov) = self.loading(x_new), self.latent_moments(x_new, near)
        if self.bound.trend is None or self.draw is not None:
            return loading, loc, cov
        root = self.q.level_roots(self, x_new, near)
        count, pad = root.shape[-1], nn.functional.pad
        own = pad(root.new_ones(count), (len(loc), 0)).diag_embed()  # uncorrelated with the latent functions
        cov = pad(cov, (0, count, 0, count)) + own
        return torch.cat([loading.expand(len(root), -1, -1), root], -1), pad(loc, (0, 0, 0, count)), cov

    def moments(self, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P K"]) -> tuple[Tensor, Tensor]:
        loc, variance = outputs_of(*self.with_levels(x_new, near))
        return self.bound.mean(x_new) + loc, variance

    def joint(self, x_new: Float[Tensor, "P D"], near: tuple[Tensor, Tensor], count: int) -> Float[Tensor, "S T P"]:
        if self.draw is None:
            loc = self.q.moments(self, x_new, near[0])[0]
            u = loc + self.q.joint_deviations(self, x_new, near[1], count)
        else:
            bound, u = self.bound, self.u
            priors = [NNGP(each, self.graph, jitter=bound.jitter) for each in bound.covariances]
            each = zip(priors * len(u) if len(priors) == 1 else priors, u, strict=True)
            new = [prior.sample_new(x_new, row.expand(count, -1), neighbors=near[1]) for prior, row in each]
            u = torch.stack(new, -2)
        loading = self.loading(x_new)
        loading = loading.expand(len(x_new), *loading.shape[1:])
        f = self.bound.mean(x_new) + torch.einsum("ptl,...lp->...tp", loading, u)
        if self.bound.trend is None or self.draw is not None:
            return f
        root = self.q.level_roots(self, x_new, near[0])
        return f + torch.einsum("ptq,sq->stp", root, torch.randn(count, root.shape[-1]).to(root))

    # All outputs at a point.

    def output_covariance(self, x: Float[Tensor, "P D"]) -> Float[Tensor, "P T T"]:
        """Prior covariance of the outputs at each point."""
        loading, variances = self.loading(x), torch.stack([each.diag(x) for each in self.bound.covariances], -1)
        return (loading * variances[:, None]) @ loading.mT

    def joint_outputs(self, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P k"]) -> dist.MultivariateNormal:
        """The joint posterior of all outputs f at each new point, of batch shape (P,) and event shape (T,)."""
        loading, loc, cov = self.with_levels(x_new, near)
        mean = self.bound.mean(x_new) + outputs_of(loading, loc, cov)[0]
        total = loading @ cov @ loading.mT
        variance = total.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(total.dtype).tiny)
        return dist.MultivariateNormal(mean.mT, total + torch.diag_embed(variance * max(self.bound.jitter, 1e-6)))

    def response_given(
        self,
        y: Float[Tensor, "T P"],
        x_new: Float[Tensor, "P D"],
        near: Int[Tensor, "P k"],
        offset: Tensor,
        by_row: Mapping[str, Tensor],
    ) -> Distribution:
        """Predictive distribution of all outputs at new points given some of them there, NaN where not known."""
        mean, (loading, loc, cov) = self.bound.mean(x_new) + offset, self.with_levels(x_new, near)
        likelihood = self.bound.likelihood.for_rows(**by_row)
        likelihood.check(y)
        loc, variance = outputs_of(loading, *given_outputs(likelihood, y, mean, loading, loc, cov))
        return self.response(mean + loc, variance, by_row)

    def entries(self, x_new: Float[Tensor, "P D"], near: Any) -> int | None:
        """None for a function as `mixing`, whose loadings are checked."""
        entries = super().entries(x_new, near)
        return None if entries is None or callable(self.bound.others["mixing"]) else len(self.q.loc) * entries

    # Leave one out.

    def others(self, rows: Int[Tensor, " I"], num_neighbors: int | None) -> tuple[Tensor, Tensor]:
        """The rows, and the nearest others of each."""
        self._check_neighbors(num_neighbors, self.graph.num_points - 1)
        few = min(self.graph.num_points - 1, self.enough_neighbors())
        return rows, self.graph.others(few if num_neighbors is None else num_neighbors, rows)

    def leave_one_out(self, others: tuple[Tensor, Tensor]) -> Float[Tensor, "T I"]:
        """Each output at a site given the pseudo-observations of all others; O(I (K R)^3)."""
        (rows, near), x, data = others, self.rows.x[others[0]], self.rows
        is_solved = self.draw is None and bool(self.q.solved)
        q = self.q if is_solved else self.q.solved_copy(lambda: self)  # pseudo-observations at these hyperparameters
        loc, variance = outputs_of(self.loading(x), *q.given_observations(self, x, near))
        loc = data.mean(self.bound, rows) + loc
        return data.likelihood(self.bound, rows).marginal(loc, variance).log_prob(data.targets(rows))


def loading_at(bound: Bound, x: Float[Tensor, "B D"], num_functions: int) -> Float[Tensor, "#B T L"]:
    """A at points, at one set of hyperparameters; as good as 0 for outputs of which data say nothing, see ``means``."""
    mixing, mean = bound.others["mixing"], bound.mean_function
    if isinstance(mixing, Tensor):
        loading = mixing.to(x.dtype)[None]
        is_held = isinstance(mean, BasisMean) and any(mean.held)
        return torch.where(mean.free(loading)[..., None], loading, _HELD) if is_held else loading
    loading = mixing(x)
    check_loading(bound.where, loading, (len(x), bound.latent_shape[0], num_functions))
    return loading


__all__ = ["LatentFunctions", "loading_at"]
