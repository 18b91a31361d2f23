r"""A preconditioner from few points for the posterior of a nearest-neighbor prior and Gaussian observations.

In white coordinates, u = G z with :math:`G = (I - A)^{-1} V^{1/2}`, the posterior precision is
:math:`I + G^\top \mathrm{diag}(\tau)\, G` (:mod:`pyro_nngp.linalg.vecchia_factor`). Its large eigenvalues belong to
smooth functions, which many data determine together and the first points of the ordering describe. A later point only
adds what these leave open, of the small variance :math:`v_j`. So the preconditioner is a matrix of two blocks.

- *Coarse*: the first m points in the order of dependency have all their neighbors among themselves, and so a prior
  :math:`\Lambda_c` of their own. Each other point hands its observation to the first of its neighbors, that one to its
  own, up to a coarse point, which collects the precision :math:`t_i = \tau_i + \sum_j \tau_j / (1 + \tau_j v_j)`. With
  the root :math:`\Lambda_c = R^\top R` the block is :math:`R^{-\top} (\Lambda_c + \mathrm{diag}\, t) R^{-1}`. It is
  solved by a sparse Cholesky factor.
- *Fine*: :math:`1 + v_j \tau_j`, as without a coarse level.

With 10^6 points in the plane, a Matern-3/2 kernel with a lengthscale of a tenth of the square and precisions near 1,
conjugate gradients take 4 iterations in place of 285. In many dimensions few points describe little; then there is no
coarse level.

Cost: of the factor, which has at most N K entries and takes at most 4e10 multiplications (.5 s); O(N) to hand
observations on. Symbols: N points, K neighbors, m coarse points, L right-hand sides.

Reference: Schaefer, Katzfuss, Owhadi (2021), "Sparse Cholesky factorization by Kullback-Leibler minimization", SISC 43,
on the first points of an ordering as the coarse scales of a process.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.linalg.multifrontal import MultifrontalFactor
from pyro_nngp.linalg.nested_dissection import Elimination, families_of, nested_dissection
from pyro_nngp.linalg.nuggets import NotPositiveDefiniteError
from pyro_nngp.linalg.sparse_rows import SparseRows, root_entries

_LEAST, _PART, _MOST = 256, 5, 40_000  # fewest coarse points; one of so many points at most; and most of them
_OPERATIONS = 4e10  # most multiplications of a factor: half a second
_MOST_LEFT = 30.0  # variance at a coarse point given the others, in units of that of the data it stands for
_JUMPS = 5  # doublings of the way to a coarse point: 32 points. Where it is longer, coarse points do not cover the rest


class CoarseLevel:
    """The first points of a graph, found when they are needed.

    Args:
        x: the points.
        neighbors: rows of their neighbors, -1 padded.
    """

    def __init__(self, x: Float[Tensor, "N D"], neighbors: Int[Tensor, "N K"]) -> None:
        self._x, self._neighbors = x, neighbors
        self._found: tuple[_Coarse | None] | None = None

    def preconditioner(
        self,
        order: Int[Tensor, " N"],
        w: Float[Tensor, "N K"],
        var: Float[Tensor, " N"],
        precision: Float[Tensor, "*L N"],
    ) -> Callable[[Tensor], Tensor] | None:
        """Solutions with the preconditioner, for white values in the order of dependency.

        Args:
            order: the points, each after its neighbors; the same at each call.
            w: weights of the conditionals.
            var: their variances; w and var in double precision, by point.
            precision: of the observations, in the order of dependency.

        Returns:
            A function of right-hand sides (*L, N), to which the precisions broadcast. None where few points do not
            stand for the others, or the factor fails in double precision.
        """
        if self._found is None:
            self._found = (_coarse_points(self._x, self._neighbors, order),)
        (coarse,) = self._found
        if coarse is None:
            return None
        m, strength = len(coarse.families), var[order] * precision
        first = order[:m]
        collected = torch.zeros_like(precision[..., :m])
        collected = collected.index_add(-1, coarse.home[m:], (precision / (1 + strength))[..., m:])
        if (collected * var[first]).mean() > _MOST_LEFT:
            return None
        collected = (collected + precision[..., :m]).reshape(-1, m)
        each, which = torch.unique(collected, dim=0, return_inverse=True)
        entries = root_entries(w[first], var[first])
        try:
            factors = [MultifrontalFactor(coarse.plan, [entries], one) for one in each]
        except NotPositiveDefiniteError:
            return None
        root, diagonal = SparseRows(coarse.families, entries).matrix(m), 1 + strength

        def solve(residual: Tensor) -> Tensor:
            solution = residual / diagonal
            right = torch.from_numpy((root.T @ residual[..., :m].reshape(-1, m).numpy().T).T)
            members = which.reshape(precision.shape[:-1]).expand(residual.shape[:-1]).reshape(-1)
            solved = torch.empty_like(right)
            for number, factor in enumerate(factors):
                solved[members == number] = factor.solve(right[members == number])
            solution[..., :m] = torch.from_numpy((root @ solved.numpy().T).T).reshape(*residual.shape[:-1], m)
            return solution

        return solve


class _Coarse(NamedTuple):
    """The coarse points, numbered from 0 in the order of dependency.

    Attributes:
        families: each with its neighbors, (m, K + 1).
        home: number of the one that collects the observation of each point, points in the order of dependency, (N,).
        plan: order of elimination for them.
    """

    families: Int[Tensor, "m k"]
    home: Int[Tensor, " N"]
    plan: Elimination


def _coarse_points(x: Float[Tensor, "N D"], neighbors: Int[Tensor, "N K"], order: Int[Tensor, " N"]) -> _Coarse | None:
    """As many points as may be solved for in the time of a product; None if they are few or do not cover the others."""
    order, neighbors = order.cpu(), neighbors.cpu().long()
    most = min(len(order) // _PART, _MOST)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device="cpu"))
    first = neighbors[order, 0] if neighbors.shape[1] else torch.full_like(order, -1)
    while most >= _LEAST:
        near = neighbors[order[:most]]
        families = families_of(torch.where(near < 0, -1, place[near.clamp(min=0)]))
        plan = nested_dissection(x[order[:most].to(x.device)], [families], _OPERATIONS)
        if plan is not None and plan.entries <= neighbors.numel():
            home = _homes(torch.where(first < 0, -1, place[first.clamp(min=0)]), most)
            return None if home is None else _Coarse(families, home, plan)
        most //= 2
    return None


def _homes(parent: Int[Tensor, " N"], count: int) -> Int[Tensor, " N"] | None:
    """The first ancestor among the first points; None where it is far, or missing."""
    home = torch.cat([torch.arange(count, device="cpu"), parent[count:]])
    for _ in range(_JUMPS):
        if home.min() < 0:
            return None
        home = home[home]
    return home if home.max() < count else None


__all__ = ["CoarseLevel"]
