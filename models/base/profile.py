"""Training with q(u) at its optimum: the largest bound over all q(u), a function of the hyperparameters alone.

Its gradient is the gradient of the bound at that q. Where each step solves for latent values at all rows, steps on
fewer rows get near the optimum in a fraction of the time: a first stage has a quarter of the rows. Stages of stages
have 2,000 rows at least: fewer labels are too weak, and lead astray.

Cost: of a first stage a copy of the rows, and a search for neighbors among them. Symbols: N data.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_nngp.hyperparameters.priors import has_unsolved_priors
from pyro_nngp.variational import ObservedGaussian

_ROWS, _SHARE = 2000, 4  # of a first stage at least, and one of so many


@dataclass(frozen=True)
class Profile:
    """The profile of the bound of a method with pseudo-observations.

    Attributes:
        method: the method.
        in_rounds: whether q(u) is solved for in rounds between steps instead, together with loadings.
    """

    method: Any
    in_rounds: bool = False

    @property
    def applies(self) -> bool:
        """Whether there are pseudo-observations, no priors but of coefficients that are solved for, and a factor."""
        gp = self.method
        if self.in_rounds or not (gp.can_solve and isinstance(gp.q, ObservedGaussian)) or has_unsolved_priors(gp):
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

    @contextmanager
    def first_stage(self) -> Iterator[Any]:
        """A context for ``fit``: a copy to train first, on the first rows of the ordering, or None.

        None if there are few rows, if training does not solve for q(u), or if q(u) has been solved for. At its end the
        method has all of the copy that does not belong to rows: hyperparameters, loadings and coefficients.
        """
        gp = self.method
        if gp.num_data < 2 * _ROWS or not (self.in_rounds or self.applies) or bool(gp.q.solved):
            yield None
            return
        part = gp.subset(gp.graph.order[: max(_ROWS, gp.num_data // _SHARE)])
        yield part
        with torch.no_grad():
            for name, trained in part.named_parameters(recurse=False):
                gp.get_parameter(name).copy_(trained)
        for name, trained in part.named_children():
            if name not in ("graph", *gp._own_state):
                gp.get_submodule(name).load_state_dict(trained.state_dict())


__all__ = ["Profile"]
