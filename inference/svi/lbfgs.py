r"""Limited-memory BFGS for hyperparameters: few parameters, and a loss without noise on a fixed set of rows.

With s and y the last moves and changes of the gradient, the two-loop recursion gives the direction
:math:`d = -H \nabla L`; a backtracking search accepts the first :math:`t \in \{1, ...\}` with

.. math:: L(p + t d) \le L(p) + 10^{-4}\, t\, d^\top \nabla L .

Differs from ``torch.optim.LBFGS``: no coordinate moves by more than 1 at once (hyperparameters are logarithms,
whose loss is far from quadratic at that distance), a loss that is not finite shortens the step, and an accepted point
is not evaluated again. About 20 evaluations replace hundreds of steps of Adam.

Cost: one or two evaluations per step, and twenty inner products.

Reference: Liu, Nocedal (1989), "On the limited memory BFGS method for large scale optimization".
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_HISTORY = 10  # pairs (s, y) kept
_MOST = 1.0  # largest move of a coordinate per step
_DECREASE = 1e-4  # Armijo's constant
_FIRST_MOVE = 0.3  # of the largest coordinate, while no curvature is known
_MAX_HALVINGS = 10
_ROUNDING = 1e-7  # relative error of a loss in single precision


class LBFGS:
    """L-BFGS steps on parameters, in place and in double precision.

    Args:
        params: the parameters.

    Attributes:
        start_loss: the loss before the first step since the objective last changed.
        informed: whether the curvature that is known goes back to steps on another objective.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._loss: float | None = None
        self.start_loss, self.informed = math.inf, False
        self._gradient = torch.zeros_like(self._read(self.params))

    def step(self, closure: Callable[[], float]) -> float:
        """One step; returns the loss after it.

        Args:
            closure: computes the loss and leaves its gradient in ``param.grad``; infinity or NaN where it is undefined.

        Raises:
            ArithmeticError: if the loss is not finite at the start of the step.
        """
        start = self.place
        if self._loss is None:
            self._loss, self._gradient = self._evaluate(closure)
            self.start_loss = self._loss
        loss, gradient = self._loss, self._gradient
        if not math.isfinite(loss):
            raise ArithmeticError(f"loss {loss}")
        if not self.params:  # all are held
            return loss
        direction = self._direction(gradient)
        slope, size = float(direction @ gradient), 1.0
        for _ in range(_MAX_HALVINGS):
            self._write(start + size * direction)
            new_loss, new_gradient = self._evaluate(closure)
            if new_loss <= loss + _DECREASE * size * slope + _ROUNDING * abs(loss):
                break
            size *= _shorter(size, slope, new_loss - loss)
        else:  # rounding, or outdated curvature
            self._write(start)
            self._clear()
            return loss
        move, change = size * direction, new_gradient - gradient
        if move @ change > 1e-10 * float(change @ change):
            self._pairs = [*self._pairs[1 - _HISTORY :], (move, change)]
        self._loss, self._gradient = new_loss, new_gradient
        return new_loss

    @property
    def place(self) -> Tensor:
        """The parameters, in one vector of double precision."""
        return self._read([p.detach() for p in self.params])

    @place.setter
    def place(self, place: Tensor) -> None:
        self._write(place)

    @property
    def expected_gain(self) -> float:
        """Fall of the loss that the next step would have if it were quadratic; infinity while no curvature is known."""
        return -float(self._direction(self._gradient) @ self._gradient) / 2 if self._pairs else math.inf

    def forget(self) -> None:
        """Evaluate the loss again at the next step, for a new objective."""
        self._loss = None

    def follow(self, other: "LBFGS") -> None:
        """Start with the curvature that steps on another objective have found, of as many parameters."""
        if len(other._gradient) == len(self._gradient):
            self._take(other._pairs)
            self.informed = bool(self._pairs)

    def state_dict(self) -> dict[str, Any]:
        """Losses, gradient and history."""
        pairs = [list(pair) for pair in self._pairs]
        known = {"gradient": self._gradient, "pairs": pairs, "informed": self.informed}
        return {"loss": self._loss, "start_loss": self.start_loss} | known

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._loss, self.start_loss = state["loss"], state["start_loss"]
        self._gradient = state["gradient"].to(self._gradient)
        self._take(state["pairs"])
        self.informed = state.get("informed", False)  # not in earlier files

    def _take(self, pairs: Sequence[Sequence[Tensor]]) -> None:
        self._pairs = [(move.to(self._gradient), change.to(self._gradient)) for move, change in pairs]

    def _clear(self) -> None:
        self._pairs.clear()
        self.informed = False

    def _direction(self, gradient: Tensor) -> Tensor:
        direction, alphas = -gradient, []
        for move, change in reversed(self._pairs):
            alpha = (move @ direction) / (move @ change)
            direction = direction - alpha * change
            alphas.append(alpha)
        if self._pairs:
            move, change = self._pairs[-1]
            direction = direction * ((move @ change) / (change @ change))
        for (move, change), alpha in zip(self._pairs, reversed(alphas), strict=True):
            direction = direction + (alpha - (change @ direction) / (move @ change)) * move
        if not self._pairs or not direction @ gradient < 0:
            self._clear()
            direction = -gradient * (_FIRST_MOVE / gradient.abs().max().clamp(min=1e-30))
        return direction * min(1.0, _MOST / max(float(direction.abs().max()), 1e-30))

    def _evaluate(self, closure: Callable[[], float]) -> tuple[float, Tensor]:
        loss = closure()
        gradient = self._read([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
        return (loss if loss != -math.inf and bool(gradient.isfinite().all()) else math.inf), gradient

    def _read(self, values: Sequence[Tensor]) -> Tensor:
        parts = [value.double().reshape(-1) for value in values]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def _write(self, place: Tensor) -> None:
        parts = place.split([p.numel() for p in self.params])
        for param, part in zip(self.params, parts, strict=True):
            param.copy_(part.view_as(param))


def _shorter(size: float, slope: float, rise: float) -> float:
    """Factor that shortens a step: the minimum of the interpolating parabola, within 0.1 and 0.5."""
    if not math.isfinite(rise):
        return 0.5
    return min(0.5, max(0.1, -slope * size / (2 * (rise - slope * size))))
