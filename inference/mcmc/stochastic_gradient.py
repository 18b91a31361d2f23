r"""The base class of the stochastic-gradient samplers: a Pyro MCMC kernel without a Metropolis step.

A sampler is a Markov chain on a position and auxiliary variables, driven by gradients of the potential on minibatches;
its stationary distribution tends to :math:`\exp(-U/T)` as the step size tends to 0. During burn-in the base class
estimates a preconditioner and the noise of the gradients (:mod:`pyro_nngp.inference.mcmc.adaptation`) and can optimize
parameters; then all of this is frozen, so that draws come from one homogeneous chain.

Cost: an update is one gradient of the potential and O(d). Estimating the noise adds 5 % of burn-in, or 100 gradients.

Symbols: U potential, T temperature, psi position, epsilon step size, d unconstrained dimensions, C chains.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from pyro.infer.autoguide import init_to_sample
from torch import Tensor

from pyro_nngp._checks import check_int, check_number, fail, warn
from pyro_nngp._kinds import check_callable, check_flags
from pyro_nngp.distributed.training_state import training_state
from pyro_nngp.inference.autoguide.auto_nngp import AutoNNGP
from pyro_nngp.inference.autoguide.fixed_transport import FixedTransport
from pyro_nngp.inference.identity import check_same_run, described, identity
from pyro_nngp.inference.mcmc.adaptive_step import AdaptiveStep
from pyro_nngp.inference.mcmc.control_variates import AnchoredPotential
from pyro_nngp.inference.mcmc.minibatch import minibatches_of, with_all_rows
from pyro_nngp.inference.mcmc.parameters import ParameterOptimizer, warn_of_starts
from pyro_nngp.inference.mcmc.potential import ModelPotential, check_sizes
from pyro_nngp.inference.mcmc.process_rows import init_near_mean
from pyro_nngp.inference.mcmc.schedules import Constant, Refined, Schedule, as_schedule
from pyro_nngp.inference.mcmc.settling import warn_unsettled
from pyro_nngp.inference.protocols import owner_of, shard_of

Kernel = TypeVar("Kernel", bound="StochasticGradientKernel")

_MOST_WATCHED = 1_000  # coordinates that a kernel under Pyro's MCMC looks at, to see whether its chain has settled
_KINETIC_MEMORY = 100  # updates after which kinetic energies are practically independent


class StochasticGradientKernel(AdaptiveStep):
    """Base of the samplers, which define the step, :meth:`update`, and what depends on it.

    A kernel works in Pyro's ``MCMC``, one chain at a time, and in :class:`~pyro_nngp.inference.mcmc.chains.SGMCMC`,
    chains side by side. A call of :meth:`sample` makes one update during burn-in and `num_steps` updates after it, so
    ``MCMC(kernel, num_samples=256, warmup_steps=10_000)`` burns in for 10,000 gradients whatever the thinning.

    Args:
        model: any Pyro model with continuous latent sites. Plates may subsample; arguments of the run that are a
            :class:`~pyro_nngp.inference.mcmc.minibatch.Minibatch` become a new index at every update. Its parameters
            (``pyro.param``, ``PyroParam``) stay at their values unless `optim` is given.
        step_size: epsilon, or a schedule ``int -> float`` of the update number. None finds it during burn-in, with the
            scale of each coordinate (:mod:`pyro_nngp.inference.mcmc.step_search`).
        num_steps: updates per draw after burn-in. None chooses it with the step size, and is 1 if that is given.
        temperature: T, or a schedule. 1 samples the posterior.
        gradient_noise: sigma^2, the variance of each coordinate of the gradient over minibatches; None estimates it.
        adapt: estimate the preconditioner M of a given step size during burn-in; False keeps M = 1.
        optim: optimize the model's parameters during burn-in by one step on the potential per update, then freeze them:
            a constructor ``tensors -> torch.optim.Optimizer``, or a dict of arguments of Adam such as {"lr": 0.01}.
            Chains side by side share the parameters; chains of Pyro's ``MCMC`` have separate ones.
        control_variates: take off most of the noise of minibatches by gradients on the same rows at an anchor, a
            position of burn-in (:mod:`pyro_nngp.inference.mcmc.control_variates`): for tiny noise or large N / B, from
            a start near the mode. The rows must come from one ``Minibatch``.
        guide: an ``AutoNNGP`` for the program, trained or not: chains move in its coordinates, the site ``_white`` of
            nearly independent standard normal values, which ``model`` has in place of the program's latent sites
            (:mod:`pyro_nngp.inference.autoguide.fixed_transport`). Call it once before a run of several processes, or
            each has separate coordinates. Without it, values of a nearest-neighbor process
            are too correlated for any step size.
        init_strategy: where chains start, one of ``pyro.infer.autoguide.initialization``. None is draws of the guide;
            without one ``init_to_uniform``, but for nearest-neighbor processes, which start at their mean.

    Raises:
        TypeError, ValueError: if an argument has a wrong type or is out of range.

    Warns:
        UserWarning: if the sampler chooses a step size for a nearest-neighbor process without a guide.
    """

    def __init__(
        self,
        model: Callable,
        step_size: float | Schedule | None = None,
        *,
        num_steps: int | None = None,
        temperature: float | Schedule = 1.0,
        gradient_noise: float | None = None,
        adapt: bool | None = None,
        optim: Callable[[list[Tensor]], torch.optim.Optimizer] | dict[str, Any] | None = None,
        control_variates: bool = False,
        guide: AutoNNGP | None = None,
        init_strategy: Callable | None = None,
    ) -> None:
        self._where = type(self).__name__
        check_callable(self._where, "model", model, "Pass a Pyro model.")
        if num_steps is not None:
            check_int(self._where, "num_steps", num_steps, 1, "It is the number of updates per draw.")
        if gradient_noise is not None:
            check_number(self._where, "gradient_noise", gradient_noise, cure="It is a variance; None estimates it.")
        if adapt is not None and not isinstance(adapt, bool):
            cure = "True estimates the preconditioner."
            fail(self._where, "adapt", "to be True, False or None", f"{adapt!r:.40}", cure, TypeError)
        if optim is not None and not isinstance(optim, dict) and not callable(optim):
            cure = 'Pass a constructor, or arguments of Adam such as {"lr": 0.01}.'
            fail(self._where, "optim", "to be callable, or a dict", type(optim).__name__, cure, TypeError)
        check_flags(self._where, control_variates=control_variates)
        if control_variates and optim is not None:
            cure = "Fit the parameters before the run: gradients at an anchor belong to one value of them."
            fail(self._where, "optim", "to be None with control variates", f"{optim!r:.40}", cure)
        if init_strategy is None:
            init_strategy = init_near_mean if guide is None else init_to_sample
        check_callable(
            self._where, "init_strategy", init_strategy, "Pass one of pyro.infer.autoguide.initialization.", 1
        )
        if step_size is None and adapt is False:
            cure = "Give a step size in the units of the problem, or leave adapt out."
            fail(self._where, "step_size", "to be given with adapt=False", None, cure)
        self.guide = guide
        self._transport = None if guide is None else FixedTransport(self._where, model, guide)
        self.model = model if self._transport is None else self._transport
        self._program, self.gradient_noise = model, gradient_noise
        self._starts_near = guide is not None and init_strategy is init_to_sample
        self.adapt = step_size is None if adapt is None else adapt
        self.num_steps = 1 if num_steps is None and step_size is not None else num_steps
        self.step_size = None if step_size is None else as_schedule(self._where, "step_size", step_size)
        self.temperature = as_schedule(self._where, "temperature", temperature)
        self._optim, self.control_variates = optim, control_variates
        self._init_strategy = init_strategy
        self.transforms: dict[str, Any] | None = None
        self._initial_params: dict[str, Tensor] | None = None
        self._loaded: dict[str, Any] | None = None
        self._coarse: StochasticGradientKernel | None = None
        self._draws: list[Tensor] | None = None  # of a chain of Pyro's MCMC, whose draws the kernel checks itself

    def refined(self: Kernel) -> Kernel:
        """Copy the kernel with half the step size and twice the updates per draw."""
        fine = copy.copy(self)
        fine._coarse, fine.temperature = self, Refined(self.temperature, 1.0)
        if self.step_size is not None:
            fine.step_size = Refined(self.step_size, 0.5)
        if self.num_steps is not None:
            fine.num_steps = 2 * self.num_steps
        return fine

    def settings(self) -> dict[str, Any]:
        """The arguments that determine the draws, apart from model and start."""
        of_steps = ("step_size", "num_steps", "temperature", "adapt", "friction", "diffusion")
        names = (*of_steps, "gradient_noise", "control_variates")
        return {name: getattr(self, name) for name in names if hasattr(self, name)} | {"optim": self._optim}

    def check_processes(self, args: tuple, kwargs: dict[str, Any], **settings: Any) -> None:
        """Raise on all processes unless they have the same model, arguments, starting values and settings.

        Raises:
            ProcessError: names what differs.
        """
        method: Any = owner_of(self.model)
        shard = shard_of(method)
        if shard is not None:
            parts = identity(
                model=self.model, args=args, kwargs=kwargs, kernel=type(self), **self.settings(), **settings
            )
            start = identity(start=training_state(method)["shared"])
            check_same_run(self._where, shard.world, described(parts, shard) | start)

    # The interface that pyro.infer.MCMC uses.

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Start one chain on a model's arguments, or continue the loaded one with this many updates of burn-in."""
        self.check_processes(args, kwargs, warmup_steps=warmup_steps)
        self.setup_chains((), True, warmup_steps, args, kwargs)
        d = self._state["position"].shape[-1]
        self._watched = torch.linspace(0, d - 1, min(d, _MOST_WATCHED)).long().unique()
        self._draws = []

    def setup_chains(
        self, batch: tuple[int, ...], vectorize: bool, warmup_steps: int, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """Start chains side by side: `batch` is (C,), or () for one chain without a chain dimension."""
        if self._transport is not None:
            check_sizes(self._where, self._program, minibatches_of(args, kwargs))
            every_args, every_kwargs = with_all_rows(args, kwargs)
            self._transport.prepare(*every_args, **every_kwargs)
        kind = AnchoredPotential if self.control_variates else ModelPotential
        self.potential = kind(self._where, self.model, args, kwargs, self._init_strategy, vectorize)
        self.transforms = self.potential.transforms
        self._warn_of_processes()
        self._optimized = ParameterOptimizer(self._where, self.potential.params, self._optim)
        if self._loaded is None:
            self._warn_of_starts()
            self._state = self._first_state(batch)
            self._updates, self._warmup_end = 0, warmup_steps
        else:
            self._restore(self._loaded, batch)
            self._warmup_end = self._updates + warmup_steps if warmup_steps else min(self._warmup_end, self._updates)
            self._loaded = None

    def _warn_of_processes(self) -> None:
        """Warn of processes whose values are too correlated for a step chosen for single coordinates."""
        if self.potential.processes and self.step_size is None:
            warn(
                f"{self._where}: the values of the processes {self.potential.processes} are strongly correlated, and "
                "minibatches see few of them at once: chains will hardly settle. Pass guide=AutoNNGP(model), whose "
                "coordinates are nearly independent; or sample a response model, such as Vecchia."
            )

    def _warn_of_starts(self) -> None:
        """Warn of hyperparameters of a method that are neither sampled nor trained."""
        if self._optim is None:
            warn_of_starts(self._where, self._program, '; optim={"lr": 0.01} learns them during burn-in')

    @property
    def initial_params(self) -> dict[str, Tensor]:
        """Unconstrained values of the sites at the current state of the chain."""
        return self.potential.unpack(self._state["position"])

    @initial_params.setter
    def initial_params(self, params: dict[str, Tensor] | None) -> None:
        self._initial_params = params

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """The next state of the chain at unconstrained values: one update during burn-in, `num_steps` after it.

        Raises:
            DivergenceError: if the potential or its gradient is not finite, with the update and the sites.
            ValueError: if the sampler is to adapt and there was no burn-in.
        """
        if self.adapt and self._updates == self._warmup_end == 0:
            fail(self._where, "warmup_steps", ">= 1 with adapt=True", 0, "Scales are estimated during burn-in.")
        state, updates = {**self._state, "position": self.potential.pack(params)}, self._updates
        for _ in range(1 if updates < self._warmup_end else int(state["num_steps"])):
            state = self._step(state, updates)
            updates += 1
        self._state, self._updates = state, updates
        if self._draws is not None and updates > self._warmup_end:
            self._draws.append(state["position"][self._watched.to(state["position"].device)])
        return self.potential.unpack(state["position"])

    def logging(self) -> OrderedDict[str, str]:
        """Step size, potential and, after burn-in, the mean temperature so far: the text beside Pyro's progress bar."""
        step_size = torch.as_tensor(self._step_size(self._state, max(self._updates - 1, 0)))
        shown = {"step size": float(step_size.double().mean()), "potential": float(self._state["potential"].mean())}
        if self._updates > self._warmup_end:
            kind = "kinetic" if "velocity" in self._state else "configurational"
            shown["temperature"] = float(self._state[kind].mean())
        return OrderedDict((name, f"{value:.3g}") for name, value in shown.items())

    def diagnostics(self) -> dict[str, Any]:
        """Numbers that show the bias of a chain; a list with one number per chain where chains run side by side.

        Returns:
            A dictionary with these keys.

            - "step size": epsilon of the last update.
            - "updates per draw": `num_steps`.
            - "kinetic temperature", of samplers with momentum r: the mean of r' M^-1 r / d after burn-in.
            - "configurational temperature": the mean of (psi - c)' grad U / d after burn-in, c the mean of burn-in's
              second half. Both are T, up to Monte-Carlo error, for an exact sampler; this one depends on the position
          only.
            - "gradient noise": sigma^2, averaged over coordinates.
            - "gradient noise share": the part of the sampler's noise that minibatches bring, in the worst coordinate.
              Above 1 it cannot be corrected, and the coordinate is too hot.
            - "params": the parameters that were optimized, if any.
        """
        last = max(self._updates - 1, 0)
        step_size = self._step_size(self._state, last)
        share = self._noise_share(self._state, step_size, self.temperature(last))
        by_chain = {"configurational temperature": self._state["configurational"]}
        if "velocity" in self._state:
            by_chain["kinetic temperature"] = self._state["kinetic"]
        by_chain["gradient noise"] = self._state["gradient_variance"].mean(-1)
        by_chain["gradient noise share"] = share.amax(-1)
        params = {"params": self.potential.param_values()} if self._optimized.leaves else {}
        each = step_size[..., 0].tolist() if isinstance(step_size, Tensor) else step_size
        steps = {"step size": each, "updates per draw": int(self._state["num_steps"])}
        return {**steps, **{name: value.tolist() for name, value in by_chain.items()}, **params}

    def cleanup(self) -> None:
        """Drop the starting values, and warn of a chain that has not settled.

        The state is kept, so that a snapshot can still be taken after a run.
        """
        self._initial_params = None
        if self._draws:
            draws, self._draws = torch.stack(self._draws)[None], None
            self.warn_unsettled(self._where, draws, self._watched)

    def warn_unsettled(
        self, where: str, draws: Float[Tensor, "C S k"], coordinates: Int[Tensor, " k"] | None = None
    ) -> None:
        """Warn of chains that have not settled, from unconstrained draws of all or some coordinates."""
        position = self._state["position"]
        rows = torch.arange(position.shape[-1]) if coordinates is None else coordinates

        def sites_of(marked: Tensor) -> list[str]:
            everywhere = torch.zeros(position.shape[-1], dtype=torch.bool)
            everywhere[rows] = marked.cpu()
            return self.potential.sites_of(everywhere)

        kinetic = None
        if "velocity" in self._state and isinstance(self.temperature, Constant):
            kinetic = float(self._state["kinetic"].mean()) / self.temperature(0)
        independent = max(self._updates - self._warmup_end, 1) * position.numel() / _KINETIC_MEMORY
        warn_unsettled(where, draws, sites_of, kinetic, math.sqrt(2 / independent))

    # Interrupt and resume.

    def state_dict(self) -> dict[str, Any]:
        """Take a snapshot of the chain and of torch's random state, readable by ``torch.load(weights_only=True)``.

        It holds all of the chain except the model, its data and the constructor's arguments. Models that draw from
        NumPy's or Python's generators are not covered.
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
        """Let the next run continue from a snapshot, bit for bit as if it had never stopped.

        The next run must have one chain, and the remaining updates of burn-in as its `warmup_steps` (0 after it).
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

    def _site_shapes(self) -> dict[str, list[int]]:
        return {name: list(shape) for name, shape in self.potential.shapes.items()}
