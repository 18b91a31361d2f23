r"""What the methods share that condition on noisy observations of the neighbors: moments, joint draws, refreshing.

The latent function is integrated out. With targets, or pseudo-observations, :math:`\tilde y` of noise :math:`\delta` at
the training points (:mod:`pyro_nngp.likelihoods.augmentation`), mean function :math:`\mu`, and weights w and variance v
from
:mod:`pyro_nngp.conditionals.nearest_neighbor` with noise :math:`\delta` on the neighbors,

.. math:: f(x) \mid \tilde y_n \sim N\big(\mu(x) + w^\top (\tilde y_n - \mu(x_n)),\; v\big).

Cost: O(B K^3) per batch, for each latent function whose noise differs. Symbols: N data points, U rows of a batch and
its neighbors, B points, K neighbors, P new points, L latent functions.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from pyro import poutine
from torch import Tensor
from torch.nn.functional import pad

from pyro_nngp._checks import fail
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions.nngp import draw_appended
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.kernels import neighbor_lengthscale
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.models.base.predictive import Draw, PredictiveMethod
from pyro_nngp.neighbors import NeighborTable, distinct_rows


class ResponseMethod(PredictiveMethod):
    """A method that predicts f from noisy observations of its neighbors, up to N of them per new point.

    A subclass sets ``graph`` and, where targets are no Gaussian observations themselves, overrides
    :meth:`observations`; ``model`` and ``guide`` are its own.
    """

    graph: NeighborTable

    @pyro_entry
    @torch.no_grad()
    def refresh_neighbors(self) -> None:
        """Find the neighbors again under the kernel's present lengthscales.

        Kernels without one lengthscale per input keep the Euclidean metric.
        """
        self._place_medians()
        self.graph.refresh(neighbor_lengthscale(self.kernel, self.x.shape[1]))

    def plan(self, x_new: Tensor, num_neighbors: int | None) -> Tensor:
        """Rows of the nearest training points."""
        self._check_neighbors(num_neighbors, self.num_data)
        return self.graph.query(x_new, num_neighbors)

    def moments(self, x_new: Tensor, plan: Tensor, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """O(P K^3) for each latent function whose noise differs."""
        rows, positions = distinct_rows(plan)
        observations = self.observations(self._bound(), rows, draw)
        loc, var = self._given_neighbors(x_new, rows, positions, *observations)
        return loc, var.expand(loc.shape)

    def joint_plan(self, x_new: Tensor, num_neighbors: int | None, seed: int) -> Tensor:
        """The nearest training points and earlier new points."""
        self._check_neighbors(num_neighbors, self.num_data + len(x_new) - 1)
        return self.graph.extend(x_new, num_neighbors, seed)[1]

    def joint_draws(self, x_new: Tensor, plan: Tensor, count: int, draw: Draw | None) -> Tensor:
        """Each new value given the observations and the earlier new values nearest to it; O(P K^3), O(P K) per draw."""
        every = torch.arange(self.num_data, device=self.x.device)
        obs, noise = self.observations(self._bound(), every, draw)
        deviation = draws_given_observations(
            self.kernel, self.x, x_new, plan, obs - self._mean_at(self.x), noise, count, self.latent_shape, self.jitter
        )
        return deviation + self._mean_at(x_new)

    def _bound(self) -> Likelihood:
        """The likelihood with its hyperparameters read."""
        return cast(Likelihood, self.likelihood).bind()

    def _values(self, rows: Tensor | None = None) -> Tensor:
        """y at some rows (None: all), outputs first."""
        return cast(Tensor, self._targets(rows))

    def observations(self, likelihood: Likelihood, rows: Int[Tensor, " U"], draw: Draw | None) -> tuple[Tensor, Tensor]:
        """Gaussian observations of f at some rows, (*L, U), and their noise variances, (U,) or (L, U).

        They are under the guide of what makes them Gaussian, or given a posterior draw.
        """
        raise NotImplementedError

    def _given_neighbors(
        self, x: Tensor, rows: Tensor, neighbors: Tensor, obs: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Moments of f at x, (*L, B) and (B,) or (L, B), given observations at `rows`; `neighbors` are their places."""
        near = self.x[rows]
        w, var = graph_conditional(self.kernel, x, near, neighbors, noise, self.jitter)
        residual = obs - self._mean_at(near)
        return self._mean_at(x) + (w * residual[..., neighbors.clamp(min=0)]).sum(-1), var


