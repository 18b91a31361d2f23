"""Methods for Gaussian noise whose models have no latent values: f is integrated out.

Cost and symbols: as in :mod:`pyro_nngp.models.tower.response`.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import pyro
import torch
from jaxtyping import Float, Int
from pyro import poutine
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.models.tower.leave_one_out import Draw
from pyro_nngp.models.tower.response import ResponseMethod


class GaussianResponseMethod(ResponseMethod):
    """A method for Gaussian noise whose model has no latent values: only hyperparameters remain.

    A subclass sets ``graph``, calls :meth:`finish`, and defines ``model`` with the site ``y``.

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs of similar spread: independent functions of one kernel, and one noise.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``.
        likelihood: Gaussian; None makes one.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant.
        jitter: relative nugget; None takes 1e-6.
        metric, start, by_row: as :class:`~pyro_nngp.models.tower.GPMethod` takes them.

    Raises:
        ValueError, TypeError: as :class:`~pyro_nngp.models.tower.GPMethod`, and for a likelihood that is not Gaussian.
    """

    vectorizes = draws_together = True

    def __init__(
        self,
        x: Float[Tensor, "N D"],
        y: Float[Tensor, "N *T"],
        kernel: Any,
        likelihood: Likelihood | None,
        mean: Callable | None,
        jitter: float | None,
        metric: Any = None,
        start: Any = None,
        **by_row: Tensor | None,
    ) -> None:
        super().__init__(x, y, kernel, likelihood, mean, jitter, metric, start, **by_row)
        if not isinstance(self.likelihood, Gaussian):
            cure = "Use LOO or VNNGP for other data."
            fail(type(self).__name__, "likelihood", "to be Gaussian", type(self.likelihood).__name__, cure, TypeError)

    @pyro_entry
    def guide(self, idx: Int[Tensor, " I"] | None = None) -> None:
        """The guide of the hyperparameters; nothing else is latent."""
        self.start_guide(idx)

    def count_weights(self, rows: Int[Tensor, " I"] | Int[Tensor, "I K"]) -> None:
        r"""A site for the factor by which a normal density to the power w is not one with noise :math:`\sigma^2 / w`.

        .. math:: N(y \mid f, \sigma^2)^w = (2\pi\sigma^2)^{(1 - w) / 2}\, w^{-1/2}\, N(y \mid f, \sigma^2 / w)
        """
        if self.weights is None:
            return
        w, variance = self.weights[rows], cast(Gaussian, self._bound()).variance
        variance = variance if rows.dim() == 1 else variance[..., None]
        factor = ((1 - w) * (2 * math.pi * variance.to(w)).log() - w.log()) / 2
        pyro.factor(self.site("weights"), factor if rows.dim() == 1 else factor.sum(-1))

    @property
    def can_solve(self) -> bool:
        """Whether :meth:`solve` applies: the mean is linear in its parameters, which have no prior."""
        return self.can_solve_mean

    def solve(self) -> None:
        """Solve for the mean; see :meth:`solve_mean`."""
        self.solve_mean()

    def solved_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that :meth:`solve` sets."""
        return self._solved_mean()

    @torch.no_grad()
    def log_prob(self, batch_size: int = 1024) -> Float[Tensor, ""]:
        r"""Log density of all data, with hyperparameters that have a prior at the median of their guide.

        Args:
            batch_size: number of rows at a time.

        Returns:
            The sum over all rows, of all processes, of the log density that ``model`` gives them.

        Cost: O(N K^3).
        """
        total = self.x.new_zeros(())
        for idx in torch.arange(self.num_data, device=self.x.device).split(batch_size):
            total = total + self._batch_log_prob(idx)
        return total if self.shard is None else self.shard.world.sum(total)

    @pyro_entry
    def _batch_log_prob(self, idx: Tensor) -> Tensor:
        self._place_medians()
        trace = poutine.trace(self.model).get_trace(idx)
        sites = [name for name in (self.site("y"), self.site("weights")) if name in trace.nodes]
        trace.compute_log_prob(lambda name, _: name in sites)
        total = sum(trace.nodes[name]["log_prob_sum"] for name in sites)
        return total * len(idx) / self.num_data  # undo the scale of the plate

    def observations(self, likelihood: Likelihood, rows: Int[Tensor, " U"], draw: Draw | None) -> tuple[Tensor, Tensor]:
        return gaussian_observations(likelihood, self._values(rows), None, self.x.dtype)
