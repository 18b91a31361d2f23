"""The priors of latent functions whose sums are observed, with the operations that the solution for sites needs.

As for one function (:mod:`pyro_nngp.variational.latent_prior`), with the posterior of
:mod:`pyro_nngp.linalg.coupled_posterior`: exact means and covariances where its precision has a factor; elsewhere
conjugate gradients, and covariances given the nearest pseudo-observations.

Symbols: N points, T outputs, L latent functions, C coefficients of the mean functions.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.conditionals.coregionalized import gathered, latent_conditional, outputs_of
from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.coregionalized import NNGPs, whitened_sites
from pyro_nngp.kernels import Covariance
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.linalg.nested_dissection import Elimination
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.factored_posterior import same_values
from pyro_nngp.variational.latent_prior import ACCURACY, LatentPrior

_LEAST = 1e-3  # curvature of the levels, relative to single outputs: data that say less do not move them far


class CoregionalizedPrior(LatentPrior):
    """The priors of the latent functions at fixed hyperparameters.

    Args:
        kernels: bound, one for each latent function or one for all.
        graph: the points and their neighbors.
        jitter: relative nugget.
        loading: at the points, (N, T, L) or (1, T, L).
        seen: which outputs are there, (T, N).
        nearest: rows of the points that the covariances at each point depend on.
        plan: order of elimination for exact means and covariances; beyond 3,000 values None has iterations, and
            covariances from near points.

    Attributes:
        covariance: of the latent functions at each point, (N, L, L), from the last solution.
        factored: the last posterior whose covariances came from a factor.
    """

    covariance: Tensor | None = None
    factored: CoupledPosterior | None = None
    _last: CoupledPosterior | None = None

    def __init__(
        self,
        kernels: Sequence[Covariance],
        graph: NeighborGraph,
        jitter: float,
        loading: Float[Tensor, "#N T L"],
        seen: Tensor,
        nearest: Int[Tensor, "N k"],
        plan: Elimination | None = None,
    ) -> None:
        self._kernels, self._graph, self._jitter, self._nearest, self._plan = kernels, graph, jitter, nearest, plan
        whole = graph.batch()
        priors = [NNGP(kernel, graph, whole, jitter=jitter, validate_args=False) for kernel in kernels]
        self._factors = NNGPs(priors, loading.shape[-1], validate_args=False).factors()
        self._loading, self._seen = loading.detach().expand(graph.num_points, *loading.shape[1:]), seen
        self._none = self.posterior(torch.zeros_like(seen, dtype=torch.float64))

    @property
    def exact(self) -> Any:  # type: ignore[override]
        """The prior itself, if the posterior has a factor."""
        return self if self._none.is_direct else None

    @property
    def variance(self) -> Float[Tensor, "T N"]:
        own = torch.stack([kernel.diag(self._graph.x) for kernel in self._kernels], -1)[:, None]
        return (self._loading.square() * own).sum(-1).mT

    def start(self, f: Float[Tensor, "T N"]) -> Float[Tensor, "L N"]:
        return f.new_zeros(self._loading.shape[-1], f.shape[-1])

    def at(self, u: Float[Tensor, "*S L N"]) -> Float[Tensor, "*S T N"]:
        return self._none.at(u.double()).to(u)

    def divergence(self, loc: Float[Tensor, "L N"]) -> float:
        return float((loc * self._none.prior_product(loc.double())).sum()) / 2

    def posterior_mean(
        self, target: Tensor, precision: Tensor, start: Tensor, tolerance: float, reduction: float
    ) -> Float[Tensor, "L N"]:
        posterior, near = self._posterior_and_near(precision * self._seen)
        return posterior.mean(target.masked_fill(~self._seen, 0.0), start, tolerance, reduction, near).to(start)

    def targets(self, loc: Float[Tensor, "L N"], precision: Tensor, sites: tuple[Tensor, Tensor]) -> Tensor:
        f, (target, before) = self.at(loc), sites
        return f + before / torch.where(self._seen, precision, 1.0) * (target - f)

    @property
    def can_wait(self) -> bool:
        return False

    def posterior_variance(self, precision: Float[Tensor, "T N"]) -> Float[Tensor, "T N"]:
        cov = self.posterior_covariance(precision * self._seen)
        return outputs_of(self._loading, torch.zeros_like(cov[..., 0]).mT, cov)[1]

    def posterior_covariance(self, precision: Float[Tensor, "T N"]) -> Float[Tensor, "N L L"]:
        """Covariances of the latent functions at each point: exact where the precision is factorized."""
        posterior = self.posterior(precision)
        if posterior.is_direct:
            self.factored, self.covariance = posterior, posterior.covariances().to(self._graph.x)
            return self.covariance
        x, near = self._graph.x, self._nearest
        rows, values, _ = whitened_sites(self._loading, torch.zeros_like(precision), precision)
        around, noise = gathered(rows, torch.ones_like(values), near)
        self.covariance = latent_conditional(self._kernels, x, x[near], around, noise, self._jitter)[1]
        return self.covariance

    def level_step(
        self, free: Tensor, loc: Tensor, slope: Tensor, precision: Tensor, limited: bool
    ) -> tuple[Tensor, Tensor]:
        """Solution as for one function; the constants of the outputs that are free are solved for together."""
        slope = slope.masked_fill(~self._seen, 0.0)
        count = len(slope)
        steps = torch.eye(count).to(slope)[free] if free.dim() else torch.ones(1, count).to(slope)
        changes = steps[..., None].expand(-1, *slope.shape)
        gain, curvature = self.coefficients(changes, precision)
        gains = gain.transpose(0, 1)
        scale = curvature.diagonal().clamp(min=torch.finfo(slope.dtype).tiny).rsqrt()
        strengths, axes = torch.linalg.eigh(curvature * scale * scale[:, None])
        gradient = torch.einsum("ctn,tn->c", (changes - self.at(gains)).double(), slope.double())
        gradient = gradient + torch.einsum("cln,ln->c", gains.double(), self._none.prior_product(loc.double()))
        along = axes.mT @ (scale * gradient) / strengths.clamp(min=_LEAST)
        change = (scale * (axes @ along)).to(slope)
        if limited:
            spread = self.variance.mean(-1).sqrt()
            spread = spread[free] if free.dim() else spread.mean()[None]
            change = torch.minimum(torch.maximum(change, -spread), spread)
        return change.new_zeros(free.shape).masked_scatter(free, change), torch.einsum("s,sln->ln", change, gains)

    def coefficients(
        self, basis: Float[Tensor, "C T N"], precision: Float[Tensor, "T N"]
    ) -> tuple[Float[Tensor, "L C N"], Float[Tensor, "C C"]]:
        """As of one function, for changes of all outputs per unit of each coefficient."""
        precision = precision * self._seen
        spread = self.variance.mean().sqrt()  # of the solver's tolerance
        size = (basis.square() * self._seen).mean((1, 2)).sqrt()
        unit = torch.where(size > 0, spread / size, 1.0)[:, None, None].to(basis)
        tolerance = min(1e-3, ACCURACY / self._seen.sum().item() ** 0.5)
        (posterior, near), zero = self._posterior_and_near(precision), self.start(basis[0])
        each = [posterior.mean(change, zero, tolerance, near=near).to(basis) for change in unit * basis]
        gains = torch.stack(each) / unit
        rest, g = (basis - self.at(gains)).double(), gains.double()
        curvature = g.flatten(1) @ self._none.prior_product(g).flatten(1).mT
        curvature = curvature + rest.flatten(1) @ (precision * rest).flatten(1).mT
        return gains.transpose(0, 1), (curvature + curvature.mT) / 2

    def at_loading(self, loading: Float[Tensor, "#N T L"]) -> "CoregionalizedPrior":
        """The same priors with other loadings."""
        new = copy.copy(self)
        new._loading, new._last, new.factored = loading.to(self._loading).expand_as(self._loading), None, None
        new._none = new.posterior(torch.zeros_like(self._seen, dtype=torch.float64))
        return new

    def posterior(self, precision: Float[Tensor, "T N"]) -> CoupledPosterior:
        """The posterior with these precisions; the last one is kept, with what it has factorized."""
        if self._last is None or not torch.equal(self._last.precision, precision.double()):
            self._last = CoupledPosterior(self._factors, self._loading, precision, plan=self._plan)
        return self._last

    def _posterior_and_near(self, precision: Tensor) -> tuple[CoupledPosterior, CoupledPosterior | None]:
        """The posterior, and one with a factor about there; None where it has one itself, or there is none."""
        posterior = self.posterior(precision)
        return posterior, None if posterior is self.factored else self.factored

    def posterior_at(
        self, factors: Sequence[VecchiaFactor], loading: Float[Tensor, "N T L"], precision: Float[Tensor, "T N"]
    ) -> CoupledPosterior:
        """The posterior under any priors and loadings: the last one where it is that, up to rounding."""
        last = self.factored
        if last is not None and same_values(last.precision, precision) and same_values(last.loading, loading):
            pairs = zip(last.factors, factors, strict=True)
            if all(same_values(one.w, other.w) and same_values(one.var, other.var) for one, other in pairs):
                return last
        return CoupledPosterior(factors, loading, precision, plan=self._plan)


__all__ = ["CoregionalizedPrior"]
