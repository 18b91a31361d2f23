r"""The common part of the stochastic-gradient samplers: a Pyro MCMC kernel without a Metropolis step.

A sampler is a Markov chain on a position and auxiliary variables, driven by gradients of the potential on minibatches;
its stationary law tends to :math:`\exp(-U/T)` as the step size tends to 0. During burn-in the base class estimates a
preconditioner and the noise of the gradients (:mod:`pyro_nngp.inference.mcmc.adaptation`) and can optimize parameters;
then all of that is frozen, so that draws come from one homogeneous chain.

Cost: an update is one gradient of the potential and O(d). Estimating the noise adds 5 % of burn-in, or 100 gradients.

Symbols: U potential, T temperature, psi position, epsilon step size, d unconstrained dimensions, C chains.
"""

import copy
import math
import warnings
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp.inference.mcmc.adaptation import (
    State,
    configurational_temperature,
    follow_center,
    follow_noise,
    follow_scale,
    kinetic_temperature,
)
from pyro_nngp.inference.mcmc.parameters import ParameterOptimizer
from pyro_nngp.inference.mcmc.potential import ModelPotential
from pyro_nngp.inference.mcmc.schedules import Refined, Schedule, as_schedule
from pyro_nngp.inference.svi.run import DivergenceError

Kernel = TypeVar("Kernel", bound="StochasticGradientKernel")

_PAIRS, _PAIR_EVERY = 100, 10  # gradient pairs that burn-in takes at least, and updates per pair at most


