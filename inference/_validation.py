"""Switch off checks of Pyro, of torch and of row numbers, in a loop whose first step has passed them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyro
from pyro.distributions import is_validation_enabled as distributions_checked
from pyro.infer.util import is_validation_enabled as inference_checked
from pyro.poutine.util import is_validation_enabled as handlers_checked

from pyro_nngp._checks import trusted_rows

_lock, _inside, _before = threading.Lock(), 0, (True, True, True)


@contextmanager
def validation_off() -> Iterator[None]:
    """Switch validation off; the settings are global and are restored when the last thread leaves the block."""
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = distributions_checked(), inference_checked(), handlers_checked()
            _set(False, False, False)
        _inside += 1
    try:
        with trusted_rows():
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _set(*_before)


def _set(distributions: bool, inference: bool, handlers: bool) -> None:
    pyro.distributions.enable_validation(distributions)
    pyro.infer.enable_validation(inference)
    pyro.poutine.enable_validation(handlers)
