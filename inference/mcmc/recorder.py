"""Statistics of HMC and NUTS at each draw, by a hook of ``pyro.infer.MCMC``, which itself keeps numbers per chain."""

from collections import defaultdict
from typing import Any

import numpy as np
from pyro.infer.mcmc import HMC, NUTS
from torch import Tensor

from pyro_nngp._checks import fail

RECORD = "recorded"  # entry of the diagnostics of a chain
_KEPT = "_recorded_draws"  # attribute of a kernel


class Recorder:
    """Hook of ``pyro.infer.MCMC`` that keeps statistics of each draw of ``HMC`` and ``NUTS`` for :func:`to_arviz`.

    Use::

        mcmc = MCMC(NUTS(model), num_samples=500, warmup_steps=500, num_chains=4, hook_fn=Recorder())
        mcmc.run(x, y)
        to_arviz(mcmc).sample_stats

    The statistics have the names of ArviZ:

    - ``lp``: log joint density in unconstrained space;
    - ``energy``: the Hamiltonian where the trajectory starts, which the integrator conserves but for its error;
    - ``acceptance_rate``: mean acceptance probability along the trajectory;
    - ``step_size``; ``n_steps``, the gradients of the trajectory; of NUTS ``tree_depth``, ``reached_max_tree_depth``.

    Args:
        warmup: keep the draws of the warm-up and their statistics as well, as ``warmup_posterior`` and
            ``warmup_sample_stats``.

    The first draw of a run without warm-up has no energy and no number of steps: a hook is first called after it.
    """

    def __init__(self, warmup: bool = False) -> None:
        self.warmup = warmup

    def __call__(self, kernel: Any, samples: dict[str, Tensor], stage: str, i: int) -> None:
        """Record a draw; called by ``MCMC``.

        Raises:
            TypeError: if the kernel is neither HMC nor NUTS.
        """
        if not isinstance(kernel, HMC):
            cure = "Other kernels report by themselves."
            fail("Recorder", "the kernel", "to be HMC or NUTS", type(kernel).__name__, cure, TypeError)
        record = kernel.__dict__.get(_KEPT)
        if record is None:
            record = _Record(kernel)
            setattr(kernel, _KEPT, record)
        record.add(samples if self.warmup else {}, stage.startswith("Warmup"))


class _Record:
    """Statistics of the draws of one kernel, which it wraps to see momenta and leaves of trajectories."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._energy, self._leaves = np.nan, np.nan
        self._start()
        kernel._sample_r, kernel.diagnostics = self._sample_momentum, self._diagnostics
        if isinstance(kernel, NUTS):
            kernel._build_basetree = self._build_leaf

    def _start(self) -> None:
        names = ("draws", "warmup", "warmup draws")
        self._parts: dict[str, defaultdict[str, list[Any]]] = {name: defaultdict(list) for name in names}
        self._mean = 0.0

    def add(self, samples: dict[str, Tensor], is_warmup: bool) -> None:
        kernel = self.kernel
        if kernel._t == 1:  # a new chain
            self._start()
        count = kernel._t if is_warmup else kernel._t - kernel._warmup_steps
        before = 0.0 if count == 1 else self._mean * (count - 1)
        self._mean = kernel._mean_accept_prob
        statistics = {
            "lp": -_number(kernel._potential_energy_last),
            "energy": self._energy,
            "acceptance_rate": min(max(self._mean * count - before, 0.0), 1.0),
            "step_size": float(kernel.step_size),
        }
        if isinstance(kernel, NUTS):
            statistics["n_steps"] = self._leaves
            statistics["tree_depth"] = np.floor(np.log2(self._leaves)) + 1 if self._leaves else 0.0
            statistics["reached_max_tree_depth"] = float(statistics["tree_depth"] >= kernel._max_tree_depth)
        else:
            statistics["n_steps"] = float(kernel.num_steps)
        self._energy, self._leaves = np.nan, 0
        for name, value in statistics.items():
            self._parts["warmup" if is_warmup else "draws"][name].append(value)
        if is_warmup:
            for name, value in samples.items():
                self._parts["warmup draws"][name].append(value.detach().cpu().numpy())

    def _sample_momentum(self, name: str) -> Any:
        kernel = self.kernel
        momentum, unscaled = type(kernel)._sample_r(kernel, name)
        if name.startswith("r_t="):  # else it looks for a step size
            self._energy = _number(kernel._kinetic_energy(unscaled) + kernel._potential_energy_last)
        return momentum, unscaled

    def _build_leaf(self, *args: Any) -> Any:
        self._leaves += 1
        return type(self.kernel)._build_basetree(self.kernel, *args)

    def _diagnostics(self) -> dict[str, Any]:
        parts = self._parts.items()
        arrays = {part: {name: _column(name, values) for name, values in kept.items()} for part, kept in parts}
        return type(self.kernel).diagnostics(self.kernel) | {RECORD: arrays}


def _number(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else float(value)


def _column(name: str, values: list[Any]) -> np.ndarray:
    column = np.stack(values)
    if name == "reached_max_tree_depth":
        return column.astype(bool)
    whole = name in ("n_steps", "tree_depth") and bool(np.isfinite(column).all())
    return column.astype(int) if whole else column
