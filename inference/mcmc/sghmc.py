r"""Stochastic-gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014), scale-adapted (Springenberg et al. 2016).

Langevin dynamics with mass M, friction C and a gradient with noise of variance :math:`\sigma^2` in each coordinate,
as in Chen et al., equation 13:

.. math::
   \Delta r = -\varepsilon \nabla \tilde U(\psi) - \varepsilon C M^{-1} r + N(0, 2 \varepsilon (C T - \hat B)), \qquad
   \Delta \psi = \varepsilon M^{-1} r

A step adds gradient noise of variance :math:`\varepsilon^2 \sigma^2` to r, which is :math:`2 \varepsilon \hat B` with
:math:`\hat B = \varepsilon \sigma^2 / 2`. The friction is set by the part :math:`\alpha` of the momentum that a step
loses, :math:`\varepsilon C M^{-1} = \alpha` (Springenberg et al., section 4.2, take 0.05). With the velocity
:math:`v = M^{-1} r`, whose distribution :math:`N(0, T M^{-1})` does not depend on the step size, that is

.. math::
   v \leftarrow (1 - \alpha) v - \varepsilon M^{-1} \nabla \tilde U(\psi)
      + N(0,\; 2 \alpha T M^{-1} - \varepsilon^2 M^{-2} \sigma^2), \qquad \psi \leftarrow \psi + \varepsilon v .

Differs from the papers: :math:`\hat B` uses the variance of the gradient over minibatches instead of its second moment
along the chain, see :mod:`pyro_nngp.inference.mcmc.adaptation`. If the gradient brings more noise than the step
needs, none is added, with a warning.

Cost: one gradient and O(d) per update. Symbols: r momentum, v velocity, the rest as in the base module.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_positive
from pyro_nngp.inference.mcmc.adaptation import State
from pyro_nngp.inference.mcmc.schedules import Schedule
from pyro_nngp.inference.mcmc.step_search import MAX_CURVATURE, MAX_NOISE
from pyro_nngp.inference.mcmc.stochastic_gradient import StochasticGradientKernel

Plain = TypeVar("Plain", bound="SGHMC")


class SGHMC(StochasticGradientKernel):
    r"""Stochastic-gradient Hamiltonian Monte Carlo for any Pyro model.

    Example::

        mcmc = MCMC(SGHMC(model), num_samples=400, warmup_steps=1_000)
        mcmc.run(Minibatch(len(y), 1_000))

    Args:
        model: any Pyro model with continuous latent sites.
        step_size: None finds it, in units of the standard deviation in the stiffest direction. Or epsilon, or a
            schedule: with `adapt`, choose it by the "gradient noise share" of the diagnostics, which is proportional to
            its square and should stay below about 0.3; with ``adapt=False`` it must be well below twice the smallest
            posterior standard deviation.
        friction: alpha in (0, 1], the part of the momentum lost per step.
        adapt: estimate M during burn-in; False is the plain sampler of Chen et al. with M = 1.
        **options: options of :class:`~pyro_nngp.inference.mcmc.stochastic_gradient.StochasticGradientKernel`:
            num_steps, temperature, gradient_noise, optim, control_variates, init_strategy.

    Raises:
        TypeError, ValueError: if an argument has a wrong type or is out of range.

    Cost: one gradient of the model's log density per update.

    Reference: T. Chen, E. Fox, C. Guestrin (2014), "Stochastic gradient Hamiltonian Monte Carlo";
        J. T. Springenberg, A. Klein, S. Falkner, F. Hutter (2016), "Bayesian optimization with robust Bayesian neural
        networks".
    """

    def __init__(
        self,
        model: Callable,
        step_size: float | Schedule | None = None,
        *,
        friction: float = 0.05,
        adapt: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, step_size, adapt=adapt, **options)
        check_positive(self._where, "friction", friction, "It is the part of the momentum lost per step.", 1.0)
        self.friction = friction

    def start(self, position: Float[Tensor, "*C d"]) -> State:
        return {"velocity": torch.zeros_like(position)}

    def update(
        self, state: State, gradient: Float[Tensor, "*C d"], step_size: float | Tensor, temperature: float
    ) -> State:
        velocity = (
            (1 - self.friction) * state["velocity"]
            - step_size * state["inverse_mass"] * gradient
            + self.inject(state, step_size, temperature)
        )
        return {"velocity": velocity, "position": state["position"] + step_size * velocity}

    def noise_variance(self, state: State, step_size: float | Tensor, temperature: float) -> Float[Tensor, "*C d"]:
        return 2 * self.friction * temperature * state["inverse_mass"]

    def find_step_size(self, stiffness: Float[Tensor, "*C 1"], noise: Float[Tensor, "*C 1"]) -> Float[Tensor, "*C 1"]:
        return torch.minimum(MAX_CURVATURE / stiffness, 2 * self.friction * MAX_NOISE / noise).sqrt()

    def refined(self: Plain) -> Plain:
        """Copy the kernel with half the step size and the same friction per unit of time."""
        fine = super().refined()
        fine.friction = self.friction / 2
        return fine
