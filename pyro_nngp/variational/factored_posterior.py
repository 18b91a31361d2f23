r"""The posterior of a nearest-neighbor prior and pseudo-observations by a sparse Cholesky factor of its precision.

Where the factor is small enough (:mod:`pyro_nngp.linalg.nested_dissection`; in two dimensions up to about 280,000
points, in many up to a few thousand), means, marginal variances, and the evidence with its gradient are exact.
Conjugate gradients on similar precisions, preconditioned by the last factor, take a few iterations.

On one core a factor with moments takes about 10 s and 1 GB for 128,000 points in two dimensions, and 40 s and 2 GB for
250,000. Symbols: N points, K neighbors, L latent functions.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.distributed.table import ShardedGraph
from pyro_nngp.linalg import VecchiaFactor
from pyro_nngp.linalg.coupled_posterior import coupled_elimination
from pyro_nngp.linalg.multifrontal import MultifrontalFactor
from pyro_nngp.linalg.nested_dissection import Elimination, families_of, nested_dissection
from pyro_nngp.neighbors import NeighborGraph

MOST_OPERATIONS = 4e11
"""Most multiplications of a factorization with moments: 12 s on one core."""
_MANY = 95_000  # points: of more points there may be more operations, in proportion
_NEAR = 0.1  # mean difference of logarithms of conditional variances
_ROUNDING = 8  # of values that are the same, in units of their dtype
_MOST_MEMBERS = 6_000_000  # of all families: an order for more takes longer than iterations


def elimination_of(graph: NeighborGraph, num_coupled: int | None = None, larger: float = 1.0) -> Elimination | None:
    """The order of elimination for the posterior precision; None for a factor too large, or several processes.

    Args:
        graph: the points and their neighbors.
        num_coupled: number of latent functions whose sums are observed; None for one that is observed itself.
        larger: times as many operations as usually may be too many.
    """
    families = families_of(graph.neighbors.long())
    if isinstance(graph, ShardedGraph) or (num_coupled or 1) * families.numel() > _MOST_MEMBERS:
        return None
    if num_coupled is not None:
        return coupled_elimination(graph.x, graph.neighbors, num_coupled, larger * MOST_OPERATIONS)
    return nested_dissection(graph.x, [families], larger * MOST_OPERATIONS * max(1.0, len(graph.x) / _MANY))


def same_values(known: Tensor, values: Tensor) -> bool:
    """Whether values are known ones up to rounding in their own dtype."""
    return torch.allclose(known, values.to(known), _ROUNDING * torch.finfo(values.dtype).eps, 0.0)


class FactoredPosterior:
    """The posterior at fixed hyperparameters, for pseudo-observations of changing precisions.

    Args:
        prior: (I - A, V), from :meth:`~pyro_nngp.linalg.VecchiaFactor.prepared`.
        plan: the order of elimination.
    """

    def __init__(self, prior: VecchiaFactor, plan: Elimination) -> None:
        self._prior, self._plan = prior, plan
        self._factors: list[MultifrontalFactor] = []
        self._precision = prior.var.new_empty(0, len(prior))  # of each factor

    def factors(self, precision: Float[Tensor, "*L N"]) -> list[MultifrontalFactor]:
        """A factor for each latent function, or one where the precisions of all are equal; the last ones are kept."""
        each = precision.double().reshape(-1, precision.shape[-1])
        each = each[:1] if torch.equal(each, each[:1].expand_as(each)) else each
        if not torch.equal(self._precision, each):
            self._factors = [self._prior.multifrontal(self._plan, one) for one in each]
            self._precision = each.clone()
        return self._factors

    def variances(self, precision: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        """Marginal variances of u."""
        return self._spread([factor.moments[0] for factor in self.factors(precision)], precision)

    def _spread(self, each: Sequence[Tensor] | Tensor, like: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        """Values of each factor for each latent function."""
        return torch.stack(list(each)).expand(like.shape[:-1].numel(), -1).reshape(like.shape).to(like)

    def factor(self, prior: VecchiaFactor, precision: Float[Tensor, " N"]) -> MultifrontalFactor:
        """A factor for one latent function, one of the present ones where it is the same up to rounding."""
        if self.has_prior(prior):
            for factor, known in zip(self._factors, self._precision, strict=True):
                if same_values(known, precision):
                    return factor
        return prior.multifrontal(self._plan, precision)

    @property
    def has_factors(self) -> bool:
        """Whether :meth:`solve` applies."""
        return bool(self._factors)

    def has_prior(self, prior: VecchiaFactor) -> bool:
        """Whether this is the posterior under a prior."""
        return torch.equal(prior.w, self._prior.w) and torch.equal(prior.var, self._prior.var)

    def is_near(self, prior: VecchiaFactor) -> bool:
        """Whether solutions under another prior are so similar that a few iterations make up for the difference."""
        return float((prior.var / self._prior.var).log().abs().mean()) < _NEAR

    def is_at(self, precision: Float[Tensor, "*L N"]) -> bool:
        """Whether the last factors are for these precisions."""
        each = precision.double().reshape(-1, precision.shape[-1])
        return len(self._factors) in (1, len(each)) and torch.equal(self._precision.expand_as(each), each)

    def solve(self, right: Float[Tensor, "*L N"]) -> Float[Tensor, "*L N"]:
        """Solutions for the precisions of the last factors."""
        if len(self._factors) == 1:
            return self._factors[0].solve(right)
        return torch.stack([factor.solve(part) for factor, part in zip(self._factors, right, strict=True)])


__all__ = ["FactoredPosterior", "elimination_of", "same_values"]
