r"""Estimates of a stochastic-gradient sampler during burn-in, and its temperatures after burn-in.

Coordinate by coordinate, from the gradient :math:`\nabla` of each update:

- its scale (Springenberg, Klein, Falkner and Hutter 2016, section 4.1): tau, g and V start at 1 and change
  with the rate :math:`r = 1/(\tau + 1)`,

  .. math:: g \leftarrow g + r (\nabla - g), \quad V \leftarrow V + r (\nabla^2 - V), \quad
     \tau \leftarrow 1 + \tau (1 - g^2 / V), \qquad M^{-1} = V^{-1/2},

  where the second half of burn-in leaves out :math:`g^2/V`, so that V ends as a plain mean;

- its variance :math:`\sigma^2` over minibatches at one position: the mean of half the squared difference of two
  independent gradients, over pairs taken in the second half of burn-in.

The mean position c over the second half of burn-in is the center of the configurational temperature.

Differs from the paper: the paper forgets until the end of burn-in. But if gradients are nearly exact, successive ones
are similar, tau falls to 1, and the frozen V would be the square of one gradient. The paper also uses V for
:math:`\sigma^2`, but V includes the variation of the exact gradient along the chain, which is not noise: with full
batches :math:`\sigma^2` is 0 and V is not, and the chain would be too cold.

Cost: O(d). Symbols: M mass, T temperature, d unconstrained dimensions, C chains; a state is a dict of tensors.
"""

from jaxtyping import Float
from torch import Tensor

State = dict[str, Tensor]


def update_scale(state: State, gradient: Float[Tensor, "*C d"], settled: bool) -> State:
    """Update the scale of the gradients; `settled` in the second half of burn-in, without forgetting."""
    rate, forget = 1 / (state["window"] + 1), 0.0 if settled else state["mean"] ** 2 / state["square"]
    square = state["square"] + rate * (gradient**2 - state["square"])
    return {
        "mean": state["mean"] + rate * (gradient - state["mean"]),  # g
        "square": square,  # V
        "window": 1 + state["window"] * (1 - forget),  # tau
        "inverse_mass": square.rsqrt(),  # M^-1
    }


def update_noise(state: State, gradient: Float[Tensor, "*C d"], again: Float[Tensor, "*C d"]) -> State:
    """Update the variance over minibatches from two independent gradients at one position."""
    pairs = state["pairs"] + 1
    change = (0.5 * (gradient - again) ** 2 - state["gradient_variance"]) / pairs
    return {"pairs": pairs, "gradient_variance": state["gradient_variance"] + change}


def update_center(state: State, count: int) -> State:
    """Update the mean position with the `count`-th position."""
    return {"center": state["center"] + (state["position"] - state["center"]) / count}


def configurational_temperature(state: State, gradient: Float[Tensor, "*C d"]) -> Float[Tensor, "*C"]:
    """(psi - c)' grad U / d: a function of the position only, whose mean is T for any c that psi has forgotten."""
    return ((state["position"] - state["center"]) * gradient).mean(-1)


def kinetic_temperature(state: State, velocity: Float[Tensor, "*C d"]) -> Float[Tensor, "*C"]:
    """v' M v / d for the mean v of the velocities before and after a step.

    The velocity after a step is too hot by 1 / (1 - alpha/2) in a chain whose positions have temperature T, alpha
    being the part of the velocity lost per step. The mean of two successive velocities has temperature T, to first
    order in epsilon.
    """
    middle = (state["velocity"] + velocity) / 2
    return (middle**2 / state["inverse_mass"]).mean(-1)
