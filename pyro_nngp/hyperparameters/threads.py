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
from contextlib import contextmanager
from typing import Any

from pyro.nn.module import _Context
from pyro.params.param_store import ParamStoreDict
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


class _Private(threading.local):
    content: dict[str, dict] | None = None


def _content(name: str) -> property:
    def read(store: "ParamStore") -> dict:
        return (_PRIVATE.content or store.__dict__)[name]

    def write(store: "ParamStore", value: dict) -> None:
        (_PRIVATE.content or store.__dict__)[name] = value

    return property(read, write)


class ParamStore(ParamStoreDict):
    """Pyro's param store: shared by all threads, or inside :meth:`private` the present thread's content."""

    _params, _constraints, _param_to_name = map(_content, ("_params", "_constraints", "_param_to_name"))

    @property
    def shared_names(self) -> dict:
        """Names by unconstrained parameter, for the content that all threads share."""
        return self.__dict__["_param_to_name"]

    @contextmanager
    def private(self, content: dict[str, dict]) -> Iterator[None]:
        """Replace the content for the present thread."""
        before, _PRIVATE.content = _PRIVATE.content, content
        try:
            yield
        finally:
            _PRIVATE.content = before


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


_PRIVATE = _Private()


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
    runtime._PYRO_PARAM_STORE.__class__ = ParamStore


_separate_threads()
