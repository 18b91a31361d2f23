"""Shared and exclusive access to an object: predictions run side by side, and not while rows are appended.

Locks are kept beside their objects, so that copies, files and descriptions of these do not have them. A forked process
begins with new ones.
"""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

Call = TypeVar("Call", bound=Callable)
PATIENCE = 1.0  # seconds


class _Access:
    """The threads that use an object.

    A waiting writer goes before new readers for a second: one may hold what a present reader waits for, such as
    the random numbers of a training run, so that no thread would ever go on.
    """

    def __init__(self) -> None:
        self.process, self._changed = os.getpid(), threading.Condition()
        self._readers: Counter[int] = Counter()
        self._writer: int | None = None
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            if not self._readers[me] and self._writer != me:
                self._changed.wait_for(lambda: not self._waiting, PATIENCE)
            while self._writer not in (None, me):
                self._changed.wait()
            self._readers[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers[me] -= 1
                self._readers += Counter()  # without threads that are done
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            self._waiting += 1
            try:
                while self._writer not in (None, me) or any(who != me for who in self._readers):
                    self._changed.wait()
                before, self._writer = self._writer, me
            finally:
                self._waiting -= 1
        try:
            yield
        finally:
            with self._changed:
                self._writer = before
                self._changed.notify_all()


_ACCESS: "weakref.WeakKeyDictionary[Any, _Access]" = weakref.WeakKeyDictionary()
_FINDING = threading.Lock()


def _access_to(owner: Any) -> _Access:
    with _FINDING:
        found = _ACCESS.get(owner)
        if found is None or found.process != os.getpid():
            found = _ACCESS[owner] = _Access()
        return found


def shared(method: Call) -> Call:
    """Let a method run beside other shared ones of the same object, and wait for exclusive ones."""
    return _within(_Access.shared, method)


def exclusive(method: Call) -> Call:
    """Let a method run alone, among the shared and exclusive ones of the same object in other threads."""
    return _within(_Access.exclusive, method)


def _within(access: Callable[[_Access], AbstractContextManager[None]], method: Call) -> Call:
    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with access(_access_to(self)):
            return method(self, *args, **kwargs)

    return cast(Call, run)
