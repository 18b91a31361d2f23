r"""What the methods share that condition on noisy observations of the neighbors: moments, joint draws, refreshing.

The latent function is integrated out. With targets, or pseudo-observations, :math:`\tilde y` of noise :math:`\delta` at
the training points (:mod:`pyro_nngp.augmentation`), mean function :math:`\mu`, and weights w and variance v from
:mod:`pyro_nngp.conditional` with noise :math:`\delta` on the neighbors,

.. math:: f(x) \mid \tilde y_n \sim N\big(\mu(x) + w^\top (\tilde y_n - \mu(x_n)),\; v\big).

Cost: O(B K^3) per batch, for each latent function whose noise differs. Symbols: N data points, U rows of a batch and
its neighbors, B points, K neighbors, P new points, L latent functions.
"""

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from pyro_nngp._checks import check_num_neighbors
from pyro_nngp.conditional import graph_conditional
from pyro_nngp.distributions.nngp import draw_appended
from pyro_nngp.kernels import neighbor_lengthscale
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.method import GPMethod
from pyro_nngp.module import pyro_entry
from pyro_nngp.neighbors import NeighborGraph


class ResponseMethod(GPMethod):
    """A method that predicts f from noisy observations of its neighbors.

    A subclass sets ``graph`` and, where targets are no Gaussian observations themselves, overrides
    :meth:`_observations`; ``model`` and ``guide`` are its own.
    """

    graph: NeighborGraph

    def forward(
        self, x_new: Float[Tensor, "P D"], num_neighbors: int | None = None
    ) -> tuple[Float[Tensor, "*L P"], Float[Tensor, "*L P"]]:
        """Predictive mean and variance of f at new points, given the nearest training points.

        Args:
            x_new: new inputs.
            num_neighbors: neighbors per new point, up to N; None takes K.

        Returns:
            Mean and variance, (P,), or (L, P) for L latent functions. Hyperparameters with a prior are at the median of
            their guide.

        Cost: O(P K^3), and one neighbor query per point.
        """
        self.hyper_guide.median()
        return self._moments(x_new, self.graph.query(x_new, num_neighbors))

    @pyro_entry
    @torch.no_grad()
    def sample(
        self, x_new: Float[Tensor, "P D"], num_samples: int, num_neighbors: int | None = None, seed: int = 0
    ) -> Float[Tensor, "S *L P"]:
        """Joint predictive draws of f at new points, correlated within a draw.

        New points are drawn one after the other in a random order, each given the observations and the new values at
        its nearest points, so a draw is a smooth function.

        Args:
            x_new: new inputs.
            num_samples: S.
            num_neighbors: neighbors per new point, among training and new points; None takes K.
            seed: of the order in which new points are conditioned on each other.

        Raises:
            ValueError, TypeError: for malformed arguments.

        Cost: O(P K^3) once, or per draw if hyperparameters have priors; O(P K) per draw.
        """
        n, p = self.num_data, len(x_new)
        k = self.graph.num_neighbors if num_neighbors is None else num_neighbors
        check_num_neighbors(f"{type(self).__name__}.sample", k, n + p - 1)
        _, neighbors = self.graph.extend(x_new, k, seed)
        points, every, latents = torch.cat([self.x, x_new]), torch.arange(n, device=self.x.device), self.latent_shape
        draws = []
        for count in self._hyperparameter_draws(num_samples):
            obs, noise = self._observations(self._bound(), every)
            w, var = graph_conditional(self.kernel, x_new, points, neighbors, pad(noise, (0, p)), self.jitter)
            residual = pad(obs - self._mean_at(self.x), (0, p))[..., neighbors.clamp(min=0)]  # 0 at new points
            loc = (w * residual).sum(-1).expand(count, *latents, p).reshape(count, -1, p)
            w, var = w.expand(*latents, p, k).reshape(-1, p, k), var.expand(*latents, p).reshape(-1, p)
            each = [draw_appended(w[i], var[i], neighbors, loc[:, i], n) for i in range(len(w))]
            draws.append(torch.stack(each, 1).reshape(count, *latents, p) + self._mean_at(x_new))
        return torch.cat(draws)

    @pyro_entry
    @torch.no_grad()
    def refresh(self) -> None:
        """Find the neighbors again under the kernel's present lengthscales.

        Kernels without one lengthscale per input keep the Euclidean metric.
        """
        self.hyper_guide.median()
        self.graph.refresh(neighbor_lengthscale(self.kernel, self.x.shape[1]))

    def _moments(self, x_new: Tensor, near: Int[Tensor, "P K"]) -> tuple[Tensor, Tensor]:
        """Moments of f at new points given the observations at the rows `near`, at the present hyperparameters."""
        rows, positions = near.unique(return_inverse=True)
        loc, var = self._given_neighbors(x_new, rows, positions, *self._observations(self._bound(), rows))
        return loc, var.expand(loc.shape)

    def _bound(self) -> Likelihood:
        """The likelihood with its hyperparameters read."""
        return cast(Likelihood, self.likelihood).bind()

    def _values(self, rows: Tensor | None = None) -> Tensor:
        """y at some rows (None: all), outputs first."""
        return cast(Tensor, self._targets(rows))

    def _observations(self, likelihood: Likelihood, rows: Int[Tensor, " U"]) -> tuple[Tensor, Tensor]:
        """Gaussian observations of f at some rows, (*L, U), and their noise variances, (U,) or (L, U)."""
        raise NotImplementedError

    def _given_neighbors(
        self, x: Tensor, rows: Tensor, neighbors: Tensor, obs: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Moments of f at x, (*L, B) and (B,) or (L, B), given observations at `rows`; `neighbors` are their places."""
        near = self.x[rows]
        w, var = graph_conditional(self.kernel, x, near, neighbors, noise, self.jitter)
        residual = obs - self._mean_at(near)
        return self._mean_at(x) + (w * residual[..., neighbors.clamp(min=0)]).sum(-1), var
