"""Plots of maps."""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from pyro_nngp._checks import fail, import_extra
from pyro_nngp._kinds import check_kind
from pyro_nngp._matplotlib import pyplot as pyplot_of
from pyro_nngp.adapters.maps.systems import system_of
from pyro_nngp.adapters.plots.axes import aspect, edges, set_ticks

if TYPE_CHECKING:
    from xarray import Dataset

_WIDTH, _HEIGHTS = 5.5, (3.0, 7.5)  # of a panel [inches], with its color bar


def plot_map(grid: "Dataset", places: Any = None) -> Any:
    """Mean and standard deviation of a map side by side; of a map of classes, the probability of each.

    Two axes that are lengths have one scale: axes of a grid with a coordinate reference system, or named x and y, east
    and north, easting and northing. Degrees have the scale of the middle latitude.

    Args:
        grid: a map of one output from :func:`~pyro_nngp.adapters.maps.predict_grid`, on a grid with two dimensions, or
            with one, which gives a curve with a band of two standard deviations.
        places: places of the data (N, 2), horizontal and vertical coordinates, to mark in the last picture; others than
            those within the grid are left out.

    Returns:
        The axes, an array of two or of one per class, all with the limits of the grid; or one axis for a curve.

    Raises:
        ValueError, TypeError: for a grid of more dimensions, several outputs, or other variables, and places of another
            shape.
        ImportError: without matplotlib.
    """
    where = "plot_map"
    pyplot = pyplot_of(where)
    cure = "Pass what predict_grid returned."
    check_kind(where, "grid", grid, import_extra(where, "xarray", "maps").Dataset, "a Dataset of xarray", cure)
    if "probability" not in grid and not {"mean", "sd"} <= set(grid.data_vars):
        fail(where, "grid", "with mean and sd, or probability", sorted(map(str, grid.data_vars)), cure)
    has_classes = "probability" in grid
    panels = list(grid["probability"]) if has_classes else [grid["mean"], grid["sd"]]
    names = ["mean", "sd"]
    if has_classes:
        classes = grid["category"].values if "category" in grid.coords else range(len(panels))
        names = [f"probability of {label}" for label in classes]
    dims = panels[0].dims
    if len(dims) > 2:
        cure = "Select the others first, as by grid.isel(time=0)."
        fail(where, "grid", "to have one or two dimensions", dims, cure)
    if len(dims) == 1:
        axis = pyplot.subplots(layout="constrained")[1]
        for panel, name in zip(panels[:1] if not has_classes else panels, names, strict=False):
            axis.plot(panel[dims[0]], panel, label=name)
        if not has_classes:
            low, high = (grid["mean"] + sign * 2 * grid["sd"] for sign in (-1, 1))
            axis.fill_between(grid[dims[0]], low, high, alpha=0.3, label="2 sd")
        axis.set(xlabel=dims[0])
        axis.legend()
        return axis
    across, up = (np.asarray(grid[dim].values, dtype=float) for dim in (dims[1], dims[0]))
    (west, east), (south, north) = edges(across), edges(up)
    scale = aspect((str(dims[1]), str(dims[0])), (across, up), system_of(grid) or "")
    tall = 0.8 * _WIDTH if scale == "auto" else _WIDTH * 0.8 * _ratio(scale) * (north - south) / (east - west)
    size = _WIDTH * len(panels), min(max(tall + 0.4, _HEIGHTS[0]), _HEIGHTS[1])
    axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", sharex=True, sharey=True)[1]
    for axis, panel, name in zip(axes, panels, names, strict=True):
        picture = axis.pcolormesh(across, up, panel, cmap="magma" if name == "sd" else "viridis", rasterized=True)
        axis.figure.colorbar(picture, ax=axis, label=name)
        axis.set(xlabel=dims[1], ylabel=dims[0], xlim=(west, east), ylim=(south, north))
        axis.set_aspect(scale, adjustable="box")
        axis.label_outer()
        set_ticks(axis)
    if places is not None:
        x, y = _pairs(where, places).T
        within = (x >= west) & (x <= east) & (y >= south) & (y <= north)
        axes[-1].plot(x[within], y[within], ".", color="white", markersize=2, alpha=0.6)
    return axes


def _pairs(where: str, places: Any) -> np.ndarray:
    """Places (N, 2) as an array."""
    places = places.detach().cpu() if isinstance(places, Tensor) and not places.is_meta else places
    try:
        array = np.asarray(places, dtype=float)
    except (TypeError, ValueError, RuntimeError) as error:
        fail(where, "places", "to hold numbers", type(places).__name__, "Pass gp.x.", TypeError, error)
    if array.ndim != 2 or array.shape[1] != 2:
        fail(where, "places", "of shape (N, 2)", array.shape, "Give both coordinates.")
    return array


def _ratio(scale: float | str) -> float:
    return 1.0 if isinstance(scale, str) else scale
