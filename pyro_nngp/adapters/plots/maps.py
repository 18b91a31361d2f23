"""Plots of maps."""

from typing import TYPE_CHECKING, Any

from pyro_nngp._checks import fail
from pyro_nngp._matplotlib import pyplot as pyplot_of

if TYPE_CHECKING:
    from xarray import Dataset


def plot_map(grid: "Dataset", places: Any = None) -> Any:
    """Mean and standard deviation of a map side by side; of a map of classes, the probability of each.

    Args:
        grid: a map of one output from :func:`~pyro_nngp.adapters.maps.predict_grid`, on a grid with two dimensions, or
            with one, which gives a curve with a band of two standard deviations.
        places: places of the data (N, 2), horizontal and vertical coordinates, to mark in the last picture.

    Returns:
        The axes, an array of two or of one per class; or one axis for a curve.

    Raises:
        ValueError: for a grid of more dimensions, or several outputs.
        ImportError: without matplotlib.
    """
    pyplot = pyplot_of("plot_map")
    has_classes = "probability" in grid
    panels = list(grid["probability"]) if has_classes else [grid["mean"], grid["sd"]]
    names = ["mean", "sd"]
    if has_classes:
        classes = grid["category"].values if "category" in grid.coords else range(len(panels))
        names = [f"probability of {label}" for label in classes]
    dims = panels[0].dims
    if len(dims) > 2:
        cure = "Select the others first, as by grid.isel(time=0)."
        fail("plot_map", "grid", "to have one or two dimensions", dims, cure)
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
    axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.5), layout="constrained")[1]
    for axis, panel, name in zip(axes, panels, names, strict=True):
        picture = axis.pcolormesh(
            panel[dims[1]], panel[dims[0]], panel, cmap="magma" if name == "sd" else "viridis", rasterized=True
        )
        axis.figure.colorbar(picture, ax=axis, label=name)
        axis.set(xlabel=dims[1], ylabel=dims[0])
    if places is not None:
        axes[-1].plot(*places.T, ".", color="white", markersize=2, alpha=0.6)
    return axes
