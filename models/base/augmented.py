r"""The posterior of f where auxiliary variables make the targets Gaussian observations.

With variables :math:`\omega` at their means under q, or under a posterior draw, it is the posterior of
:class:`~pyro_nngp.models.base.posterior.Observed`, with the observations of :mod:`pyro_nngp.likelihoods.augmentation`.

Cost and symbols as in :mod:`pyro_nngp.models.base.posterior`.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._memory import at_once
from pyro_nngp.likelihoods.augmentation import Coupling, predictive, squared_latent
from pyro_nngp.models.base.posterior import Observed
from pyro_nngp.neighbors import Batch
from pyro_nngp.neighbors.choice_of_k import FOR_Y
from pyro_nngp.neighbors.table import distinct_rows
from pyro_nngp.rows import At, Part
from pyro_nngp.variational import conjugate_posterior

_SWEEPS = 8  # of a variable given the others: contracts by a factor of three and more
_PAIR_ENTRIES = 2**23  # of the neighbor covariances of the pairs at once


@dataclass(frozen=True)
class Augmented(Observed):
    """f given the targets of its neighbors, which auxiliary variables make Gaussian observations.

    Attributes:
        coupling: of classes.
        q: q(omega), at whose means the variables are; None for Gaussian data, and at the variables of a draw.
        omega: the variables of a posterior draw at all rows.
        knows_labels: whether the variables of neighbors were computed with labels that must be left out.
    """

    coupling: Coupling = "odds"
    q: Any = None
    omega: Tensor | None = None
    knows_labels: bool = False

    def on(self, part: Part) -> "Augmented":
        posterior, q = super().on(part), copy.copy(self.q)
        if q is not None:
            vars(q).update(self.rows.fetch(part.numbers, q.row_tables()))
        return replace(posterior, q=q)

    def enough_neighbors(self) -> int:
        """Auxiliary variables belong to K neighbors, and are of no use to f with many more: y alone decides."""
        return super().enough_neighbors() if self.q is self.omega is None else self.worthwhile_neighbors(FOR_Y)

    def variables(self, rows: Int[Tensor, " U"]) -> Any:
        """The auxiliary variables of some rows, (U,) or (L, U); None for Gaussian data."""
        if self.q is not None:
            return self.q.distribution(self.rows.likelihood(self.bound, rows), self.rows.targets(rows), rows).mean
        return None if self.omega is None else self.omega[..., rows]

    def observations(self, rows: At) -> tuple[Float[Tensor, "*L U"], Tensor]:
        numbers = self.rows.every if isinstance(rows, slice) else rows
        return self._observed(numbers, self.variables(numbers))

    def squared_latent(self, batch: Batch, idx: Int[Tensor, " B"]) -> Float[Tensor, "*L B"]:
        r""":math:`E f_n^2` of some rows given their data and neighbors, which determines q(omega_n)."""
        loc, var = self.given_neighbors(self.rows.x[idx], batch.rows, batch.neighbors, idx)
        likelihood, y = self.rows.likelihood(self.bound, idx), self.rows.targets(idx)
        return squared_latent(likelihood, y, self.variables(idx), loc, var)

    def response(self, loc: Tensor, spread: Tensor, by_row: Mapping[str, Tensor]) -> Distribution:
        return predictive(self.bound.likelihood.for_rows(**by_row), loc, spread, self.coupling)

    def leave_one_out(self, others: tuple[Tensor, Tensor, Tensor]) -> Float[Tensor, "*T I"]:
        r"""Given the observations of the nearest others; O(I K^3), for labels in one process O(I K^4).

        The auxiliary variable :math:`\omega_m` of a neighbor with n among its neighbors was computed with the label
        :math:`y_n`. For labels it is computed again without (:meth:`variables_without`). Posterior draws of the
        auxiliary variables are taken as they are.
        """
        if not self.knows_labels:
            return super().leave_one_out(others)
        rows, union, places = others
        near = union[places]
        pairs = torch.arange(near.numel(), device=near.device).view(near.shape)
        m = near.flatten()
        return self.log_density(rows, m, pairs, self._observed(m, self.variables_without(rows, near)))

    def variables_without(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]) -> Float[Tensor, "*L P"]:
        r"""Means of the auxiliary variables of the neighbors m of some rows n, each without the datum of its row.

        .. math:: q(\omega_m) = p(\omega_m \mid y_m, c_m), \qquad
           c_m^2 = E\big[f_m^2 \mid y_m, \omega_m, \tilde y_{n(m) \setminus n}\big],

        the update of coordinate ascent (Wenzel et al. 2019, "Efficient Gaussian process classification using
        Polya-Gamma data augmentation", AAAI) until :math:`c_m` stands still, the variables of the other neighbors of m
        being kept. Pairs are in row-major order, P = B K.
        """
        m = near.flatten()
        omega, (union, places) = self.variables(m).clone(), distinct_rows(near)
        of_m = self.graph.others(None, union)[places.flatten()]
        is_n = of_m == rows.repeat_interleave(near.shape[1])[:, None]
        affected = is_n.any(-1).nonzero()[:, 0]
        for pairs in affected.split(at_once(_PAIR_ENTRIES, of_m.shape[1] ** 2)):
            some, (union, places) = m[pairs], distinct_rows(of_m[pairs])
            loc, var = self.given_neighbors(self.rows.x[some], union, torch.where(is_n[pairs], -1, places), some)
            likelihood, y, each = self.rows.likelihood(self.bound, some), self.rows.targets(some), omega[..., pairs]
            for _ in range(_SWEEPS):
                each = conjugate_posterior(likelihood, y, squared_latent(likelihood, y, each, loc, var)).mean
            omega[..., pairs] = each
        return omega


__all__ = ["Augmented"]
