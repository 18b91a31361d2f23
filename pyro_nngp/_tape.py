"""Recording a function of tensors, gradients included, as the torch operations of one run, to replay them.

Handlers, distributions, modules and autograd's graph cost the same in every run of a Pyro program. A :class:`Tape`
runs it once, below all of these, and keeps the operations whose results depend on the arguments.
Replaying them gives the same numbers, rounding included, as long as a new run would execute the same operations.
Where a run branches on a value (``if``, ``bool``), the tape notes the branch, and a replay at values that would take
another one raises :class:`AnotherBranch`. Sizes that depend on values, such as the number of distinct rows of a
minibatch, are those that differ between two runs; a replay reads them off the tensors that have them.

A tape may hold ``torch.autograd.grad``: the operations of a backward pass are operations like any other. Calls that
torch cannot look into, such as calls of compiled code, are marked by :func:`operation`.

Cost: one run of the function, or two; a replay takes 2 to 4 microseconds per operation beyond the arithmetic.
"""

import functools
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_nngp._checks import fail

aten = torch.ops.aten
_here = threading.local()
_READS = (aten._local_scalar_dense.default, aten.equal.default)
_SHAPE_ONLY = {aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default}
_SHAPE_ONLY |= {getattr(aten, f"new_{kind}").default for kind in ("zeros", "ones", "full", "empty", "empty_strided")}
_COPIES = {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default, aten.expand.default}
_COPIES |= {aten.view.default, aten._unsafe_view.default, aten.sum.default, aten.sum.dim_IntList}
_NEUTRAL = {aten.mul.Tensor: 1, aten.div.Tensor: 1, aten.add.Tensor: 0, aten.sub.Tensor: 0, aten.pow.Tensor_Scalar: 1}


class AnotherBranch(RuntimeError):
    """A replay met values at which the function would execute other operations."""


def operation(function: Callable) -> Callable:
    """Mark a function as one operation of a :class:`Tape`.

    The function must not change its arguments, which are numbers, tensors, and tuples of them.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        recorder = getattr(_here, "recorder", None)
        if recorder is None:
            return function(*args, **kwargs)
        with _recording(None):
            result = function(*args, **kwargs)
        recorder.add(Step(run, args, kwargs, result))
        return result

    return run


class Tape:
    """The operations of ``function(*examples)``, for replays at other values.

    Args:
        where: name of the caller, for messages.
        function: maps tensors to a tuple of tensors. Nothing else that it reads may change between runs.
        examples: tensors to record it at; values have their shapes and dtypes.
        others: other values, for a function in which sizes vary; None where they do not.
        most_bytes: memory for intermediate results while recording; None has no limit.
        draws: whether the results may depend on random draws. A replay then draws all that the function draws, in its
            order and from the same generators, so that their states end up the same.

    Attributes:
        source: the operations that a replay executes, as Python code.

    Raises:
        ValueError: if the examples are on another device than the CPU, or one run does not determine the operations:
            for numbers other than integers and booleans that are read out of tensors that depend on the examples,
            results whose shape depends on values, random draws (but see `draws`), and changes in place of tensors from
            outside; or if two runs differ in more than sizes, or the memory does not suffice.
    """

    def __init__(
        self,
        where: str,
        function: Callable[..., tuple[Tensor, ...]],
        *examples: Tensor,
        others: tuple[Tensor, ...] | None = None,
        most_bytes: int | None = None,
        draws: bool = False,
    ) -> None:
        if any(example.device.type != "cpu" for example in examples):
            _refuse(where, "computes on another device than the CPU")

        options: dict[str, Any] = {"sizes_vary": others is not None, "most_bytes": most_bytes, "draws": draws}
        steps, results = recorded(where, function, examples, **options)
        if others is not None:
            twins, _ = recorded(where, function, others, **options)
            steps = _with_sizes(where, (steps, examples), (twins, others))
        writer = _Writer(steps, examples)
        self.source = writer.write(results)
        exec(self.source, writer.globals)
        self._run = writer.globals["replay"]

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The results at `values`, without gradients.

        Raises:
            AnotherBranch: if a run would execute other operations.
        """
        with torch.no_grad():
            return self._run(*values)


