"""A program with the values of its hyperparameters set, linearized in the leaves of its Gaussian sites.

Cost: a run of the program, and the Jacobian of the parameters of the data where it is wanted.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nngp.inference._traces import sample_sites
from pyro_nngp.inference.autoguide.discrete_sums import enumerated, summed
from pyro_nngp.inference.autoguide.linear_predictor import Jacobian, run_at_leaves, value_at
from pyro_nngp.inference.autoguide.observations import observed_sites
from pyro_nngp.inference.autoguide.quadratics import Observations


class LinearizedProgram:
    """Runs of a program on the arguments of its first call.

    Args:
        model: the program.
        args: its arguments.
        kwargs: its keyword arguments.
        has_discrete: whether it has discrete latent sites, which are summed out.

    Attributes:
        arguments: `args` and `kwargs`.
    """

    def __init__(self, model: Callable, args: tuple, kwargs: Mapping[str, Any], has_discrete: bool) -> None:
        self.arguments, self._model = (args, kwargs), model
        self._nesting: int | None = None  # dimensions of plates, with discrete sites
        if has_discrete:
            sites = sample_sites(run_at_leaves(model, args, kwargs, {}, {})).values()
            plates = [frame for site in sites for frame in site["cond_indep_stack"] if frame.vectorized]
            self._nesting = max((-frame.dim for frame in plates), default=0)
            self._model = enumerated(model, self._nesting)

    def trace(self, values: Mapping[str, Tensor], leaves: Mapping[str, Tensor], place: Callable = value_at) -> Any:
        """Trace at values of hyperparameters and at leaves, which `place` maps to values of their sites."""
        return run_at_leaves(self._model, *self.arguments, values, leaves, place)

    def linearize(
        self, values: Mapping[str, Tensor], center: Mapping[str, Tensor]
    ) -> tuple[Any, list[Observations], Jacobian]:
        """Trace, observed sites and J at hyperparameters and leaves."""
        trace, observed, leaves = self._observe(values, center)
        with torch.enable_grad():
            return trace, observed, Jacobian(torch.cat([each.phi.flatten() for each in observed]), leaves)

    def observed(self, values: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> list[Observations]:
        """The observed sites at hyperparameters and leaves."""
        return self._observe(values, leaves)[1]

    def phi(self, values: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> Tensor:
        """Parameters phi of the data, in one vector."""
        return torch.cat([each.phi.detach().flatten() for each in self.observed(values, leaves)])

    @torch.enable_grad()
    def _observe(
        self, values: Mapping[str, Tensor], center: Mapping[str, Tensor]
    ) -> tuple[Any, list[Observations], dict[str, Tensor]]:
        """Trace, observed sites, and the leaves on which they depend with gradients."""
        leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in center.items()}
        values = {name: value.detach() for name, value in values.items()}

        def run(*at: Tensor) -> Any:
            trace = self.trace(values, dict(zip(leaves, at, strict=True)))
            return trace if self._nesting is None else summed(trace, self._nesting)

        every = list(leaves.values())
        trace = run(*every)
        return trace, observed_sites(trace, every, run), leaves
