"""The largest bound over all q(u), a function of the hyperparameters alone: with q at its optimum for each of them.

Its gradient is the gradient of the bound at that q. Symbols: N data.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_nngp.hyperparameters.priors import has_unsolved_priors
from pyro_nngp.variational import ObservedGaussian


@dataclass(frozen=True)
class Profile:
    """The profile of the bound of a method with pseudo-observations.

    Attributes:
        method: the method.
    """

    method: Any

    @property
    def applies(self) -> bool:
        """Whether there are pseudo-observations, no priors but of coefficients that are solved for, and a factor."""
        gp = self.method
        if not (gp.can_solve and isinstance(gp.q, ObservedGaussian)) or has_unsolved_priors(gp):
            return False
        return gp.q.can_profile(gp.posterior(gp.bound()))

    def optimum(self, tolerance: float = 1e-3, *, keep: bool = False) -> AbstractContextManager[None]:
        """A context with q at its optimum, where the ELBO of all rows, and its gradient, are the largest over all q.

        Args:
            tolerance: as of the method's ``solve``.
            keep: whether to keep the sparse factor until ``solve``: it shortens the next call at other hyperparameters,
                whose results then depend on it within the tolerance.
        """
        gp = self.method
        return gp.q.profiled(lambda: gp.posterior(gp.bound()), tolerance, keep)

    def bound(self) -> Float[Tensor, ""]:
        """The bound of the present q(u) on all rows, with gradients; within :meth:`optimum` the largest."""
        gp = self.method
        bound, batch, rows = gp.bound(), gp.graph.batch(None), gp.rows
        prior = gp._prior(bound, batch)
        q: Any = gp.q.at_batch(gp.posterior(bound), prior)
        likelihood, mean = rows.likelihood(bound), rows.mean(bound)
        loc, variance = q.outputs()
        data = likelihood.expected_log_prob(rows.targets(), mean + loc, variance)
        data = data if likelihood.weights is None else likelihood.weights * data
        return data.sum() - kl_divergence(q, prior.expand(q.batch_shape)).sum()


__all__ = ["Profile"]
