"""The compiled part of the package, where the installation could build it: one library for conditionals and searches.

It has a plain C interface and knows nothing of torch or Python; it is loaded at the first use and called on the memory
of tensors and arrays. Without it everything works, more slowly. The environment variable ``PYRO_NNGP_NATIVE=0`` leaves
it aside; it is read at every call of a conditional, and whenever a search index is built.
"""

import ctypes
import functools
import os
from pathlib import Path

_FILE = "libnative.so.3"  # the number rises when the interface changes
_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p
_FUNCTIONS = {
    "nn_levels": (),
    "nn_conditional_width": (_INTEGER, _INTEGER),
    "nn_conditional_factors": (_INTEGER, _INTEGER, _INTEGER, _INTEGER),
    "nn_conditional_run": (_POINTER, _INTEGER, _INTEGER),
    "nn_search_bytes": (_INTEGER, _INTEGER),
    "nn_search_build": (_POINTER, _INTEGER, _INTEGER, _POINTER),
    "nn_search_order": (_POINTER, _INTEGER, _INTEGER, _POINTER),
    "nn_search_run": (_POINTER, _POINTER, _INTEGER),
}


def wanted() -> bool:
    """Whether the library is there and not switched off."""
    return os.environ.get("PYRO_NNGP_NATIVE", "1") != "0" and library() is not None


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None where the installation has none."""
    path = Path(__file__).with_name(_FILE)
    try:
        found = ctypes.CDLL(str(path))
    except OSError:  # not there, or built for another system
        return None
    for name, arguments in _FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = _INTEGER, arguments
    return found


def loaded() -> ctypes.CDLL:
    """The library, for callers that have asked `wanted`."""
    found = library()
    assert found is not None, "callers ask wanted() first"
    return found


def best_level(level: int | None = None) -> int:
    """The widest instruction set of this processor, or the one given: 0..nn_levels()-1."""
    return loaded().nn_levels() - 1 if level is None else level
