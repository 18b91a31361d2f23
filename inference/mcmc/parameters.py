"""Parameters of a model that are not sampled: optimization during burn-in, and a warning if nothing trains them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_nngp._checks import fail, warn
from pyro_nngp.inference.protocols import Checked, offers, owner_of


def warn_of_starts(where: str, model: Callable, more: str) -> None:
    """Warn if hyperparameters of a method that a run leaves alone still have the values that they started with.

    Args:
        where: name of the caller.
        model: any program; only the model of a method can be warned of.
        more: another cure.
    """
    method = owner_of(model)
    started = method.started_hyperparameters if offers(method, Checked) else {}
    kept = [name for name, has_changed in started.items() if not has_changed]
    if kept:
        warn(
            f"{where}: {kept} have no priors and stay at rough starts from the data, which intervals and draws depend "
            f"on. Fit the model before, or give them priors{more}."
        )


class ParameterOptimizer:
    """Takes gradient steps on the unconstrained parameters of a model.

    Args:
        where: name of the caller, for messages.
        leaves: unconstrained leaf tensor of each parameter; parameters that require no gradient stay as they are.
        optim: a constructor ``tensors -> torch.optim.Optimizer``, arguments of Adam, or None, which keeps all
            parameters fixed.

    Raises:
        ValueError: if there is nothing to optimize.
    """

    def __init__(
        self,
        where: str,
        leaves: dict[str, Tensor],
        optim: Callable[[list[Tensor]], torch.optim.Optimizer] | dict[str, Any] | None,
    ) -> None:
        self.leaves = (
            {} if optim is None else {name: leaves[name] for name in sorted(leaves) if leaves[name].requires_grad}
        )
        self._optimizer: torch.optim.Optimizer | None = None
        if optim is not None:
            if not self.leaves:
                fail(where, "optim", "to come with parameters that require gradients", "none", "Drop optim.")
            tensors = list(self.leaves.values())
            self._optimizer = torch.optim.Adam(tensors, **optim) if isinstance(optim, dict) else optim(tensors)

    def step(self, gradients: list[Tensor | None]) -> None:
        """Take one gradient step on all parameters."""
        if self._optimizer:
            for leaf, gradient in zip(self.leaves.values(), gradients, strict=True):
                leaf.grad = gradient
            self._optimizer.step()
            self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Values of the parameters and state of the optimizer."""
        return {
            "params": {name: leaf.detach().clone() for name, leaf in self.leaves.items()},
            "optimizer": copy.deepcopy(self._optimizer.state_dict()) if self._optimizer else None,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a state."""
        if self._optimizer:
            with torch.no_grad():
                for name, leaf in self.leaves.items():
                    leaf.copy_(saved["params"][name])
            self._optimizer.load_state_dict(saved["optimizer"])
