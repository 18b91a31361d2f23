"""Matplotlib, imported by the first picture."""

from typing import Any

from pyro_nngp._checks import fail


def pyplot(where: str) -> Any:
    """``matplotlib.pyplot``, or an error that says how to get it."""
    try:
        from matplotlib import pyplot as found
    except ImportError as error:
        fail(where, "matplotlib", "to be installed", "no such package", "pip install matplotlib.", ImportError, error)
    return found


def axis(where: str, ax: Any) -> Any:
    """The axis given, or a new one."""
    return pyplot(where).subplots(layout="constrained")[1] if ax is None else ax
