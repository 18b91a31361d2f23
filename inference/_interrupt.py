"""Delay Ctrl-C until the present step is complete."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Record the first Ctrl-C in the yielded list, so that the present step completes; a second one interrupts.

    Outside the main thread, where Python delivers no signals, the list stays empty.
    """
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
