"""Versions of tensors: whether anything that a result depends on has changed since, without looking at large values.

Cost: O(tensors) and the values of small ones.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")

_FEW = 64  # numbers of a tensor whose values are compared: they can be written past its version


class Versions:
    """The state of some tensors at one time; equal states have the same tensors, unchanged.

    In-place operations on a tensor raise its version, except through ``.data`` and by compiled code, which has to
    raise it by itself. Values of small tensors count, too.

    Args:
        tensors: all that a result depends on.
        others: numbers that it depends on, too.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensors: Iterable[Tensor], *others: object) -> None:
        self._tensors = [(weakref.ref(tensor), _state(tensor)) for tensor in tensors]
        self._others = others

    @classmethod
    def of(cls, module: nn.Module, *others: object) -> "Versions":
        """The state of all parameters and buffers of a module."""
        return cls(_tensors_of(module), *others)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Versions) or len(self._tensors) != len(other._tensors):
            return False
        pairs = zip(self._tensors, other._tensors, strict=True)
        same = all(one() is two() is not None and state == then for (one, state), (two, then) in pairs)
        return same and self._others == other._others

    def __reduce__(self) -> tuple:
        return Versions, ((),)  # of other tensors, whatever a copy is of


class Kept(Generic[Result]):
    """The last result of a function, kept while all that it depends on is unchanged; copies and pickles start empty."""

    def __init__(self) -> None:
        self._known: tuple[Versions, Result] | None = None

    def get(self, versions: Versions | None, find: Callable[[], Result]) -> Result:
        """The result of `find` when the versions last were these; with None it is called anew.

        It is computed without gradients, and outside of inference mode, since later gradients may need it.
        """
        known = self._known
        if known is None or versions is None or known[0] != versions:
            with torch.inference_mode(False), torch.no_grad():
                result = find()
            self._known = None if versions is None else (versions, result)
            return result
        return known[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": None}


class Attributes:
    """The values of the attributes of some objects at one time; equal ones are the same objects."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, objects: Iterable[object]) -> None:
        self._values = [value for one in objects for value in vars(one).values()]
        self._states = [_state(value) for value in self._values if isinstance(value, Tensor)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attributes) or len(self._values) != len(other._values):
            return False
        return all(map(is_, self._values, other._values)) and self._states == other._states


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of a module and its parts; of parts that stand twice, twice."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor
    for part in module._modules.values():
        if part is not None:
            yield from _tensors_of(part)


def _state(tensor: Tensor) -> tuple[object, ...]:
    is_small = tensor.numel() <= _FEW and tensor.is_cpu  # elsewhere it would wait for the device
    few = tensor.detach().reshape(-1).tolist() if is_small else None
    return object() if tensor.is_inference() else tensor._version, tensor.data_ptr(), few
