"""Updates of a stochastic-gradient sampler: the gradient, adaptation during burn-in, the step and its checks.

The state is a dictionary of tensors, chains in front; symbols: :mod:`pyro_nngp.inference.mcmc.stochastic_gradient`.
"""

import math
from abc import abstractmethod

import torch
from jaxtyping import Float
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from pyro_nngp._checks import fail, warn
from pyro_nngp.inference.mcmc.adaptation import (
    State,
    configurational_temperature,
    kinetic_temperature,
    update_center,
    update_noise,
    update_scale,
)
from pyro_nngp.inference.mcmc.parameters import ParameterOptimizer
from pyro_nngp.inference.mcmc.potential import ModelPotential
from pyro_nngp.inference.mcmc.schedules import Schedule
from pyro_nngp.inference.mcmc.step_search import (
    first_scales,
    noise_ratio,
    search,
    unit_scales,
    update_scales,
    updates_per_draw,
    watch,
)
from pyro_nngp.inference.svi.train_state import DivergenceError

_PAIRS, _PAIR_EVERY = 100, 10  # fewest gradient pairs in burn-in, and most updates per pair


class AdaptiveStep(MCMCKernel):
    """The update of a sampler, and the hooks that a sampler defines; attributes are as in the kernel."""

    step_size: Schedule | None
    num_steps: int | None
    temperature: Schedule
    gradient_noise: float | None
    adapt: bool
    potential: ModelPotential
    _where: str
    _optimized: ParameterOptimizer
    _initial_params: dict[str, Tensor] | None
    _coarse: "AdaptiveStep | None"
    _warmup_end: int
    _starts_near: bool  # whether chains start at draws of a guide, where there is nothing to search

    # Hooks that a sampler defines.

    @abstractmethod
    def start(self, position: Float[Tensor, "*C d"]) -> State:
        """Initialize the sampler's auxiliary variables."""

    @abstractmethod
    def update(
        self, state: State, gradient: Float[Tensor, "*C d"], step_size: float | Tensor, temperature: float
    ) -> State:
        """Make one step; return the changed entries of the state."""

    @abstractmethod
    def noise_variance(self, state: State, step_size: float | Tensor, temperature: float) -> Float[Tensor, "*C d"]:
        """Variance of the noise that a step needs, including the noise of the gradient, per coordinate."""

    @abstractmethod
    def find_step_size(self, stiffness: Float[Tensor, "*C 1"], noise: Float[Tensor, "*C 1"]) -> Float[Tensor, "*C 1"]:
        """Largest accurate step size, given the stiffness lambda and the gradient noise R of the scaled problem."""

    def gradient_part(self, state: State, step_size: float | Tensor) -> Float[Tensor, "*C d"]:
        """Variance that the minibatch adds to a step by epsilon M^-1 grad U, per coordinate."""
        return (step_size * state["inverse_mass"]) ** 2 * state["gradient_variance"]

    def inject(self, state: State, step_size: float | Tensor, temperature: float) -> Float[Tensor, "*C d"]:
        """Draw the noise that a step needs in addition to the noise of the gradient."""
        variance = self.noise_variance(state, step_size, temperature) - self.gradient_part(state, step_size)
        return variance.clamp_min(0).sqrt() * torch.randn_like(variance)

    # One update.

    def _first_state(self, batch: tuple[int, ...]) -> State:
        if self._initial_params is not None:
            position = self.potential.pack(self._initial_params).detach()
        else:
            starts = [self.potential.initial() for _ in range(math.prod(batch))]
            position = torch.stack(starts).reshape(batch + starts[0].shape)
        if position.shape[:-1] != batch:
            actual = f"{tuple(position.shape[:-1])} in front of the sites' shapes"
            fail(self._where, "initial_params", f"for {batch} chains", actual, "Give one value per chain.")
        per_chain = torch.zeros_like(position[..., 0])
        state = dict.fromkeys(("potential", "kinetic", "configurational"), per_chain)
        state |= {name: torch.ones_like(position) for name in ("inverse_mass", "window", "mean", "square")}
        noise = torch.full_like(position, self.gradient_noise or 0.0)
        state |= {"gradient_variance": noise, "pairs": per_chain[..., None], "center": position}
        state |= {"num_steps": torch.tensor(self.num_steps or 1), "watched": position.new_empty(0)}
        return {"position": position, **state, **self.potential.state(position), **self.start(position)}

    def _step(self, state: State, updates: int) -> State:
        end = self._warmup_end
        burn_in = updates < end
        params = tuple(self._optimized.leaves.values()) if burn_in else ()
        state = self.potential.at_update(state, updates, end)
        if burn_in and self.step_size is None:
            state = self._prepare(state, updates)
        potential, gradient, by_params = self.potential.gradient(state["position"], params)
        self._check_finite(state["position"], potential, gradient, updates)
        state, temperature = {**state, "potential": potential}, self.temperature(updates)
        if burn_in:
            if 2 * updates >= end:
                state |= update_center(state, updates + 1 - (end + 1) // 2)
            learn = self._learn_scale if self.step_size is not None else self._learn_step
            state = learn(state, gradient, updates)
            self._optimized.step(by_params)
            if self.step_size is None and 2 * updates < end and not self._starts_near:
                return {**state, "position": search(self.potential, state, gradient, temperature, updates, end)}
        step_size = self._step_size(state, updates)
        if updates == end:
            self._warn_of_heat(state, step_size, temperature)
        changed = self.update(state, gradient, step_size, temperature)
        measured = {} if burn_in else self._measure(state, changed, gradient, updates - end + 1)
        return {**state, **measured, **changed}

    def _learn_scale(self, state: State, gradient: Tensor, updates: int) -> State:
        """Learn the preconditioner and the gradient noise for a given step size."""
        end, settled = self._warmup_end, 2 * updates >= self._warmup_end
        if self.adapt:
            state = state | update_scale(state, gradient, settled)
        pair_every = min(max(end // (2 * _PAIRS), 1), _PAIR_EVERY)
        if self.gradient_noise is None and settled and (end - updates) % pair_every == 0:
            state = state | update_noise(state, gradient, self.potential.gradient(state["position"])[1])
        return state

    def _prepare(self, state: State, updates: int) -> State:
        """Find first scales before the first update, and initialize the sampler when the search ends."""
        if updates == 0:
            scales = unit_scales if self._starts_near else first_scales
            state = state | scales(self.potential, state, self.temperature(updates) or 1.0)
        if updates == (self._warmup_end + 1) // 2 and not self._starts_near:
            state = state | self.start(state["position"])
        return state

    def _learn_step(self, state: State, gradient: Tensor, updates: int) -> State:
        """Learn scales, gradient noise, step size and thinning."""
        end, temperature = self._warmup_end, self.temperature(updates) or 1.0
        options = updates, end, self._starts_near
        state = state | update_scales(self.potential, state, gradient, temperature, *options)
        if self.gradient_noise is not None:
            state["gradient_variance"] = torch.full_like(gradient, self.gradient_noise)
        coarse = self._coarse or self
        largest = coarse.find_step_size(state["stiffness"], noise_ratio(state, temperature))
        state["step_size"] = largest if self._coarse is None else largest / 2
        if self.num_steps is None:
            state |= watch(state, updates, end)
            if updates + 1 == end:
                count = updates_per_draw(state["watched"], end)
                state |= {"num_steps": torch.tensor(count), "watched": state["watched"][:0]}
        return state

    def _measure(self, state: State, changed: State, gradient: Tensor, count: int) -> State:
        """Update the mean temperatures with update number `count` after burn-in."""
        now = {"configurational": configurational_temperature(state, gradient)}
        if "velocity" in state:
            now["kinetic"] = kinetic_temperature(state, changed["velocity"])
        return {name: state[name] + (value - state[name]) / count for name, value in now.items()}

    def _check_finite(self, position: Tensor, potential: Tensor, gradient: Tensor, updates: int) -> None:
        finite = potential.isfinite() & gradient.isfinite().all(-1)
        if not finite.all():
            chain = int((~finite).reshape(-1).int().argmax())
            sites = self.potential.not_finite(position.reshape(-1, position.shape[-1])[chain])
            actual = f"potential {float(potential.reshape(-1)[chain])} in chain {chain} ({sites})"
            shorter = "Start closer with init_strategy=, give a step size"
            if self.step_size is not None:
                shorter = f"Use a step size below {self.step_size(updates):.3g}"
            cure = f"{shorter}, or check the model there."
            where = f"{self._where}, update {updates}"
            fail(where, "potential and gradient", "to be finite", actual, cure, DivergenceError)

    def _warn_of_heat(self, state: State, step_size: float | Tensor, temperature: float) -> None:
        share = self._noise_share(state, step_size, temperature)
        hot = share > 1
        if hot.any() and temperature > 0:
            sites = self.potential.sites_of(hot.reshape(-1, hot.shape[-1]).any(0))
            warn(
                f"{self._where}: the minibatches bring more noise than a step needs to {int(hot.sum())} of "
                f"{share.numel()} coordinates, of the sites {sites}, which will be too hot. Use larger minibatches, "
                "smaller steps or more friction; or leave step_size out, and it is found during burn-in.",
                RuntimeWarning,
            )

    def _noise_share(self, state: State, step_size: float | Tensor, temperature: float) -> Tensor:
        return self.gradient_part(state, step_size) / self.noise_variance(state, step_size, temperature)

    def _step_size(self, state: State, updates: int) -> float | Tensor:
        return state["step_size"] if self.step_size is None else self.step_size(updates)
