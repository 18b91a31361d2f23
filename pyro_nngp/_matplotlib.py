"""Matplotlib, imported at the first plot."""

from typing import Any

from pyro_nngp._checks import fail


def pyplot(where: str) -> Any:
    """The module ``matplotlib.pyplot``, or an error that names the pip command."""
    try:
        from matplotlib import pyplot as module
    except ImportError as error:
        fail(where, "matplotlib", "to be installed", "no such package", "pip install matplotlib.", ImportError, error)
    return module


def axis(where: str, ax: Any) -> Any:
    """The given axis, or a new one."""
    module = pyplot(where)
    if ax is None:
        return module.subplots(layout="constrained")[1]
    if not isinstance(ax, module.Axes):
        fail(where, "ax", "to be an axis of matplotlib", type(ax).__name__, "Leave it out for a new one.", TypeError)
    return ax
