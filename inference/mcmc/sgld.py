r"""Stochastic-gradient Langevin dynamics (Welling and Teh 2011) and its preconditioned form (Li et al. 2016).

.. math::
   \psi \leftarrow \psi - \varepsilon G \nabla \tilde U(\psi)
      + N(0,\; 2 \varepsilon T G - \varepsilon^2 G^2 \sigma^2)

G is 1, or with `adapt` the diagonal preconditioner :math:`V^{-1/2}` of :mod:`pyro_nngp.inference.mcmc.adaptation`,
which replaces RMSprop in Li et al. As it is frozen after burn-in, their term :math:`\Gamma = \nabla \cdot G`
is exactly 0.

Differs from the papers: epsilon is half of theirs; V forgets at the adaptive rate of SGHMC instead of a fixed one; the
variance of the gradient noise is subtracted from the injected noise, which they do not do (``gradient_noise=0``).

Cost: one gradient and O(d) per update. Symbols as in the base module.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.inference.mcmc.adaptation import State
from pyro_nngp.inference.mcmc.schedules import Schedule
from pyro_nngp.inference.mcmc.step_search import MAX_CURVATURE, MAX_NOISE
from pyro_nngp.inference.mcmc.stochastic_gradient import StochasticGradientKernel


class SGLD(StochasticGradientKernel):
    """Stochastic-gradient Langevin dynamics for any Pyro model; preconditioned with ``adapt=True``.

    Args:
        model: any Pyro model with continuous latent sites.
        step_size: None finds it. Or epsilon, or a schedule: with ``adapt=False`` it must be well below twice the
            smallest posterior variance.
        adapt: estimate the preconditioner G during burn-in for a given step size; False, the default then, keeps G = 1.
        **options: options of :class:`~pyro_nngp.inference.mcmc.stochastic_gradient.StochasticGradientKernel`:
            num_steps, temperature, gradient_noise, optim, control_variates, init_strategy.

    Raises:
        TypeError, ValueError: if an argument has a wrong type or is out of range.

    Cost: one gradient of the model's log density per update.

    Reference: M. Welling, Y. W. Teh (2011), "Bayesian learning via stochastic gradient Langevin dynamics"; C. Li,
        C. Chen, D. Carlson, L. Carin (2016), "Preconditioned stochastic gradient Langevin dynamics for deep neural
        networks".
    """

    def __init__(
        self, model: Callable, step_size: float | Schedule | None = None, *, adapt: bool | None = None, **options: Any
    ) -> None:
        super().__init__(model, step_size, adapt=adapt, **options)

    def start(self, position: Float[Tensor, "*C d"]) -> State:
        return {}

    def update(
        self, state: State, gradient: Float[Tensor, "*C d"], step_size: float | Tensor, temperature: float
    ) -> State:
        drift = -step_size * state["inverse_mass"] * gradient
        return {"position": state["position"] + drift + self.inject(state, step_size, temperature)}

    def noise_variance(self, state: State, step_size: float | Tensor, temperature: float) -> Float[Tensor, "*C d"]:
        return 2 * step_size * temperature * state["inverse_mass"]

    def find_step_size(self, stiffness: Float[Tensor, "*C 1"], noise: Float[Tensor, "*C 1"]) -> Float[Tensor, "*C 1"]:
        return torch.minimum(MAX_CURVATURE / stiffness, 2 * MAX_NOISE / noise)
