r"""Search for scales, step size and thinning during burn-in: by curvature, gradient noise and autocorrelation.

A displacement s changes the gradient of a minibatch by :math:`H s`, with H the mean curvature along s. Two gradients on
the *same* minibatch give this difference almost without gradient noise. Such probes estimate:

- the mass M, :math:`M_i = \operatorname{mean} |(H s)_i| / |s_i|` over random signs of s, where :math:`|s_i|` is the
  present guess :math:`\sqrt{T / M_i}` of the standard deviation, or the length of the next step if that is longer. M is
  positive where H is not, exact where H is diagonal, and has the units of each coordinate (equilibration: Dauphin, de
  Vries and Bengio 2015, "Equilibrated adaptive learning rates for non-convex optimization");
- the stiffness :math:`\lambda`, the largest eigenvalue of :math:`M^{-1/2} H M^{-1/2}`, by power iteration;
- the noise :math:`R = \max_i \sigma_i^2 / (T M_i)` of the gradient in units of the curvature, from the two minibatches
  that a probe and the update itself see at one position.

The first half of burn-in is a search by Langevin steps as long as :math:`\lambda` allows, with probes that are soon
forgotten. In the second half the sampler itself moves, with the step size that follows from :math:`\lambda` and R, and
probes are averaged. The last three eighths give the autocorrelation time, and so the number of updates per draw.

Differs from the paper: means of absolute values, which recover sooner from outliers than means of squares; finite
displacements of the size of the posterior.

Cost: a probe is two gradients; every update of the search has one, and every second update, at most 1,000 of a longer
burn-in, another.
Symbols: T temperature, d unconstrained dimensions, C chains; a state is a dict of tensors.
"""

import torch
from jaxtyping import Float
from pyro.ops.stats import effective_sample_size
from torch import Tensor
from torch.nn.functional import normalize

from pyro_nngp.inference.mcmc.adaptation import State
from pyro_nngp.inference.mcmc.potential import ModelPotential

MAX_CURVATURE = 0.1  # epsilon^2 lambda: makes the variance in the stiffest direction 2.5 % too large
MAX_NOISE = 0.3  # largest part of the noise of a step that may come from minibatches
_STRIDE = 0.5  # step of the search times the stiffness
_MAX_CUTS, _CUT = 12, 0.25  # of a step of the search
_FIRST = 8  # probes of each kind before the first step
_MEMORY = 4  # probes in the memory of the search
_MOST = 1_000  # most probes of a burn-in
_FALLBACK, _MAX_UPDATES = 10, 100  # updates per draw: without an estimate, and at most
_WATCHED, _RECORDS = 32, 1_000  # coordinates and updates, at most, that give the autocorrelation time


def first_scales(potential: ModelPotential, state: State, temperature: float) -> State:
    """Orders of magnitude of the scales before the first step; the search starts from 1 in each coordinate."""
    position = state["position"]
    ones = torch.ones_like(position)
    direction = normalize(torch.randn_like(position), dim=-1)
    scales = {"inverse_mass": ones, "stiffness": ones[..., :1], "direction": direction}
    gradient = torch.zeros_like(position)
    for k in range(_FIRST):
        scales |= _probe_mass(potential, {**state, **scales}, gradient, temperature, min(max(k - 2, 1), _MEMORY))
    for _ in range(_FIRST):
        scales |= _probe_stiffness(potential, {**state, **scales}, gradient, temperature, 1)
    return {**scales, "gradient_variance": state["gradient_variance"]}


def unit_scales(potential: ModelPotential, state: State, temperature: float) -> State:
    """Scales of nearly independent standard normal coordinates: masses of 1, and the stiffness."""
    direction = normalize(torch.randn_like(state["position"]), dim=-1)
    scales = {"inverse_mass": torch.ones_like(direction), "stiffness": torch.ones_like(direction[..., :1])}
    scales |= {"direction": direction, "gradient_variance": state["gradient_variance"]}
    for k in range(_FIRST):
        gradient = potential.gradient(state["position"])[1]
        scales |= _probe_stiffness(potential, {**state, **scales}, gradient, temperature, k + 1)
    return scales


