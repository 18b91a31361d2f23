r"""Control variates at an anchor near the mode: minibatch gradients with less noise.

.. math:: \nabla \hat U(\psi) = \nabla \tilde U(\psi) - \nabla \tilde U(\psi^*) + \nabla U(\psi^*)

with both minibatch gradients on the same rows, and the last one, of all rows, computed once for each anchor
:math:`\psi^*`. The estimate is unbiased for any anchor. Its variance falls with the squared distance from it, which is
of the order of 1/N in a posterior of N data: minibatches of B rows then bring noise of the order of 1/B of what a step
needs, instead of N/B (Baker et al. 2019, section 3). That matters where N/B is large, or the noise of the data tiny.

Differs from the paper: it takes the mode as the anchor, after an optimization. Here anchors are positions of the chain,
from its start on to the middle of burn-in, as of Dubey et al. (2016), and the last one is kept.

Cost: two gradients instead of one, and N/B gradients for each of five anchors.

Reference: Baker, Fearnhead, Fox, Nemeth (2019), "Control variates for stochastic gradient MCMC", Statistics and
Computing; Dubey et al. (2016), "Variance reduction in stochastic gradient Langevin dynamics", NeurIPS.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.inference.mcmc.adaptation import State
from pyro_nngp.inference.mcmc.potential import ModelPotential

_ANCHORS = 8  # equal parts of burn-in; an anchor at the start of each in its first half, and in the middle


class AnchoredPotential(ModelPotential):
    """A potential whose gradients have control variates; arguments are as in the base class.

    Attributes:
        anchor: a position, and the gradient of all rows there; None for plain gradients.

    Raises:
        ValueError: unless the model takes its rows from one :class:`~pyro_nngp.inference.mcmc.minibatch.Minibatch`.
    """

    anchor: tuple[Float[Tensor, "*C d"], Float[Tensor, "*C d"]] | None

    def __init__(
        self, where: str, model: Callable, args: tuple, kwargs: dict, init_strategy: Callable, vectorize: bool = True
    ) -> None:
        self.anchor = None
        super().__init__(where, model, args, kwargs, init_strategy, vectorize)
        if len(self._minibatches) != 1:
            cure = "Pass the index of the rows as a Minibatch(N, B)."
            fail(where, "the model", "with one Minibatch for control variates", len(self._minibatches), cure)

    def state(self, position: Float[Tensor, "*C d"]) -> State:
        return {"anchor": position, "anchor_gradient": torch.zeros_like(position)}

    def gradient(
        self, position: Float[Tensor, "*C d"], params: tuple[Tensor, ...] = ()
    ) -> tuple[Float[Tensor, "*C"], Float[Tensor, "*C d"], list[Tensor | None]]:
        if self.anchor is None:
            return super().gradient(position, params)
        at, whole = self.anchor
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            there = super().gradient(at)[1]
        potential, gradient, by_params = super().gradient(position, params)
        return potential, gradient - there + whole, by_params

    def at_update(self, state: State, update: int, end: int) -> State:
        """Use the anchor of the state; at eighths of the first half of burn-in move it to the present position."""
        every = max(end // _ANCHORS, 1)
        if update % every == 0 and 2 * update <= end:
            position = state["position"]
            state = {**state, "anchor": position, "anchor_gradient": self.whole_gradient(position)}
        self.anchor = state["anchor"], state["anchor_gradient"]
        return state

    def whole_gradient(self, position: Float[Tensor, "*C d"]) -> Float[Tensor, "*C d"]:
        """Gradient of the potential on all rows, minibatch by minibatch."""
        batch, total = self._minibatches[0], torch.zeros_like(position)
        others = [torch.arange(each.size, device=each.device) for each in self._every_batch[1:]]
        for rows in torch.arange(batch.size, device=batch.device).split(batch.batch_size):
            at = position.detach().requires_grad_()
            (part,) = torch.autograd.grad(self._evaluate(at, (rows, *others)).sum(), at)
            total += len(rows) / batch.size * part
        return self._summed([total])[0]
