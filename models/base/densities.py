r"""Gaussian densities of data given their neighbors, and how they change with the hyperparameters.

A conditional density is :math:`N(y_i \mid w_i^\top y_{n(i)}, v_i)`, of data less the mean function. All derivatives are
central differences in double precision.

Cost: O(p B K^3), of forms O(p U^3). Symbols: p hyperparameters, B rows, U of them and their neighbors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.bound import Bound
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.linalg import add_diagonal, cholesky, factor_solve
from pyro_nngp.means import BasisMean
from pyro_nngp.models.base.estimates import Estimates, free_parameters
from pyro_nngp.rows import EVERY

SOME_TOGETHER = 1024
"""Rows around a random one that stand for more."""
_CHUNK = 256  # rows whose covariances of neighbors are held at once


@dataclass(frozen=True)
class Places(Estimates):
    """Some rows of the data with their neighbors.

    Attributes:
        rows: the rows and their neighbors, (U,).
        own: positions of the B rows among them.
        near: positions of the neighbors, (B, K), -1 padded.
    """

    rows: Int[Tensor, " U"]
    own: Int[Tensor, " B"]
    near: Int[Tensor, "B K"]

    @classmethod
    def of(cls, method: Any, rows: Int[Tensor, " B"]) -> "Places":
        """Rows and their neighbors in the graph of a method."""
        batch = method.graph.batch(rows)
        return cls(method, free_parameters(method), batch.rows, batch.targets, batch.neighbors)

    @classmethod
    def around(cls, method: Any) -> "Places":
        """All rows, or those nearest to a random one."""
        n = method.num_data
        if n <= SOME_TOGETHER:
            return cls.of(method, method.rows.every)
        center = torch.randint(n, (1,), generator=torch.Generator().manual_seed(0), device="cpu").to(method.x.device)
        return cls.of(method, method.graph.query(method.x[center], SOME_TOGETHER)[0])


@dataclass(frozen=True)
class Gaussians:
    """The densities of one output, or of all whose noise is the same."""

    places: Places
    output: int

    @cached_property
    def cov(self) -> Float[Tensor, "U U"]:
        """Covariance of the data."""
        return self.covariance(self.places.present)

    def covariance(self, bound: Bound, at: Any = EVERY) -> Float[Tensor, "... U U"]:
        """Covariance of the data at some hyperparameters: of all rows, or of those at sets of positions."""
        x = self._x[at]
        cov = self._kernel(bound)(x, x)
        return add_diagonal(cov, cov.diagonal(dim1=-2, dim2=-1) * bound.jitter + self._noise(bound)[at])

    def conditionals(self, bound: Bound) -> Float[Tensor, "B _"]:
        """Logarithms of the variances of the rows given their neighbors, and the neighbors' weights."""
        places, x, noise = self.places, self._x, self._noise(bound)
        w, var = graph_conditional(self._kernel(bound), x[places.own], x, places.near, noise, bound.jitter)
        return torch.cat([(var + noise[places.own]).log()[:, None], w], 1)

    @cached_property
    def _gain(self) -> tuple[Float[Tensor, "U c"], Float[Tensor, "c U"]]:
        """Factors of X S X' C^-1, which maps data to the generalized least squares estimate of their mean."""
        places, mean = self.places, cast(BasisMean, self.places.present.mean_function)
        root = cast(Tensor, places.root)
        root = root.reshape(-1, *root.shape[-2:])
        white = mean.basis(places.present.inputs(self._x)).double()
        white = white @ root[self.output * len(root) // len(_noises(places, places.present))]
        return white, factor_solve(cholesky(self.cov, 0.0), white).mT

    def without_mean(self, matrix: Float[Tensor, "U U"]) -> Float[Tensor, "U U"]:
        """What becomes of a covariance of the data if the estimate of their mean is subtracted."""
        if self.places.root is None:
            return matrix
        white, gain = self._gain
        left = matrix - white @ (gain @ matrix)
        return left - (left @ gain.mT) @ white.mT

    @cached_property
    def _present(self) -> tuple[Float[Tensor, " B"], Float[Tensor, "B K"]]:
        """Variances of the rows given their neighbors, and the neighbors' weights."""
        present = self.conditionals(self.places.present)
        return present[:, 0].exp(), present[:, 1:]

    @cached_property
    def _derivatives(self) -> tuple[Float[Tensor, "p B"], Float[Tensor, "p B K"]]:
        """Derivatives of the logarithms of the variances, and of the weights."""
        change = torch.stack(list(self.places.changes(self.conditionals)))
        return change[..., 0], change[..., 1:]

    def fisher(self) -> Float[Tensor, "p p"]:
        """The sum of the information of each row given its neighbors."""
        (var, _), (of_var, of_w), places = self._present, self._derivatives, self.places
        total = of_var @ of_var.mT / 2
        if len(places.rows) <= SOME_TOGETHER:
            dense = self._dense(of_w)
            return total + ((dense @ self.cov) / var[:, None]).flatten(1) @ dense.flatten(1).mT
        for some in torch.arange(len(var), device=var.device).split(_CHUNK):
            cov = self.covariance(places.present, places.near[some].clamp(min=0))
            some_w = of_w[:, some] * (places.near[some] >= 0)
            total = total + ((some_w[:, :, None] @ cov)[:, :, 0] / var[some, None]).flatten(1) @ some_w.flatten(1).mT
        return total

    def forms(self) -> list[Float[Tensor, "U U"]]:
        """A for each hyperparameter, with the total score y' A y less its mean, of the rows given their neighbors."""
        (var, w), (of_var, of_w), places = self._present, self._derivatives, self.places
        dense = self._dense(torch.cat([-w[None], of_w]))
        dense[0, torch.arange(len(places.own)), places.own] += 1.0  # residuals are linear in y
        forms = []
        for change, moved in zip(of_var, dense[1:], strict=True):
            form = dense[0].mT @ (dense[0] * (change / (2 * var))[:, None] + moved / var[:, None])
            forms.append((form + form.mT) / 2)
        return forms

    def joint_forms(self) -> list[Float[Tensor, "U U"]]:
        """A for each hyperparameter, of joint densities of the rows and their neighbors, each over their number."""
        places = self.places
        blocks = torch.cat([places.own[:, None], places.near], 1)
        n, size = len(places.rows), blocks.shape[1]
        index = (blocks[:, :, None] * n + blocks[:, None, :]).flatten()
        tril = cholesky(self.cov[blocks[:, :, None], blocks[:, None, :]], 0.0)
        forms = []
        for change in places.changes(self.covariance):
            ratio = factor_solve(tril, change[blocks[:, :, None], blocks[:, None, :]])  # C^-1 dC
            inner = factor_solve(tril, ratio.mT)  # C^-1 dC C^-1
            form = change.new_zeros(n * n).index_add_(0, index, inner.flatten() / (2 * size))
            forms.append(form.reshape(n, n))
        return forms

    def _dense(self, weights: Float[Tensor, "S B K"]) -> Float[Tensor, "S B U"]:
        """Numbers that belong to the neighbors of each row, as dense rows."""
        near, sets = self.places.near, len(weights)
        dense = weights.new_zeros(sets, len(near), len(self.places.rows))
        return dense.scatter_add_(-1, near.clamp(min=0).expand(sets, *near.shape), weights * (near >= 0).to(weights))

    @property
    def _x(self) -> Float[Tensor, "U D"]:
        return self.places.method.x[self.places.rows].double()

    def _kernel(self, bound: Bound) -> Any:
        return bind_double(bound.kernel, self.places.method.x.dtype)

    def _noise(self, bound: Bound) -> Float[Tensor, " U"]:
        return _noises(self.places, bound)[self.output]


def _noises(places: Places, bound: Bound) -> Float[Tensor, "O U"]:
    """Noise variances at the rows, once for all outputs or for each."""
    noise = places.observed(bound).observations(places.rows)[1]
    return noise.reshape(-1, noise.shape[-1])


def each_noise(places: Places) -> Iterator[tuple[Gaussians, int]]:
    """The densities of outputs whose noise differs, and for how many outputs each stands."""
    count = len(_noises(places, places.present))
    for number in range(count):
        yield Gaussians(places, number), places.num_outputs // count


__all__ = ["SOME_TOGETHER", "Gaussians", "Places", "each_noise"]
