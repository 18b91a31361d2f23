r"""Chains of a stochastic-gradient sampler side by side in one process, with checkpoints; a test of their step size.

:class:`SGMCMC` is Pyro's ``MCMC`` with a different runner: all chains are rows of one tensor, moved by one
:func:`torch.func.vmap` of the model, each with separate minibatches and noise. Draws survive Ctrl-C and errors, and a
killed run resumes from its checkpoint bit for bit.

Differs from Pyro's ``MCMC(num_chains=C)``: no worker processes; chains share the parameters that are optimized.

Cost: the updates of C chains; a checkpoint writes all draws so far.
"""

import os
from typing import Any

import pyro
import torch
from jaxtyping import Float
from pyro import poutine
from pyro.infer import MCMC
from pyro.ops.stats import effective_sample_size
from torch import Tensor
from tqdm.auto import tqdm

from pyro_nngp._checks import check_int, check_memory, check_path, check_positive, fail, warn
from pyro_nngp._kinds import check_flags
from pyro_nngp.distributed import World
from pyro_nngp.inference._interrupt import deferred_interrupt
from pyro_nngp.inference.checkpoint import (
    CheckpointError,
    check_schema,
    exclusive_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from pyro_nngp.inference.identity import differences, identity
from pyro_nngp.inference.mcmc.stochastic_gradient import StochasticGradientKernel


class SGMCMC(MCMC):
    """Pyro's ``MCMC`` with chains side by side and checkpoints.

    Results are read as with ``MCMC``: ``get_samples``, ``summary``, ``diagnostics``. A run whose chains have not
    settled ends with a warning that names the sites and the cure.

    Example::

        mcmc = SGMCMC(SGHMC(model, num_steps=50), num_samples=256, warmup_steps=10_000, num_chains=4, checkpoint="a.pt")
        mcmc.run(Minibatch(len(y), 1_000))

    Args:
        kernel: one of the stochastic-gradient kernels.
        num_samples: draws per chain.
        warmup_steps: updates of burn-in; None is `num_samples`.
        num_chains: C.
        vectorize: move the chains by one :func:`torch.func.vmap`; False moves one after the other, for models that vmap
            does not support (those with ``if`` on values, ``.item()``, or hand-written gradients without vmap rules).
        initial_params: unconstrained starting values, {site: (C, ...)}; None lets the kernel draw them.
        checkpoint: file of the run. If it exists, the run continues from it; delete it to start again. A finished
            run continues if `num_samples` has grown.
        checkpoint_every: updates of burn-in, or draws, between two writes. Ctrl-C also writes it.
        disable_progbar: show no progress bar.

    Raises:
        TypeError, ValueError: if an argument has a wrong type or is out of range.
    """

    def __init__(
        self,
        kernel: StochasticGradientKernel,
        num_samples: int,
        warmup_steps: int | None = None,
        num_chains: int = 1,
        *,
        vectorize: bool = True,
        initial_params: dict[str, Tensor] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 100,
        disable_progbar: bool = False,
    ) -> None:
        if not isinstance(kernel, StochasticGradientKernel):
            cure = "Use pyro.infer.MCMC for other kernels."
            fail("SGMCMC", "kernel", "to be SGHMC, SGLD or SGNHT", type(kernel).__name__, cure, TypeError)
        counts = {"num_samples": num_samples, "num_chains": num_chains, "checkpoint_every": checkpoint_every}
        for arg, value in counts.items():
            check_int("SGMCMC", arg, value, 1, "Ask for at least one.")
        if warmup_steps is not None:
            check_int("SGMCMC", "warmup_steps", warmup_steps, 0, "It counts updates of burn-in.")
        if checkpoint is not None:
            check_path("SGMCMC", "checkpoint", checkpoint)
            if kernel.guide is not None:
                cure = "Leave it out: another run of the guide would give white values another meaning."
                fail("SGMCMC", "checkpoint", "to be None with a guide", str(checkpoint), cure)
        check_memory("SGMCMC", "draws", num_samples * num_chains, torch.get_default_dtype())
        check_flags("SGMCMC", vectorize=vectorize, disable_progbar=disable_progbar)
        if initial_params is not None and not isinstance(initial_params, dict):
            cure = "Pass {site: unconstrained values (C, ...)}."
            fail("SGMCMC", "initial_params", "to be a dict", type(initial_params).__name__, cure, TypeError)
        super().__init__(kernel, num_samples, warmup_steps, disable_progbar=disable_progbar)
        self._samples: dict[str, Tensor] | None = None
        self.num_chains, self.vectorize, self.checkpoint = num_chains, vectorize, checkpoint
        self._every, self._start, self._quiet = checkpoint_every, initial_params, disable_progbar

    @poutine.block
    def run(self, *args: Any, **kwargs: Any) -> None:
        """Run, or continue from the checkpoint, with the model's arguments.

        Ctrl-C ends the run after the present draw; ``get_samples`` has the draws so far, also after an error.

        Raises:
            CheckpointError: if the checkpoint cannot be read or is of a run with other data or settings.
            DivergenceError: if a potential is not finite.
        """
        self._args, self._kwargs = args, kwargs
        if self.checkpoint and World().size > 1:
            cure = "Leave it out: one process cannot continue for all."
            fail("SGMCMC", "checkpoint", f"to be None on {World().size} processes", str(self.checkpoint), cure)
        with pyro.validation_enabled(False), exclusive_checkpoint("SGMCMC", self.checkpoint):
            done, draws = self._resume(args, kwargs)
            self._samples = None  # drop the draws of an earlier run
            try:
                self._loop(done, draws)
                if draws:
                    self.kernel.warn_unsettled("SGMCMC", torch.stack(draws[: self.num_samples], 1))
            finally:
                if draws:
                    self._collect(draws)
                self.kernel.cleanup()

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> dict[str, Tensor]:
        """Posterior draws, as in ``MCMC``.

        Raises:
            RuntimeError: if the run has no draws, because it ended in burn-in or has not begun.
        """
        where = "SGMCMC.get_samples"
        check_flags(where, group_by_chain=group_by_chain)
        if num_samples is not None:
            check_int(where, "num_samples", num_samples, 1)
        self._check_draws("get_samples")
        return super().get_samples(num_samples, group_by_chain)

    def diagnostics(self) -> dict[str, Any]:
        """Diagnostics of ``MCMC`` and of the kernel for each chain; raises the errors of :meth:`get_samples`."""
        self._check_draws("diagnostics")
        return super().diagnostics()

    def summary(self, prob: float = 0.9) -> None:
        """Print the table of ``MCMC``; raises the errors of :meth:`get_samples`."""
        check_positive("SGMCMC.summary", "prob", prob, "It is that of the intervals.", 1.0)
        self._check_draws("summary")
        super().summary(prob)

    def _check_draws(self, method: str) -> None:
        if self._samples is None:
            cure = "Call run(...), which continues a run that has a checkpoint, and let it go beyond burn-in."
            fail(f"SGMCMC.{method}", "the run", "to have draws", "none", cure, RuntimeError)

    def _resume(self, args: tuple, kwargs: dict[str, Any]) -> tuple[int, list[Tensor]]:
        """Set up the kernel; returns the number of updates and draws made so far, and the draws."""
        if self.checkpoint:
            parts = {"model": self.kernel.model, "args": args, "kwargs": kwargs}
            settings = {"num_chains": self.num_chains, "warmup_steps": self.warmup_steps, "vectorize": self.vectorize}
            self._identity = identity(**parts, kernel=type(self.kernel), **settings, **self.kernel.settings())
        saved = load_checkpoint(self.checkpoint) if self.checkpoint and os.path.exists(self.checkpoint) else None
        if saved:
            self._check_identity(saved)
            self.kernel.load_state_dict(saved["kernel"])
        elif self._start is not None:
            self.kernel.initial_params = self._start
        done = saved["done"] if saved else 0
        left = max(self.warmup_steps - done, 0)
        run = {"num_samples": self.num_samples, "num_chains": self.num_chains, "vectorize": self.vectorize}
        self.kernel.check_processes(args, kwargs, warmup_steps=self.warmup_steps, **run)
        self.kernel.setup_chains((self.num_chains,), self.vectorize, left, args, kwargs)
        return done, list(saved["draws"].to(self.kernel.potential.device)) if saved else []

    def _check_identity(self, saved: dict[str, Any]) -> None:
        check_schema("SGMCMC", saved, {"identity": {}, "kernel": {}, "done": 0, "draws": None})
        other = differences(saved["identity"], self._identity)
        if other:
            cure = "Delete it, or name another file."
            fail("SGMCMC", str(self.checkpoint), "to be of this run", f"one with {other}", cure, CheckpointError)

    def _loop(self, done: int, draws: list[Tensor]) -> None:
        total = self.warmup_steps + self.num_samples
        params = self.kernel.initial_params
        with deferred_interrupt() as pressed, tqdm(total=total, initial=done, disable=self._quiet) as bar:
            while done < total and not pressed:
                bar.set_description("Warmup" if done < self.warmup_steps else "Sample", refresh=False)
                params = self.kernel.sample(params)
                done += 1
                if done > self.warmup_steps:
                    draws.append(self.kernel.potential.pack(params))
                bar.set_postfix(self.kernel.logging(), refresh=False)
                bar.update()
                if self.checkpoint and (done % self._every == 0 or done == total or pressed):
                    self._save(self.checkpoint, done, draws)
        if pressed and done < total:
            cure = "Call run again, which goes on." if self.checkpoint else "With checkpoint= a run can go on."
            got = f"Ctrl-C after {done} of {total} updates, and {len(draws)} draws"
            warn(f"SGMCMC: expected {self.num_samples} draws of each chain, got {got}. {cure}")

    def _save(self, path: str | os.PathLike[str], done: int, draws: list[Tensor]) -> None:
        stacked = torch.stack(draws) if draws else torch.empty(0)
        state = {"identity": self._identity, "kernel": self.kernel.state_dict(), "done": done, "draws": stacked}
        save_checkpoint(path, state)

    def _collect(self, draws: list[Tensor]) -> None:
        """Give draws and diagnostics of each chain to the base class."""
        values = self.kernel.potential.unpack(torch.stack(draws[: self.num_samples], 1))
        self._samples = {name: self.kernel.transforms[name].inv(z) for name, z in values.items()}
        diagnostics = self.kernel.diagnostics()
        self._diagnostics = [
            {name: value[c] if isinstance(value, list) else value for name, value in diagnostics.items()}
            for c in range(self.num_chains)
        ]


def step_size_refinement(
    kernel: StochasticGradientKernel,
    *args: Any,
    num_samples: int,
    warmup_steps: int,
    num_chains: int = 4,
    vectorize: bool = True,
    disable_progbar: bool = False,
    **kwargs: Any,
) -> dict[str, dict[str, Tensor]]:
    """Run a kernel again with half its step size and twice its updates, and compare the posteriors.

    The bias of these samplers falls with the step size. Shifts of many standard errors mean that it matters at the
    kernel's step size; small shifts, that it is below the resolution of that number of draws.

    Args:
        kernel: the kernel to test.
        *args: arguments of the model.
        num_samples: draws per chain.
        warmup_steps: updates of burn-in at the kernel's step size.
        num_chains: number of chains.
        vectorize: as in :class:`SGMCMC`.
        disable_progbar: show no progress bar.
        **kwargs: keyword arguments of the model.

    Returns:
        For each site, tensors of the site's shape: "mean shift", from the fine run to the kernel's, in posterior
        standard deviations; "variance ratio", of the kernel's run to the fine one; and both differences in standard
        errors (by effective sample sizes) as "mean z" and "variance z".

    Cost: three times a run of the kernel.
    """
    options: dict[str, Any] = {"vectorize": vectorize, "disable_progbar": disable_progbar}
    coarse = SGMCMC(kernel, num_samples, warmup_steps, num_chains, **options)
    fine = SGMCMC(kernel.refined(), num_samples, 2 * warmup_steps, num_chains, **options)
    for mcmc in (coarse, fine):
        mcmc.run(*args, **kwargs)
    pairs = [mcmc.get_samples(group_by_chain=True) for mcmc in (coarse, fine)]
    return {name: _compare(pairs[0][name], pairs[1][name]) for name in pairs[0]}


def _compare(coarse: Float[Tensor, "C S *shape"], fine: Float[Tensor, "C S *shape"]) -> dict[str, Tensor]:
    means, variances = zip(*[_moments(draws) for draws in (coarse, fine)], strict=True)
    return {
        "mean shift": (means[0][0] - means[1][0]) / variances[1][0].sqrt(),
        "mean z": _standardized_difference(*means),
        "variance ratio": variances[0][0] / variances[1][0],
        "variance z": _standardized_difference(*variances),
    }


def _moments(draws: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Mean and variance, each with the square of its standard error."""
    deviations = (draws - draws.mean((0, 1))) ** 2
    return [(x.mean((0, 1)), x.var((0, 1)) / effective_sample_size(x)) for x in (draws, deviations)]


def _standardized_difference(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    return (a[0] - b[0]) / (a[1] + b[1]).sqrt()
