"""Replay: the tensor operations of a loss and its gradient, recorded once and run on other rows and parameters.

A step with a thousand rows spends more time in Pyro's handlers, modules, distributions and autograd's graph than in
tensor operations. Model and guide run as usual until data, neighbors and solved parameters have not changed for twenty
steps; then the operations of one evaluation, gradient included, are recorded (:mod:`pyro_nngp._tape`) and replayed.
Results are the same to the last bit; random draws are made anew, from the same generators. The program runs as usual
where it would take another branch. It is never recorded if one run does not determine its operations (numbers read out
of tensors), or if an evaluation takes more than 0.1 s.

Cost: a recording takes about four evaluations; a replay 2 - 4 microseconds per operation beyond the arithmetic.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_nngp._checks import warn
from pyro_nngp._tape import AnotherBranch, Tape
from pyro_nngp.inference._validation import validation_off
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.variational.gaussian import reads_as_leaves

_WAIT, _CHECK_EVERY, _TRIES = 20, 200, 3  # unchanged steps before a recording; replays from one check to the next
_MOST_BYTES, _MOST_SECONDS = 2**28, 0.1  # of an evaluation that is recorded; of longer ones the arithmetic dominates
_NUMBERS = (bool, int, float)


class Replay:
    """Losses and gradients of a program on batches of rows.

    Args:
        evaluate: maps rows to the loss.
        elbo: the loss that it evaluates.
        modules: the modules of model and guide.
        params: the parameters that are trained; others are constants until they change.
        local: identities of parameters with a row per datum, whose gradients are sparse.
        generator: the generator that `evaluate` draws from besides torch's.
    """

    def __init__(
        self,
        evaluate: Callable[[Tensor], Tensor],
        elbo: ELBO,
        modules: list[nn.Module],
        params: list[Tensor],
        local: set[int],
        generator: torch.Generator,
    ) -> None:
        self._evaluate, self._params = evaluate, params
        self._generators = [torch.default_generator, generator]
        self._dense = [param for param in params if id(param) not in local]
        self._trained = {id(param) for param in params}
        self._parts = [part for module in modules for part in module.modules()]
        self._owners = [elbo, *self._parts]
        self._possible = True
        self._tape: Tape | None = None
        self._layout: list[int] = []  # the parameter of each gradient
        self._constants, self._age, self._count = self._versions(), 0, 0

    def __call__(self, rows: Tensor | None) -> Tensor | None:
        """The loss at some rows, with gradients in ``param.grad``; None if the caller has to run the program."""
        if not self._possible or rows is None:
            return None
        constants = self._versions()
        self._age = self._age + 1 if constants == self._constants else 0
        if self._age < _WAIT:
            self._constants, self._tape = constants, None
            return None
        if self._tape is None:
            self._record(rows)
        if self._tape is None:
            return None
        before = self._states()
        try:
            result = self._tape(rows, *self._params)
        except AnotherBranch:
            self._set(before)
            return None
        except (RuntimeError, IndexError):  # a size that had been the same by chance
            self._set(before)
            self._tape, self._age = None, 0
            return None
        self._count += 1
        if self._count % _CHECK_EVERY == 0 and not _are_close(result, self._run_from(before, rows)):
            self._set(before)
            warn(
                "fit: the loss at the same rows and parameters has changed during the run, which is possible where a "
                "function counts its calls. Model and guide are run at every step from here on; "
                "pass replay=False to have that from the first one."
            )
            self._possible = False
            return None
        self._place(result)
        return result[0]

    def _record(self, rows: Tensor) -> None:
        """Record the program at two sets of rows, and check the recording at a third one."""
        others = [(rows + shift).remainder(int(rows.max()) + 1) for shift in range(1, _TRIES + 2)]
        params, self._possible, before = self._params, False, self._states()
        options: dict[str, Any] = {"most_bytes": _MOST_BYTES, "draws": True}
        with suppress(ValueError, NotPositiveDefiniteError):
            if min(self._seconds(rows) for _ in range(2)) <= _MOST_SECONDS:
                for second, third in pairwise(others):  # again where sizes of the two happen to be the same
                    tape = Tape("fit", self._run, rows, *params, others=(second, *params), **options)
                    expected = self._run_from(before, third)
                    self._set(before)
                    with suppress(RuntimeError, IndexError):
                        if _are_close(tape(third, *params), expected):
                            self._tape, self._possible = tape, True
                            break
        self._set(before)

    def _run_from(self, states: list[Tensor], rows: Tensor) -> tuple[Tensor, ...]:
        """:meth:`_run` with the draws that follow some states of the generators."""
        self._set(states)
        return self._run(rows)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _run(self, rows: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        """The loss, the gradient of each dense parameter, and for each read of a table its rows and their gradient."""
        with reads_as_leaves() as reads, validation_off(), torch.enable_grad():
            loss = self._evaluate(rows)
            leaves = [*self._params, *(read.values for read in reads)]
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        places = {id(param): place for place, param in enumerate(self._params)}
        layout, result = [], [loss.detach()]
        for place, grad in enumerate(grads[: len(self._params)]):
            if grad is not None:
                layout.append(place)
                result.append(grad)
        for read, grad in zip(reads, grads[len(self._params) :], strict=True):
            if id(read.table) in places and grad is not None:
                layout.append(places[id(read.table)])
                result += [read.rows, grad]
        self._layout = layout
        return tuple(result)

    def _seconds(self, rows: Tensor) -> float:
        start = time.thread_time()
        self._run(rows)
        return time.thread_time() - start

    def _place(self, result: tuple[Tensor, ...]) -> None:
        """Set ``param.grad`` of each parameter from the outputs of :meth:`_run`."""
        rest = iter(result[1:])
        for place in self._layout:
            param, grad = self._params[place], next(rest)
            if grad.dtype == torch.int64:
                grad = torch.sparse_coo_tensor(grad[None], next(rest), param.shape, check_invariants=False)
            param.grad = grad if param.grad is None else param.grad + grad

    def _versions(self) -> list[Any]:
        """Numbers, and versions of tensors, that model, guide and ELBO read; trained parameters are left out."""
        numbers = [value for part in self._owners for value in vars(part).values() if type(value) in _NUMBERS]
        versions: list[Any] = numbers
        for part in self._parts:
            for tensor in chain(part._buffers.values(), part._parameters.values()):
                if tensor is not None and id(tensor) not in self._trained:
                    versions.append((id(tensor), tensor._version))
        return versions


def _are_close(result: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether two evaluations agree, within a tolerance far above rounding."""
    return [one.shape for one in result] == [one.shape for one in expected] and all(map(_is_close, result, expected))


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not other.dtype.is_floating_point:
        return torch.equal(one, other)
    size = torch.finfo(other.dtype).eps ** 0.5 * other.abs().amax() if other.numel() else 0
    return bool(((one - other).abs() <= size).all()) or not bool(other.isfinite().all())
