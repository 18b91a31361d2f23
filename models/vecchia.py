r"""Gaussian processes whose likelihood is a product of small conditionals of the data: Vecchia's, and MLL-k.

With Gaussian noise the latent function can be integrated out, which leaves hyperparameters alone. Along an ordering,
n(j) the at most K nearest predecessors (Vecchia 1988; the response model of Datta et al. 2016; eq. 14 of Jankowiak and
Pleiss 2021),

.. math:: \log p(y) = \sum_j \log p(y_j \mid y_{n(j)}),

a proper density, which for K = N-1 is that of the exact Gaussian process. MLL-k (Chen et al. 2020; eq. 15 of Jankowiak
and Pleiss 2021) takes the joint density of each point and its K nearest others instead,

.. math:: \log p(y) \approx \frac{1}{K+1} \sum_j \log p(y_j, y_{n(j)}).

Differs from the papers: a mean function; MLL-k is on the scale of a log density, so that priors on hyperparameters
have their proper weight (eq. 15 without its 1/N would count each datum K+1 times).

Cost per step: O(B K^3), independent of N.
"""

from collections.abc import Callable
from typing import Any, Literal, cast

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from torch import Tensor

from pyro_nngp._checks import check_choice, fail
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.kernels import bind
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.linalg import cholesky
from pyro_nngp.models.base import Draw, ResponseMethod
from pyro_nngp.neighbors import NearestOthers, NeighborGraph, NeighborTable


class Vecchia(ResponseMethod):
    r"""Response nearest-neighbor Gaussian process: regression with Gaussian noise, f integrated out.

    Generative model, for an ordering of the data, C the kernel matrix plus noise variances on its diagonal, and w and v
    the weights and variances that it gives:

    .. math:: y_j \mid y_{n(j)} \sim N\big(\mu(x_j) + w_j^\top (y_{n(j)} - \mu(x_{n(j)})),\, v_j + \sigma^2\big),
       \quad j = 1..N.

    Sites: ``y`` and one for each hyperparameter that has a prior, so NUTS on ``model`` samples the collapsed posterior.
    Under ``objective="mll"`` the site ``y`` holds a batch of blocks of K+1 points instead, whose product is no density
    of y; with K = N-1 each block is all of the data, and ``model(idx)`` at any single row is the exact Gaussian
    process.

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs with independent latent functions.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``.
        likelihood: Gaussian; None makes one.
        num_neighbors: K.
        objective: "vecchia", or "mll" for MLL-k with k = K + 1.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant.
        ordering: "random", "maximin", "coordinate", "given" or a permutation; "mll" has none.
        jitter: relative nugget; None takes 1e-6.
        seed: of the ordering.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, K out of range, a likelihood
            that is not Gaussian.

    Reference: Vecchia (1988), "Estimation and model identification for continuous spatial processes", JRSS B; Chen et
    al. (2020), "Stochastic gradient descent in correlated settings: a study on Gaussian processes", NeurIPS.
    """

    def __init__(
        self,
        x: Float[Tensor, "N D"],
        y: Float[Tensor, "N *T"],
        kernel: Any,
        likelihood: Likelihood | None = None,
        *,
        num_neighbors: int = 32,
        objective: Literal["vecchia", "mll"] = "vecchia",
        mean: Callable | None = None,
        ordering: str | Int[Tensor, " N"] = "random",
        jitter: float | None = None,
        seed: int = 0,
    ) -> None:
        likelihood = Gaussian() if likelihood is None else likelihood
        if not isinstance(likelihood, Gaussian):
            cure = "Use LOO or VNNGP for other data."
            fail("Vecchia", "likelihood", "to be Gaussian", type(likelihood).__name__, cure, TypeError)
        check_choice("Vecchia", "objective", objective, ("vecchia", "mll"))
        super().__init__(x, y, kernel, likelihood, mean, jitter)
        self.objective = objective
        if objective == "mll":
            self.graph: NeighborTable = NearestOthers(x, num_neighbors, seed=seed)
        else:
            self.graph = NeighborGraph(x, num_neighbors, ordering, seed=seed)
        self._finish()

    @pyro_entry
    def model(self, idx: Int[Tensor, " I"] | None = None) -> Tensor:
        """The densities of a batch of data (None: all) given their neighbors, or of its blocks; returns their y."""
        self._start_model(idx)
        batch, (data, latents) = self.graph.batch(idx), self._plates(idx)
        if self.objective == "mll":
            blocks = batch.rows[torch.cat([batch.targets[:, None], batch.neighbors], -1)]
            with poutine.scale(scale=1 / blocks.shape[1]), latents, data:
                return pyro.sample(self._site("y"), self._block_law(blocks), obs=self._block_targets(blocks))
        likelihood = self._bound()
        observations = self._observations(likelihood, batch.rows, None)
        loc, var = self._given_neighbors(self._inputs(idx), batch.rows, batch.neighbors, *observations)
        with latents, data:
            return pyro.sample(self._site("y"), likelihood.marginal(loc, var), obs=self._values(idx))

    @pyro_entry
    def guide(self, idx: Int[Tensor, " I"] | None = None) -> None:
        """The hyperparameters' guide; nothing else is latent."""
        self._start_guide(idx)

    @torch.no_grad()
    def log_prob(self, batch_size: int = 1024) -> Float[Tensor, ""]:
        r"""Log density of all data, with hyperparameters that have a prior at the median of their guide.

        Args:
            batch_size: rows at a time.

        Returns:
            :math:`\log p(y)`; under ``objective="mll"`` the sum of the module's docstring.

        Cost: O(N K^3).
        """
        total = self.x.new_zeros(())
        for idx in torch.arange(self.num_data, device=self.x.device).split(batch_size):
            total = total + self._batch_log_prob(idx)
        return total

    @pyro_entry
    def _batch_log_prob(self, idx: Tensor) -> Tensor:
        self._place_medians()
        site = poutine.trace(self.model).get_trace(idx).nodes[self._site("y")]
        repeats = site["value"].shape[-1] if self.objective == "mll" else 1
        return site["fn"].log_prob(site["value"]).sum() / repeats

    def _observations(
        self, likelihood: Likelihood, rows: Int[Tensor, " U"], draw: Draw | None
    ) -> tuple[Tensor, Tensor]:
        return gaussian_observations(likelihood, self._values(rows), None, self.x.dtype)

    def _block_law(self, blocks: Int[Tensor, "B K1"]) -> dist.MultivariateNormal:
        """Densities of y at blocks of rows, batch shape (B,) or (T, B)."""
        x = self.x[blocks]
        cov = bind(self.kernel)(x, x)
        noise = cast(Gaussian, self._bound()).variance.to(x.dtype)[..., None]
        added = cov.diagonal(dim1=-2, dim2=-1) * self.jitter + noise
        mean = self._mean_at(x.flatten(0, 1)).unflatten(-1, blocks.shape)
        return dist.MultivariateNormal(mean, scale_tril=cholesky(cov + torch.diag_embed(added), 0.0))

    def _block_targets(self, blocks: Int[Tensor, "B K1"]) -> Float[Tensor, "*T B K1"]:
        y = cast(Tensor, self.y)[blocks]
        return y if y.dim() == 2 else y.movedim(-1, 0)