class StochasticGradientKernel(MCMCKernel):
    """Base of the samplers: everything but the update of one step.

    A kernel works in Pyro's ``MCMC``, one chain at a time, and in :class:`~pyro_nngp.inference.mcmc.chains.SGMCMC`,
    chains side by side. A call of :meth:`sample` makes one update during burn-in and `num_steps` updates after it, so
    ``MCMC(kernel, num_samples=256, warmup_steps=10_000)`` burns in for 10,000 gradients whatever the thinning.

    Args:
        model: any Pyro model with continuous latent sites. Plates may subsample; arguments of the run that are a
            :class:`~pyro_nngp.inference.mcmc.potential.Minibatch` become a fresh index at every update. Its parameters
            (``pyro.param``, ``PyroParam``) stay at their values unless `optim` is given.
        step_size: epsilon, or a schedule ``int -> float`` of the update number.
        num_steps: updates per draw after burn-in.
        temperature: T, or a schedule. 1 samples the posterior.
        gradient_noise: sigma^2, the variance of each coordinate of the gradient over minibatches; None estimates it.
        adapt: estimate the preconditioner M during burn-in; False keeps M = 1.
        optim: optimize the model's parameters during burn-in by one step on the potential per update, then freeze them:
            a constructor ``tensors -> torch.optim.Optimizer``, or a dict of arguments of Adam such as {"lr": 0.01}.
            Chains side by side share the parameters; chains of Pyro's ``MCMC`` have their own.
        init_strategy: where chains start, one of ``pyro.infer.autoguide.initialization``.

    Raises:
        TypeError, ValueError: if an argument is not of its kind or range.
    """

    def __init__(
        self,
        model: Callable,
        step_size: float | Schedule,
        *,
        num_steps: int = 1,
        temperature: float | Schedule = 1.0,
        gradient_noise: float | None = None,
        adapt: bool = False,
        optim: Callable[[list[Tensor]], torch.optim.Optimizer] | dict[str, Any] | None = None,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        self._where = type(self).__name__
        if not callable(model):
            fail(self._where, "model", "to be callable", type(model).__name__, "Pass a Pyro model.", TypeError)
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
            fail(self._where, "num_steps", "to be an int >= 1", num_steps, "It is the number of updates per draw.")
        if gradient_noise is not None and not 0 <= gradient_noise < math.inf:
            fail(self._where, "gradient_noise", "to be a variance >= 0, or None", gradient_noise, "None estimates it.")
        self.model, self.num_steps, self.gradient_noise, self.adapt = model, num_steps, gradient_noise, adapt
        self.step_size = as_schedule(self._where, "step_size", step_size)
        self.temperature = as_schedule(self._where, "temperature", temperature)
        self._optim = optim
        self._init_strategy = init_strategy
        self.transforms: dict[str, Any] | None = None
        self._initial_params: dict[str, Tensor] | None = None
        self._loaded: dict[str, Any] | None = None

    # What a sampler adds to the base.

    @abstractmethod
    def start(self, position: Float[Tensor, "*C d"]) -> State:
        """Give the sampler's auxiliary variables their first values."""

    @abstractmethod
    def update(self, state: State, gradient: Float[Tensor, "*C d"], step_size: float, temperature: float) -> State:
        """Make one step; return the entries of the state that it changes."""

    @abstractmethod
    def noise_variance(self, state: State, step_size: float, temperature: float) -> Float[Tensor, "*C d"]:
        """Variance of the noise that a step needs, that of the gradient included, per coordinate."""

    def gradient_part(self, state: State, step_size: float) -> Float[Tensor, "*C d"]:
        """Variance that minibatches bring to a step through epsilon M^-1 grad U, per coordinate."""
        return (step_size * state["inverse_mass"]) ** 2 * state["gradient_variance"]

    def inject(self, state: State, step_size: float, temperature: float) -> Float[Tensor, "*C d"]:
        """Draw the noise that a step needs beside that of the gradient."""
        variance = self.noise_variance(state, step_size, temperature) - self.gradient_part(state, step_size)
        return variance.clamp_min(0).sqrt() * torch.randn_like(variance)

    def refined(self: Kernel) -> Kernel:
        """Copy the kernel with half the step size and twice the updates per draw."""
        fine = copy.copy(self)
        fine.step_size, fine.temperature = Refined(self.step_size, 0.5), Refined(self.temperature, 1.0)
        fine.num_steps = 2 * self.num_steps
        return fine

    # The interface that pyro.infer.MCMC uses.

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Start one chain on a model's arguments, or continue the loaded one with this many updates of burn-in."""
        self.setup_chains((), True, warmup_steps, args, kwargs)

    def setup_chains(
        self, batch: tuple[int, ...], vectorize: bool, warmup_steps: int, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """Start chains side by side: `batch` is (C,), or () for one chain without a chain dimension."""
        self.potential = ModelPotential(self._where, self.model, args, kwargs, self._init_strategy, vectorize)
        self.transforms = self.potential.transforms
        self._optimized = ParameterOptimizer(self._where, self.potential.params, self._optim)
        if self._loaded is None:
            self._state = self._first_state(batch)
            self._updates, self._warmup_end = 0, warmup_steps
        else:
            self._restore(self._loaded, batch)
            self._warmup_end = self._updates + warmup_steps if warmup_steps else min(self._warmup_end, self._updates)
            self._loaded = None

    @property
    def initial_params(self) -> dict[str, Tensor]:
        """Unconstrained values of the sites where the chain stands."""
        return self.potential.unpack(self._state["position"])

    @initial_params.setter
    def initial_params(self, params: dict[str, Tensor] | None) -> None:
        self._initial_params = params

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move on from unconstrained values: one update during burn-in, `num_steps` after it.

        Raises:
            DivergenceError: if the potential or its gradient is not finite, with the update and the sites.
            ValueError: if the sampler is to adapt and there was no burn-in.
        """
        if self.adapt and self._updates == self._warmup_end == 0:
            fail(self._where, "warmup_steps", ">= 1 with adapt=True", 0, "Scales are estimated during burn-in.")
        state, updates = {**self._state, "position": self.potential.pack(params)}, self._updates
        for _ in range(1 if updates < self._warmup_end else self.num_steps):
            state = self._step(state, updates)
            updates += 1
        self._state, self._updates = state, updates
        return self.potential.unpack(state["position"])

    def logging(self) -> OrderedDict[str, str]:
        """Step size, potential and, after burn-in, the mean temperature so far: the text beside Pyro's progress bar."""
        shown = {"step size": self._last(self.step_size), "potential": float(self._state["potential"].mean())}
        if self._updates > self._warmup_end:
            kind = "kinetic" if "velocity" in self._state else "configurational"
            shown["temperature"] = float(self._state[kind].mean())
        return OrderedDict((name, f"{value:.3g}") for name, value in shown.items())

    def diagnostics(self) -> dict[str, Any]:
        """Numbers that show the bias of a chain; a list with one number per chain where chains run side by side.

        Returns:
            - "step size": epsilon of the last update.
            - "kinetic temperature", of samplers with momentum r: the mean of r' M^-1 r / d after burn-in.
            - "configurational temperature": the mean of (psi - c)' grad U / d after burn-in, c the mean of burn-in's
              second half.
              Both are T, up to Monte-Carlo error, for an exact sampler; this one sees the position alone.
            - "gradient noise": sigma^2, averaged over coordinates.
            - "gradient noise share": the part of the sampler's noise that minibatches bring, in the worst coordinate.
              Above 1 it cannot be corrected for, and the coordinate is too hot.
            - "params": the parameters that were optimized, where there are any.
        """
        step_size = self._last(self.step_size)
        share = self._noise_share(self._state, step_size, self._last(self.temperature))
        found = {"configurational temperature": self._state["configurational"]}
        if "velocity" in self._state:
            found["kinetic temperature"] = self._state["kinetic"]
        found["gradient noise"] = self._state["gradient_variance"].mean(-1)
        found["gradient noise share"] = share.amax(-1)
        params = {"params": self.potential.param_values()} if self._optimized.leaves else {}
        return {"step size": step_size, **{name: value.tolist() for name, value in found.items()}, **params}

    def cleanup(self) -> None:
        """Forget the starting values. The state stays, so that a snapshot can still be taken after a run."""
        self._initial_params = None

    # Interrupt and resume.

    def state_dict(self) -> dict[str, Any]:
        """Take a snapshot of the chain and of torch's random state, readable by ``torch.load(weights_only=True)``.

        It holds all of the chain but the model, its data and the constructor's arguments. Models that draw from NumPy's
        or Python's generators are not covered.
        """
        device = self.potential.device
        return {
            "kernel": self._where,
            "sites": self._site_shapes(),
            "chains": list(self._state["position"].shape[:-1]),
            "updates": self._updates,
            "warmup_end": self._warmup_end,
            "state": dict(self._state),
            **self._optimized.state_dict(),
            "rng": torch.get_rng_state(),
            "device_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next run continue from a snapshot, with the same bits as if it had never stopped.

        The next run must be of one chain, with the updates of burn-in that are left as its `warmup_steps` (0 after it).
        """
        self._loaded = state

    def _restore(self, saved: dict[str, Any], batch: tuple[int, ...]) -> None:
        here = {"kernel": self._where, "sites": self._site_shapes(), "chains": list(batch)}
        here["params"] = list(self._optimized.leaves)
        there = {**{name: saved[name] for name in ("kernel", "sites", "chains")}, "params": list(saved["params"])}
        if there != here:
            fail(self._where, "snapshot", f"of {here}", there, "Load it into a run like the one it came from.")
        device = self.potential.device
        self._state = {name: value.to(device) for name, value in saved["state"].items()}
        self._updates, self._warmup_end = saved["updates"], saved["warmup_end"]
        self._optimized.load_state_dict(saved)
        torch.set_rng_state(saved["rng"].cpu())
        if saved["device_rng"] is not None:
            torch.cuda.set_rng_state(saved["device_rng"].cpu(), device)

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
        return {"position": position, **state, **self.start(position)}

    def _step(self, state: State, updates: int) -> State:
        burn_in, left = updates < self._warmup_end, self._warmup_end - updates
        params = tuple(self._optimized.leaves.values()) if burn_in else ()
        potential, gradient, by_params = self.potential.gradient(state["position"], params)
        self._check_finite(state["position"], potential, gradient, updates)
        state = {**state, "potential": potential}
        step_size, temperature = self.step_size(updates), self.temperature(updates)
        if burn_in:
            settled = 2 * updates >= self._warmup_end
            if settled:
                state |= follow_center(state, updates + 1 - (self._warmup_end + 1) // 2)
            if self.adapt:
                state |= follow_scale(state, gradient, settled)
            pair_every = min(max(self._warmup_end // (2 * _PAIRS), 1), _PAIR_EVERY)
            if self.gradient_noise is None and settled and left % pair_every == 0:
                state |= follow_noise(state, gradient, self.potential.gradient(state["position"])[1])
            self._optimized.step(by_params)
        elif left == 0:
            self._warn_of_heat(state, step_size, temperature)
        changed = self.update(state, gradient, step_size, temperature)
        measured = {} if burn_in else self._measure(state, changed, gradient, 1 - left)
        return {**state, **measured, **changed}

    def _measure(self, state: State, changed: State, gradient: Tensor, count: int) -> State:
        """Bring the mean temperatures up to date with the update that is number `count` after burn-in."""
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
            cure = f"Use a step size below {self.step_size(updates):.3g}, or check the model there."
            where = f"{self._where}, update {updates}"
            fail(where, "potential and gradient", "to be finite", actual, cure, DivergenceError)

    def _warn_of_heat(self, state: State, step_size: float, temperature: float) -> None:
        share = self._noise_share(state, step_size, temperature)
        hot = int((share > 1).sum())
        if hot and temperature > 0:
            warnings.warn(
                f"{self._where}: the minibatches bring more noise than a step needs to {hot} of {share.numel()} "
                "coordinates, which will be too hot. Use larger minibatches, smaller steps or more friction.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _noise_share(self, state: State, step_size: float, temperature: float) -> Tensor:
        return self.gradient_part(state, step_size) / self.noise_variance(state, step_size, temperature)

    def _last(self, schedule: Schedule) -> float:
        return schedule(max(self._updates - 1, 0))

    def _site_shapes(self) -> dict[str, list[int]]:
        return {name: list(shape) for name, shape in self.potential.shapes.items()}
