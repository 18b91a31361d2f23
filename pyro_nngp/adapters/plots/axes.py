"""Axes of places: equal scales where both are lengths, ticks that can be read, limits."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_LENGTHS = ({"x", "y"}, {"east", "north"}, {"easting", "northing"}, {"eastings", "northings"}, {"utm_x", "utm_y"})
_DEGREES = ("lon", "lng"), "lat"
_PLAIN = 1e4  # from here on digits are grouped in threes


def aspect(names: Sequence[str], places: Sequence[np.ndarray], crs: str = "") -> float | str:
    """Scale of the vertical over the horizontal axis: "auto", unless both axes are lengths or degrees.

    Args:
        names: of the two axes, horizontal first.
        places: values along each.
        crs: the coordinate reference system, as well-known text, or its name; empty if there is none.
    """
    first, second = (name.partition(" ")[0].lower() for name in names)
    degrees = first.startswith(_DEGREES[0]) and second.startswith(_DEGREES[1])
    if degrees or crs.startswith("GEOG") or "EPSG:4326" in crs:
        middle = np.clip((np.min(places[1]) + np.max(places[1])) / 2, -80, 80)
        return 1 / math.cos(math.radians(float(middle)))
    return "equal" if crs or {first, second} in _LENGTHS else "auto"


def set_ticks(ax: Any) -> None:
    """A few ticks without an offset or an exponent, large numbers with their digits in threes."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for each, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        if max(abs(low), abs(high)) >= _PLAIN:
            each.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
            each.set_major_formatter(FuncFormatter(_grouped))


def edges(centers: np.ndarray) -> tuple[float, float]:
    """The ends of cells with these centers, in ascending order."""
    low, high = float(np.min(centers)), float(np.max(centers))
    half = (high - low) / (2 * max(1, len(centers) - 1))
    return low - half, high + half


def _grouped(value: float, _: int) -> str:
    return f"{value:,.0f}".replace(",", " ") if value == round(value) else f"{value:,g}"


__all__ = ["aspect", "edges", "set_ticks"]
