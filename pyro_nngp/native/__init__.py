"""The compiled part of the package, where the installation could build it.

Conditionals, searches, orderings, substitutions in sparse triangles, blocks of dense fronts and solutions with them,
rows of minibatches and Polya-Gamma draws.

It has a plain C interface without torch or Python. It is loaded at its first use and called on the memory of tensors
and arrays, after the checks of :mod:`pyro_nngp.native.boundary`. Without it everything works, more slowly, with one
warning. The environment variable ``PYRO_NNGP_NATIVE=0`` switches it off without a warning; it is read at every call of
a conditional, and whenever a search index is built.
"""

import ctypes
import functools
import os
from pathlib import Path

from pyro_nngp._checks import fail, warn
from pyro_nngp.native.structures import AdamStep, Arguments, Fronts, PolyaGammaDraws, Queries, Triangle

FILE = "libnative.so.14"  # the number rises when the interface changes
_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p
FUNCTIONS = {
    "nn_levels": (),
    "nn_conditional_width": (_INTEGER, _INTEGER),
    "nn_conditional_factors": (_INTEGER, _INTEGER, _INTEGER, _INTEGER),
    "nn_conditional_run": (_POINTER, _INTEGER, _INTEGER),
    "nn_conditional_size": (),
    "nn_search_bytes": (_INTEGER, _INTEGER),
    "nn_search_build": (_POINTER, _INTEGER, _INTEGER, _POINTER),
    "nn_search_order": (_POINTER, _INTEGER, _INTEGER, _POINTER),
    "nn_search_run": (_POINTER, _POINTER, _INTEGER),
    "nn_search_size": (),
    "nn_farthest_points": (_POINTER, _INTEGER, _INTEGER, _INTEGER, _POINTER),
    "nn_blocks": (_POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER, _POINTER, _INTEGER),
    "nn_fronts_solve": (_POINTER,),
    "nn_fronts_size": (),
    "nn_triangular_solve": (_POINTER, _INTEGER),
    "nn_triangular_size": (),
    "nn_polya_gamma_draw": (_POINTER,),
    "nn_polya_gamma_size": (),
    "nn_distinct": (_POINTER, _INTEGER, _INTEGER, _INTEGER, _POINTER, _POINTER),
    "nn_adam_step": (_POINTER, _INTEGER),
    "nn_adam_size": (),
}
SIZES = {
    "nn_conditional_size": Arguments,
    "nn_search_size": Queries,
    "nn_triangular_size": Triangle,
    "nn_fronts_size": Fronts,
    "nn_polya_gamma_size": PolyaGammaDraws,
    "nn_adam_size": AdamStep,
}


def enabled() -> bool:
    """Whether the library is available and not switched off."""
    return os.environ.get("PYRO_NNGP_NATIVE", "1") != "0" and library() is not None


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None, with a warning, if the installation has none that fits."""
    path = Path(__file__).with_name(FILE)
    try:
        return load(path)
    except (OSError, AttributeError, ValueError) as error:
        warn(
            f"pyro_nngp: no compiled code ({error}). Results are the same, but nearest-neighbor conditionals take "
            "about twice as long and neighbor searches several times. It is built at installation where there is a "
            "C++17 compiler (GCC or Clang): install one, then run `pip install --force-reinstall --no-deps --no-binary "
            "pyro-nngp pyro-nngp`, or `pip install -e .` in a checkout. PYRO_NNGP_NATIVE=0 silences this warning."
        )
        return None


def load(path: Path) -> ctypes.CDLL:
    """Load a library and check that its functions and structures fit this version.

    Raises:
        OSError: if it does not exist, or is built for another system.
        AttributeError: if it lacks a function.
        ValueError: if a structure has a different size.
    """
    if not path.exists():
        raise OSError(f"{path} does not exist")
    loading = ctypes.CDLL(str(path))
    for name, arguments in FUNCTIONS.items():
        function = getattr(loading, name)
        function.restype, function.argtypes = _INTEGER, arguments
    for name, structure in SIZES.items():
        size, expected = getattr(loading, name)(), ctypes.sizeof(structure)
        if size != expected:
            fail(path.name, structure.__name__, f"of {expected} bytes", size, "Build the package again.")
    return loading


def loaded() -> ctypes.CDLL:
    """The library, for callers that have checked `enabled`."""
    compiled = library()
    assert compiled is not None, "callers ask enabled() first"
    return compiled


def best_level(level: int | None = None) -> int:
    """The widest instruction set of this processor, or the one given: 0..nn_levels()-1."""
    levels = loaded().nn_levels()
    if level is not None and not 0 <= level < levels:
        fail("native", "level", f"in 0..{levels - 1}", level, "None takes the widest.")
    return levels - 1 if level is None else level