class GaussianResponseMethod(ResponseMethod):
    """A method for Gaussian noise whose model has no latent values: f is integrated out, hyperparameters remain.

    A subclass sets ``graph``, calls :meth:`finish`, and defines ``model`` with the site ``y``.

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs with independent latent functions.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``.
        likelihood: Gaussian; None makes one.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant.
        jitter: relative nugget; None takes 1e-6.

    Raises:
        ValueError, TypeError: as :class:`~pyro_nngp.models.base.GPMethod`, and for a likelihood that is not Gaussian.
    """

    def __init__(
        self,
        x: Float[Tensor, "N D"],
        y: Float[Tensor, "N *T"],
        kernel: Any,
        likelihood: Likelihood | None,
        mean: Callable | None,
        jitter: float | None,
    ) -> None:
        likelihood = Gaussian() if likelihood is None else likelihood
        if not isinstance(likelihood, Gaussian):
            cure = "Use LOO or VNNGP for other data."
            fail(type(self).__name__, "likelihood", "to be Gaussian", type(likelihood).__name__, cure, TypeError)
        super().__init__(x, y, kernel, likelihood, mean, jitter)

    @pyro_entry
    def guide(self, idx: Int[Tensor, " I"] | None = None) -> None:
        """The hyperparameters' guide; nothing else is latent."""
        self.start_guide(idx)

    @torch.no_grad()
    def log_prob(self, batch_size: int = 1024) -> Float[Tensor, ""]:
        r"""Log density of all data, with hyperparameters that have a prior at the median of their guide.

        Args:
            batch_size: rows at a time.

        Returns:
            The sum over all rows of the log density that ``model`` gives them.

        Cost: O(N K^3).
        """
        total = self.x.new_zeros(())
        for idx in torch.arange(self.num_data, device=self.x.device).split(batch_size):
            total = total + self._batch_log_prob(idx)
        return total

    @pyro_entry
    def _batch_log_prob(self, idx: Tensor) -> Tensor:
        self._place_medians()
        trace = poutine.trace(self.model).get_trace(idx)
        trace.compute_log_prob(lambda name, _: name == self.site("y"))
        return trace.nodes[self.site("y")]["log_prob_sum"] * len(idx) / self.num_data  # undo the scale of the plate

    def observations(self, likelihood: Likelihood, rows: Int[Tensor, " U"], draw: Draw | None) -> tuple[Tensor, Tensor]:
        return gaussian_observations(likelihood, self._values(rows), None, self.x.dtype)


def draws_given_observations(
    kernel: Any,
    x: Float[Tensor, "N D"],
    x_new: Float[Tensor, "P D"],
    plan: Int[Tensor, "P K"],
    residual: Float[Tensor, "*L N"],
    noise: Float[Tensor, "*#L N"],
    count: int,
    latent_shape: tuple[int, ...],
    jitter: float,
) -> Float[Tensor, "S *L P"]:
    """Joint draws of a zero-mean process at new points, each given observations and earlier new values near it.

    Args:
        kernel: covariance function.
        x: the observed points.
        x_new: new points.
        plan: from :meth:`~pyro_nngp.neighbors.graph.NeighborGraph.extend`.
        residual: observations less the mean function; one set for each latent function, or for all.
        noise: their noise variances.
        count: S.
        latent_shape: () or (L,).
        jitter: relative nugget.

    Cost: O(P K^3) once for each set of noises, then O(P K) per draw.
    """
    n, (p, k) = len(x), plan.shape
    w, var = graph_conditional(kernel, x_new, torch.cat([x, x_new]), plan, pad(noise, (0, p)), jitter)
    near = pad(residual, (0, p))[..., plan.clamp(min=0)]  # 0 at new points
    loc = (w * near).sum(-1).expand(count, *latent_shape, p).reshape(count, -1, p)
    w, var = w.expand(*latent_shape, p, k).reshape(-1, p, k), var.expand(*latent_shape, p).reshape(-1, p)
    each = [draw_appended(w[i], var[i], plan, loc[:, i], n) for i in range(len(w))]
    return torch.stack(each, 1).reshape(count, *latent_shape, p)
