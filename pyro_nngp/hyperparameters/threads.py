"""Pyro's global state, separate for each thread.

Pyro keeps its effect handlers, the dimensions of its plates and its parameters in globals of the process, so a program
in one thread sees the handlers and parameters of another. Importing this module replaces them by objects of the
same interface whose contents belong to the thread that uses them. A program of one thread runs as before; the
parameters of the global store remain common to all threads, as two threads may share a model.
"""

import sys
import threading
from collections import UserList
from collections.abc import Iterator
from typing import Any

from pyro.nn.module import _Context
from pyro.poutine import runtime


class HandlerStack(threading.local, UserList):
    """Pyro's stack of effect handlers: one per thread, empty at first."""

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __iter__(self) -> Iterator:
        return iter(self.data)

    def __reversed__(self) -> Iterator:
        return reversed(self.data)


class PlateDimensions(threading.local, runtime._DimAllocator):
    """Dimensions of the plates that are open in the present thread."""


class EnumeratedDimensions(threading.local, runtime._EnumAllocator):
    """Dimensions of the sites that are enumerated in the present thread."""


class ThreadContext(threading.local, _Context):
    """Pyro's context of a module and its submodules: whether it runs in the present thread, and sampled values."""

    def __reduce__(self) -> tuple:
        return ThreadContext, ()


def _replace(old: Any, new: Any) -> None:
    """Put `new` in place of `old` in every module of Pyro that refers to it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "pyro":
            for key in [key for key, value in vars(module).items() if value is old]:
                setattr(module, key, new)


def _separate_threads() -> None:
    """Replace Pyro's globals by per-thread state; handlers in use stay with the present thread."""
    handlers = HandlerStack()
    handlers.data = runtime._PYRO_STACK
    dims = PlateDimensions()
    dims._stack = runtime._DIM_ALLOCATOR._stack
    enumerated = EnumeratedDimensions()
    enumerated.__dict__.update(runtime._ENUM_ALLOCATOR.__dict__)
    _replace(runtime._PYRO_STACK, handlers)
    _replace(runtime._DIM_ALLOCATOR, dims)
    _replace(runtime._ENUM_ALLOCATOR, enumerated)


_separate_threads()
