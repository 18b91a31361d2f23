r"""MLL-k: the joint density of each datum and its nearest neighbors (Chen et al. 2020).

Eq. 15 of Jankowiak and Pleiss (2021) takes the joint density of each point and its K nearest others,

.. math:: \log p(y) \approx \frac{1}{K+1} \sum_j \log p(y_j, y_{n(j)}).

Differs from the papers: a mean function; the objective is on the scale of a log density, so that priors on
hyperparameters have their proper weight (eq. 15 without its 1/N would count each datum K+1 times).

Cost per step: O(B K^3), independent of N.
"""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.nn import pyro_method
from torch import Tensor

from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributed import ShardedData
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.linalg import add_diagonal, cholesky
from pyro_nngp.models.base.arguments import smooth_kernel
from pyro_nngp.models.base.information import Information, of_blocks
from pyro_nngp.models.base.neighbor_choice import first_neighbors
from pyro_nngp.models.base.program import Program
from pyro_nngp.models.base.response import ResponseMethod, check_gaussian, count_weights, log_prob_of_rows
from pyro_nngp.neighbors import NearestOthers


class MLLk(ResponseMethod):
    r"""Regression that maximizes the joint log densities of blocks of K+1 neighboring points.

    Pseudo-likelihood, for C the kernel matrix plus noise variances on its diagonal and :math:`b(j) = \{j\} \cup n(j)`:

    .. math:: y_{b(j)} \sim N\big(\mu(x_{b(j)}),\, C_{b(j) b(j)}\big)^{1 / (K+1)}, \quad j = 1..N.

    The site ``y`` holds a batch of blocks, whose product is not a density of y; with K = N-1 each block is all of the
    data, and ``model(idx)`` at any single row is the exact Gaussian process. Sites: ``y`` and one for each
    hyperparameter that has a prior.

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs of similar spread: independent functions of one kernel, and one noise.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern52 with one
            lengthscale per column. Unset hyperparameters start from the data (:mod:`pyro_nngp.starts.from_data`).
        likelihood: Gaussian; None makes one.
        num_neighbors: K; a block has K + 1 points. None is 32, or all others where there are fewer.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None takes the metric of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights: of each row, as in :class:`~pyro_nngp.models.base.Method`.
        seed: seed of the neighbor search.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, K out of range, a likelihood
            that is not Gaussian.

    Reference: Chen, Zheng, Al Kontar, Raskutti (2020), "Stochastic gradient descent in correlated settings: a study on
    Gaussian processes", NeurIPS.
    """

    _default_kernel = staticmethod(smooth_kernel)  # blocks are factorized without compiled code

    @from_tables
    def __init__(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Float[Tensor, "N *T"] | Table,
        kernel: Any = None,
        likelihood: Likelihood | None = None,
        *,
        num_neighbors: int | None = None,
        mean: Callable | None = None,
        jitter: float | None = None,
        metric: Float[Tensor, " *D"] | Callable | None = None,
        start: Any = None,
        offset: Float[Tensor, "N *L"] | Table | None = None,
        weights: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(x, y, kernel, likelihood, mean, jitter, metric, start, offset=offset, weights=weights)
        check_gaussian(self)
        self._start(solves_coefficients=True)
        k = first_neighbors("MLLk", num_neighbors, x)
        self.graph = NearestOthers(x, k, seed=seed, metric=self._neighbor_metric())

    def _distribute(self, data: ShardedData, choose: bool) -> None:
        super()._distribute(data, choose=False)  # K is not chosen

    @pyro_method
    def model(self, idx: Int[Tensor, " I"] | None = None) -> Tensor:
        """The densities of the blocks of a batch of data (None: all); returns their y."""
        program, batch = Program.model(self, idx), self.graph.batch(idx)
        blocks = batch.rows[torch.cat([batch.targets[:, None], batch.neighbors], -1)]
        density, y = _block_density(program, blocks), self.y[blocks]
        data, latents = program.plates
        with poutine.scale(scale=1 / blocks.shape[1]), latents, data:
            count_weights(program, blocks)
            y = y if y.dim() == 2 else y.movedim(-1, 0)
            return pyro.sample(self.site("y"), density, obs=y, infer={"given_data": True})

    @pyro_method
    def guide(self, idx: Int[Tensor, " I"] | None = None) -> None:
        """The guide of the hyperparameters; nothing else is latent."""
        Program.guide(self, idx)

    def _information(self) -> Information | str:
        """Covariance of the estimates of hyperparameters: Godambe's sandwich for the densities of blocks."""
        return of_blocks(self)

    def log_prob(self, batch_size: int = 1024) -> Float[Tensor, ""]:
        """Sum of the log densities that ``model`` gives all rows; arguments as of :meth:`Vecchia.log_prob`."""
        return log_prob_of_rows(self, batch_size)


def _block_density(program: Program, blocks: Int[Tensor, "B K1"]) -> dist.MultivariateNormal:
    """Densities of y at blocks of rows, batch shape (B,) or (T, B)."""
    rows, bound = program.rows, program.bound
    x = rows.x[blocks]
    cov = bound.at_data(x, x)
    likelihood: Any = program.likelihood(blocks)
    noise = likelihood.variance.to(x.dtype)[..., None]
    noise = noise if likelihood.weights is None else noise / likelihood.weights
    added = cov.diagonal(dim1=-2, dim2=-1) * bound.jitter + noise
    mean = rows.mean(bound, blocks.flatten(), x.flatten(0, 1)).unflatten(-1, blocks.shape)
    return dist.MultivariateNormal(mean, scale_tril=cholesky(add_diagonal(cov, added), 0.0))
