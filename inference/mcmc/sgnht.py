r"""Stochastic-gradient Nose-Hoover thermostat (Ding, Fang, Babbush, Chen, Skeel and Neven 2014, algorithm 2).

The friction :math:`\xi` is itself a variable: it grows while the momentum is hotter than T and falls while it is
colder, and so settles at the friction that the unknown noise of the gradient needs, without an estimate of the noise.
With the velocity :math:`v = M^{-1} r`,

.. math::
   v &\leftarrow (1 - \varepsilon \xi) v - \varepsilon M^{-1} \nabla \tilde U(\psi)
      + N(0,\; 2 A \varepsilon T M^{-1}), \qquad \psi \leftarrow \psi + \varepsilon v, \\
   \xi &\leftarrow \xi + \varepsilon (\bar v^\top M \bar v / d - T).

Differs from the paper: a mass M (1 in the paper) and a temperature T; and the thermostat uses the mean :math:`\bar v`
of the velocities before and after the step. The paper uses the velocity after it, which is hotter than the positions by
:math:`1/(1 - \varepsilon\xi/2)`: holding it at T leaves them too cold to first order in epsilon.

The friction stays below :math:`1/\varepsilon`, where a step loses all momentum, so that a start far from the posterior
cannot make it unstable.

There is one thermostat for all coordinates. Differences of gradient noise between coordinates that M does not account
for are balanced only on average.

Cost: one gradient and O(d) per update. Symbols: A diffusion, the rest as in the base module.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_positive
from pyro_nngp.inference.mcmc.adaptation import State, kinetic_temperature
from pyro_nngp.inference.mcmc.schedules import Schedule
from pyro_nngp.inference.mcmc.step_search import MAX_CURVATURE, MAX_NOISE
from pyro_nngp.inference.mcmc.stochastic_gradient import StochasticGradientKernel


class SGNHT(StochasticGradientKernel):
    """Stochastic-gradient Nose-Hoover thermostat for any Pyro model.

    Args:
        model: any Pyro model with continuous latent sites.
        step_size: None finds it. Or epsilon, or a schedule: with ``adapt=False`` it must be well below twice the
            smallest posterior standard deviation.
        diffusion: A > 0, the noise injected per unit of time, and the friction where gradients are exact.
        adapt: estimate M during burn-in for a given step size; False, the default then, keeps M = 1.
        **options: options of :class:`~pyro_nngp.inference.mcmc.stochastic_gradient.StochasticGradientKernel`:
            num_steps, temperature, gradient_noise (for the diagnostics only), optim, control_variates, init_strategy.

    Raises:
        TypeError, ValueError: if an argument has a wrong type or is out of range.

    Cost: one gradient of the model's log density per update.

    Reference: N. Ding, Y. Fang, R. Babbush, C. Chen, R. Skeel, H. Neven (2014), "Bayesian sampling using stochastic
        gradient thermostats".
    """

    def __init__(
        self,
        model: Callable,
        step_size: float | Schedule | None = None,
        *,
        diffusion: float = 1.0,
        adapt: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, adapt=adapt, **options)
        check_positive(self._where, "diffusion", diffusion, "It is the noise injected per unit of time.")
        self.diffusion = diffusion

    def start(self, position: Float[Tensor, "*C d"]) -> State:
        friction = torch.full_like(position[..., :1], self.diffusion)
        return {"velocity": torch.zeros_like(position), "friction": friction}

    def update(
        self, state: State, gradient: Float[Tensor, "*C d"], step_size: float | Tensor, temperature: float
    ) -> State:
        velocity = (
            (1 - step_size * state["friction"]) * state["velocity"]
            - step_size * state["inverse_mass"] * gradient
            + self.inject(state, step_size, temperature)
        )
        heat = kinetic_temperature(state, velocity)[..., None] - temperature
        return {
            "velocity": velocity,
            "position": state["position"] + step_size * velocity,
            "friction": (state["friction"] + step_size * heat).clamp(max=1 / torch.as_tensor(step_size).to(heat)),
        }

    def noise_variance(self, state: State, step_size: float | Tensor, temperature: float) -> Float[Tensor, "*C d"]:
        # The thermostat compensates the noise of the gradient, so A is added to it.
        injected = 2 * self.diffusion * step_size * temperature * state["inverse_mass"]
        return injected + self.gradient_part(state, step_size)

    def find_step_size(self, stiffness: Float[Tensor, "*C 1"], noise: Float[Tensor, "*C 1"]) -> Float[Tensor, "*C 1"]:
        return torch.minimum((MAX_CURVATURE / stiffness).sqrt(), 2 * self.diffusion * MAX_NOISE / noise)