def update_scales(
    potential: ModelPotential,
    state: State,
    gradient: Float[Tensor, "*C d"],
    temperature: float,
    update: int,
    end: int,
    unit: bool = False,
) -> State:
    """Update mass, stiffness and gradient noise at number `update` of `end` updates of burn-in.

    With `unit` masses stay 1: minibatches that see few of many coordinates say nothing of the others.
    """
    every = max(end // _MOST, 2)
    if update % every:
        return {}
    if unit:
        return _probe_stiffness(potential, state, gradient, temperature, _FIRST + update // every)
    averaged = max(update - (end + 1) // 2, 0) // every  # probes of both kinds since the search
    probe = _probe_mass if (update // every) % 2 == 0 else _probe_stiffness
    return probe(potential, state, gradient, temperature, _MEMORY + averaged)


def _probe_mass(potential: ModelPotential, state: State, gradient: Tensor, temperature: float, count: int) -> State:
    mass = state["inverse_mass"].reciprocal()
    step = _STRIDE / state["stiffness"] * gradient.abs() / mass
    signs = 2.0 * torch.randint_like(gradient, 2) - 1
    displacement = signs * torch.maximum((temperature / mass).sqrt(), step)
    again, response = potential.response(state["position"], displacement)
    value = response.abs() / displacement.abs()
    value = torch.where(response == 0, mass, value)  # coordinates that this minibatch does not see
    value = torch.where(value.isfinite(), value.clamp_min(mass / 100), 100 * mass)  # too far: probe nearer
    noise = _update_noise(state, gradient, again, count)
    return {"inverse_mass": (mass + (value - mass) / count).reciprocal(), **noise}


def _probe_stiffness(
    potential: ModelPotential, state: State, gradient: Tensor, temperature: float, count: int
) -> State:
    scale = (temperature * state["inverse_mass"]).sqrt()
    again, response = potential.response(state["position"], state["direction"] * scale)
    image = response * scale / temperature
    value = image.norm(dim=-1, keepdim=True)
    good = value.isfinite() & (value > 0)
    stiffness = state["stiffness"] + (value - state["stiffness"]) / count
    return {
        "stiffness": torch.where(good, stiffness, state["stiffness"]),
        "direction": torch.where(good, image / value, state["direction"]),
        **_update_noise(state, gradient, again, count),
    }


def _update_noise(state: State, gradient: Tensor, again: Tensor, count: int) -> State:
    change = 0.5 * (gradient - again) ** 2 - state["gradient_variance"]
    return {"gradient_variance": state["gradient_variance"] + change / count}


def noise_ratio(state: State, temperature: float) -> Float[Tensor, "*C 1"]:
    """The noise R of the gradient, in the noisiest coordinate."""
    return (state["gradient_variance"] * state["inverse_mass"]).amax(-1, keepdim=True) / temperature


def search(
    potential: ModelPotential, state: State, gradient: Float[Tensor, "*C d"], temperature: float, update: int, end: int
) -> Float[Tensor, "*C d"]:
    """Move by a Langevin step of the search.

    The step is as long as stability allows. In the second half of the search it falls as 1/t, until :data:`MAX_NOISE`
    of the noise comes from minibatches. A step past the minimum along its direction is shortened: where the density is
    nearly log-linear, far out in a tail, the curvature does not tell the distance of the mode.
    """
    longest = _STRIDE / state["stiffness"]
    quiet = torch.minimum(longest, 2 * MAX_NOISE / noise_ratio(state, temperature or 1.0))
    step = torch.maximum(1 / (1 / longest + max(update - end // 4, 0)), quiet) * state["inverse_mass"]
    step = _not_past_minimum(potential, state["position"], gradient, step)
    variance = 2 * step * temperature - step**2 * state["gradient_variance"]
    return state["position"] - step * gradient + variance.clamp_min(0).sqrt() * torch.randn_like(gradient)


def _not_past_minimum(potential: ModelPotential, position: Tensor, gradient: Tensor, step: Tensor) -> Tensor:
    """Shorten a step until the slope along it, on new minibatches, does not change sign."""
    slope = (step * gradient.square()).sum(-1, keepdim=True)
    for _ in range(_MAX_CUTS):
        move = -step * gradient
        _, response = potential.response(position, move)
        change = (response * move).sum(-1, keepdim=True)
        far = ~(change <= slope)  # not finite, too
        if not far.any():
            break
        step, slope = torch.where(far, step * _CUT, step), torch.where(far, slope * _CUT, slope)
    return step


def watch(state: State, update: int, end: int) -> State:
    """Record evenly spaced coordinates in the last three eighths of burn-in."""
    stride = _stride(end)
    if update < end - 3 * end // 8 or update % stride:
        return {}
    position = state["position"]
    d = position.shape[-1]
    some = torch.linspace(0, d - 1, min(d, _WATCHED), device=position.device).long()
    now = position[..., some][None]
    return {"watched": torch.cat([state["watched"].reshape(-1, *now.shape[1:]), now])}


def updates_per_draw(watched: Float[Tensor, "S *C k"], end: int) -> int:
    """Updates per independent draw: the longest integrated autocorrelation time of positions and of their squares."""
    if len(watched) < 2 * _FALLBACK:
        return _FALLBACK
    values = watched.reshape(len(watched), -1, watched.shape[-1])
    values = torch.cat([values, (values - values.mean((0, 1))) ** 2], -1)
    size = effective_sample_size(values, chain_dim=1, sample_dim=0)
    time = float((values[..., 0].numel() / size).nan_to_num(1.0).max())
    return min(max(round(_stride(end) * time), 1), _MAX_UPDATES)


def _stride(end: int) -> int:
    return max(end // _RECORDS, 1)