def recorded(
    where: str,
    function: Callable[..., tuple[Tensor, ...]],
    examples: tuple[Tensor, ...],
    *,
    sizes_vary: bool = False,
    most_bytes: int | None = None,
    draws: bool = False,
) -> "tuple[list[Step], tuple[Tensor, ...]]":
    """The operations of ``function(*examples)`` that depend on the examples and that its results need, and the results.

    Arguments are those of :class:`Tape`, which raises the same errors.
    """
    recorder = _Recorder(where, most_bytes)
    with _recording(recorder), recorder:
        results = function(*examples)
    return _needed(where, _dependent(where, recorder.steps, examples, sizes_vary), results, draws), results


class Step(NamedTuple):
    """An operation of a recording: a function, its arguments and its result."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    result: Any

    def inputs(self) -> list[Tensor]:
        """Tensors among the arguments."""
        return _tensors((self.args, self.kwargs))

    def outputs(self) -> list[Tensor]:
        """Tensors in the result."""
        return _tensors(self.result)

    def run(self, values: dict[int, Tensor]) -> None:
        """Add the results at other values to the values, which have the ids of tensors of the recording as keys."""
        args, kwargs = map_aggregate(
            (self.args, self.kwargs), lambda leaf: values.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf
        )
        again = self.function(*args, **kwargs)
        values.update(zip(map(id, self.outputs()), _tensors(again), strict=True))

    def selects(self) -> bool:
        return self.function is aten.index.Tensor

    def has(self, tag: torch.Tag) -> bool:
        return isinstance(self.function, OpOverload) and self.function not in _READS and tag in self.function.tags

    def draws(self) -> bool:
        return self.has(torch.Tag.nondeterministic_seeded)

    def written(self) -> list[Tensor]:
        """Arguments that the operation changes in place."""
        if not isinstance(self.function, OpOverload):
            return []
        names = self.function._schema.arguments
        given = {**dict(zip((a.name for a in names), self.args, strict=False)), **self.kwargs}
        changed = [given.get(a.name) for a in names if a.alias_info is not None and a.alias_info.is_write]
        return _tensors(changed)


class _Recorder(TorchDispatchMode):
    """Records all operations, and keeps all tensors, so that the id of each stays unique."""

    def __init__(self, where: str, most_bytes: int | None) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._where, self._left = where, math.inf if most_bytes is None else most_bytes

    def add(self, step: Step) -> None:
        self.steps.append(step)
        given = {_memory(tensor) for tensor in step.inputs()}
        self._left -= sum(t.untyped_storage().nbytes() for t in _tensors(step.result) if _memory(t) not in given)
        if self._left < 0:
            _refuse(self._where, "has larger intermediate results than are to be kept")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(_here, "recorder", None) is self:
            self.add(Step(func, args, kwargs or {}, result))
        return result


@contextmanager
def _recording(recorder: _Recorder | None) -> Iterator[None]:
    before, _here.recorder = getattr(_here, "recorder", None), recorder
    try:
        yield
    finally:
        _here.recorder = before


def _dependent(where: str, steps: list[Step], examples: tuple[Tensor, ...], sizes_vary: bool) -> list[Step]:
    """Steps to replay: they depend on the examples or on random draws, or use memory that is rewritten."""
    fixed = set() if sizes_vary else _SHAPE_ONLY
    rewritten = {_memory(t) for step in steps for t in step.written()} - {0}
    known, memory, made, kept = {id(t) for t in examples}, {_memory(t) for t in examples}, set[int](), []
    for step in steps:
        for tensor in step.inputs():
            if id(tensor) not in made and _memory(tensor) in rewritten:
                _refuse(where, "changes a tensor in place that existed before")
            if id(tensor) not in known and _memory(tensor) in memory:
                _refuse(where, "passes values on outside torch")
        results = _tensors(step.result)
        depends = any(id(t) in known for t in step.inputs()) and step.function not in fixed
        if depends or step.draws() or any(_memory(t) in rewritten for t in results):
            kept.append(step)
            known.update(map(id, results))
            memory.update(_memory(t) for t in results if t.numel())
        made.update(map(id, results))
    return kept


def _needed(
    where: str, steps: list[Step], results: tuple[Tensor, ...], draws: bool, every_draw: bool = False
) -> list[Step]:
    """Steps that the results or a branch need, with writes to their memory, and all draws if any is needed."""
    varying, used, kept = _made(steps), {id(t) for t in results}, []
    memory, drawn = {_memory(t) for t in results}, _drawn(steps)
    for step in reversed(steps):
        masks = [t for t in step.args[1] if t is not None and t.dtype == torch.bool] if step.selects() else []
        if any(id(t) in varying for t in masks) or (step.has(torch.Tag.dynamic_output_shape) and not step.selects()):
            _refuse(where, "selects by values, so that shapes depend on them")  # used or not: a branch may ask for them
        written = any(_memory(t) in memory for t in step.written()) or (every_draw and step.draws())
        if not (step.function in _READS or written or any(id(t) in used for t in _tensors(step.result))):
            continue
        if step.draws() and not draws:
            _refuse(where, "draws random numbers")
        if step.draws() and not every_draw:
            return _needed(where, steps, results, draws, every_draw=True)
        if step.function is aten._local_scalar_dense.default and _is_number(step.args[0], drawn):
            _refuse(where, "reads a number out of a tensor")
        used.update(map(id, step.inputs()))
        memory.update(map(_memory, step.inputs()))
        kept.append(step)
    return kept[::-1]


def _drawn(steps: list[Step]) -> set[int]:
    """Results that depend on random draws."""
    drawn = set[int]()
    for step in steps:
        if step.draws() or any(id(t) in drawn for t in step.inputs()):
            drawn.update(map(id, _tensors(step.result)))
    return drawn


def _is_number(tensor: Tensor, drawn: set[int]) -> bool:
    """Whether a value that is read is a number, rather than a branch or a size."""
    return tensor.is_floating_point() or (id(tensor) in drawn and tensor.dtype != torch.bool)


class _Size(NamedTuple):
    """The size of a tensor in one dimension."""

    tensor: Tensor
    dim: int


def _with_sizes(
    where: str, recorded: tuple[list[Step], tuple[Tensor, ...]], again: tuple[list[Step], tuple[Tensor, ...]]
) -> list[Step]:
    """The steps of a recording; sizes in which a second recording differs are read off tensors that have them."""
    names: tuple[dict[int, tuple[int, int]], ...] = {}, {}  # which result of which step a tensor is
    sizes: dict[tuple[int, int], _Size] = {}

    def learn(number: int, results: tuple[Any, Any]) -> None:
        for place, pair in enumerate(zip(*map(_tensors, results), strict=True)):
            for name, tensor in zip(names, pair, strict=True):
                name.setdefault(id(tensor), (number, place))
            for dim, (one, other) in enumerate(zip(pair[0].shape, pair[1].shape, strict=True)):
                if one != other:
                    sizes.setdefault((one, other), _Size(pair[0], dim))

    def same(one: Any, other: Any) -> Any:
        if isinstance(one, Tensor):
            known = names[0].get(id(one))
            constant = known is None and one.shape == other.shape and (one is other or torch.equal(one, other))
            if known != names[1].get(id(other)) or not (known is not None or constant):
                _refuse(where, "has other constants or operations in another run")
        elif type(one) is int and one != other and (one, other) in sizes:
            return sizes[one, other]
        elif type(one) in (int, float, bool) and one != other:
            _refuse(where, "has other numbers in another run")
        return one

    (steps, examples), (twins, others) = recorded, again
    if [step.function for step in steps] != [twin.function for twin in twins]:
        _refuse(where, "has other operations in another run")
    learn(-1, (examples, others))
    sized = []
    for number, (step, twin) in enumerate(zip(steps, twins, strict=True)):
        mine, theirs = ((*one.args, *one.kwargs.values()) for one in (step, twin))
        pairs = iter([same(*pair) for pair in zip(_leaves(mine), _leaves(theirs), strict=True)])
        args = _filled(step.args, pairs)
        kwargs = {name: _filled(value, pairs) for name, value in step.kwargs.items()}
        sized.append(step._replace(args=args, kwargs=kwargs))
        learn(number, (step.result, twin.result))
    return sized


def _made(steps: list[Step]) -> set[int]:
    return {id(t) for step in steps for t in _tensors(step.result)}


class _Writer:
    """Writes steps as Python code, without steps that change nothing or repeat another."""

    def __init__(self, steps: list[Step], examples: tuple[Tensor, ...]) -> None:
        self.globals: dict[str, Any] = {}
        self._steps, self._last_use = steps, dict[str, int]()
        self._varying = {id(t) for t in examples} | _made(steps)
        self._rewritten = {_memory(t) for step in steps for t in step.written()} - {0}
        self._place = {id(t): f"value_{i}" for i, t in enumerate(examples)}
        self._lines = [f"def replay({', '.join(self._place.values())}):"]
        self._seen: dict[str, str] = {}
        self._source: dict[int, Step] = {}

    def write(self, results: tuple[Tensor, ...]) -> str:
        """The code of a function `replay`, to be run in :attr:`globals`."""
        for step in self._steps:
            copied = self._copied(step)
            if copied is not None:
                self._place[id(step.result)] = self._write_value(copied)
            elif step.function in _READS:
                self._lines.append(f"branch({self._write_call(step)}, {step.result!r})")
            else:
                self._write_step(step)
        self._lines.append(f"return {self._write_value(tuple(results))}")
        self.globals["branch"] = _branch
        for name, last in self._last_use.items():
            if last < len(self._lines) - 1:
                self._lines[last] += f"; {name} = None"  # so that its memory serves another result
        return "\n    ".join(self._lines)

    def _write_step(self, step: Step) -> None:
        call = self._write_call(step)
        name = None if step.draws() or self._is_rewritten(step) else self._seen.get(call)
        if name is None:
            name = self._seen[call] = f"result_{len(self._lines)}"
            self._lines.append(f"{name} = {call}")
        self._name(step.result, name)
        if isinstance(step.result, Tensor):
            self._source[id(step.result)] = step

    def _write_call(self, step: Step) -> str:
        parts = [self._write_value(value) for value in step.args]
        parts += [f"{name}={self._write_value(value)}" for name, value in step.kwargs.items()]
        return f"{self._write_value(step.function)}({', '.join(parts)})"

    def _write_value(self, value: Any) -> str:
        if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, _Size):
            return f"{self._write_value(value.tensor)}.shape[{value.dim}]"
        if isinstance(value, list):
            return f"[{', '.join(map(self._write_value, value))}]"
        if isinstance(value, tuple):
            inner = "".join(f"{self._write_value(part)}, " for part in value)
            return f"{self._write_value(type(value))}({inner})" if hasattr(value, "_fields") else f"({inner})"
        if id(value) not in self._place:
            self._place[id(value)] = name = f"{_name_of(value)}_{len(self.globals)}"
            self.globals[name] = value.detach() if isinstance(value, Tensor) else value
        place = self._place[id(value)]
        if place.startswith("result_"):
            self._last_use[place.split("[")[0]] = len(self._lines)
        return place

    def _name(self, result: Any, place: str) -> None:
        if isinstance(result, Tensor):
            self._place.setdefault(id(result), place)
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                self._name(part, f"{place}[{i}]")

    def _is_rewritten(self, step: Step) -> bool:
        return any(_memory(t) in self._rewritten for t in (*step.inputs(), *_tensors(step.result)))

    def _copied(self, step: Step) -> Tensor | None:
        """The argument that equals the result of a step, or None."""
        if not isinstance(step.result, Tensor) or self._is_rewritten(step):
            return None
        first, other = (*step.args, None)[:2]
        if step.function is aten.neg.default:
            before = self._source.get(id(first))
            return before.args[0] if before is not None and before.function is aten.neg.default else None
        if step.function is aten.mul.Tensor and id(first) not in self._varying:
            first, other = other, first
        nothing = step.function in _COPIES or (step.function in _NEUTRAL and self._is(other, _NEUTRAL[step.function]))
        return first if nothing and isinstance(first, Tensor) and _form(first) == _form(step.result) else None

    def _is(self, value: Any, number: int) -> bool:
        return id(value) not in self._varying and bool(torch.as_tensor(value == number).all())


def _name_of(value: Any) -> str:
    """A name in the code for an operation or a constant."""
    text = str(value) if isinstance(value, OpOverload) else getattr(value, "__name__", "constant")
    return re.sub(r"\W", "_", text)


def _branch(value: Tensor | bool, decided: Any) -> None:
    if value != decided:
        raise AnotherBranch(f"a branch on {value}, recorded on {decided}")


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    map_aggregate(tree, leaves.append)
    return leaves


def _filled(tree: Any, leaves: Iterator[Any]) -> Any:
    return map_aggregate(tree, lambda _: next(leaves))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, Tensor)]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refuse(where: str, what: str) -> None:
    fail(where, "a function", "whose operations one run determines", f"one that {what}", "Run it each time.")
