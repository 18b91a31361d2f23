"""Versions of tensors: whether anything that a result depends on has changed since, without looking at large values.

Cost: O(tensors) and the values of small ones.
"""

import weakref
from collections.abc import Iterable
from itertools import chain

from torch import Tensor, nn

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
        return cls(chain(module.parameters(), module.buffers()), *others)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Versions) or len(self._tensors) != len(other._tensors):
            return False
        pairs = zip(self._tensors, other._tensors, strict=True)
        same = all(one() is two() is not None and state == then for (one, state), (two, then) in pairs)
        return same and self._others == other._others

    def __reduce__(self) -> tuple:
        return Versions, ((),)  # of other tensors, whatever a copy is of


def _state(tensor: Tensor) -> tuple[object, ...]:
    is_small = tensor.numel() <= _FEW and tensor.device.type == "cpu"  # elsewhere it would wait for the device
    few = tensor.detach().reshape(-1).tolist() if is_small else None
    return object() if tensor.is_inference() else tensor._version, tensor.data_ptr(), few
