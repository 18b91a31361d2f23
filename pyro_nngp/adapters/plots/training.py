"""Plots of training: the loss, and the neighbors that points are conditioned on."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyro_nngp._checks import check_rows, fail
from pyro_nngp._kinds import check_kind, check_sequence
from pyro_nngp._matplotlib import axis
from pyro_nngp.inference import FitResult
from pyro_nngp.neighbors import NeighborTable

_SMOOTHED = 20  # steps


def plot_fit(result: Any, ax: Any = None) -> Any:
    """Loss per data point at each step, its running mean, and the scores of validations.

    Args:
        result: as :func:`~pyro_nngp.inference.fit` returns it.
        ax: axis to draw on; None makes one.

    Returns:
        The axis. Its limits leave out the first tenth of the steps, whose large losses would hide the rest.

    Raises:
        TypeError: for another result or axis.
        ImportError: without matplotlib.
    """
    check_kind("plot_fit", "result", result, FitResult, "what fit returned", "Pass fit(gp).")
    ax = axis("plot_fit", ax)
    losses = result.losses.detach().cpu().double().numpy()
    steps = np.arange(1, len(losses) + 1)
    ax.plot(steps, losses, color="0.7", linewidth=0.8, label="step")
    if len(losses) >= 2 * _SMOOTHED:
        smooth = np.convolve(losses, np.full(_SMOOTHED, 1 / _SMOOTHED), "valid")
        ax.plot(steps[_SMOOTHED - 1 :], smooth, label=f"mean of {_SMOOTHED}")
    if result.scores:
        ax.plot(*zip(*result.scores, strict=True), "o", label="validation")
    later = losses[len(losses) // 10 :]
    margin = 0.05 * max(np.ptp(later), 1e-9)
    ax.set(xlabel="step", ylabel="loss per data point", ylim=(later.min() - margin, later.max() + margin))
    ax.legend()
    return ax


def plot_neighbors(
    graph: Any, rows: Int[Tensor, " R"] | None = None, columns: tuple[int, int] = (0, 1), ax: Any = None
) -> Any:
    """Points of a neighbor graph, with lines to the neighbors of some of them.

    Args:
        graph: a neighbor graph, such as ``gp.graph``.
        rows: rows whose neighbors are shown; None is three: early, in the middle and late in the ordering.
        columns: the two columns of x on the axes.
        ax: axis to draw on; None makes one.

    Returns:
        The axis.

    Raises:
        ValueError, TypeError: for malformed rows, or columns that x does not have.
        ImportError: without matplotlib.
    """
    where = "plot_neighbors"
    check_kind(where, "graph", graph, NeighborTable, "a neighbor graph", "Pass gp.graph, or a NeighborGraph.")
    check_sequence(where, "columns", columns, "Give two columns of x.")
    x = graph.x.detach().cpu()
    if not all(isinstance(column, int) and 0 <= column < x.shape[1] for column in columns) or len(columns) != 2:
        fail(where, "columns", f"to be two in 0..{x.shape[1] - 1}", columns, "Give two columns of x.")
    if rows is None:
        order = getattr(graph, "order", torch.arange(len(x))).cpu()
        rows = order[[len(x) // 10, len(x) // 2, len(x) - 1]]
    check_rows(where, "rows", rows, len(x))
    ax = axis(where, ax)
    places = x[:, list(columns)].numpy()
    ax.plot(*places.T, ".", color="0.75", markersize=3)
    for number, row in enumerate(rows.tolist()):
        near = graph.neighbors[row].cpu()
        ends = places[near[near >= 0].numpy()]
        ax.plot(*np.stack([np.broadcast_to(places[row], ends.shape), ends], 1).T, color=f"C{number}", linewidth=0.8)
        ax.plot(*places[row], "o", color=f"C{number}", label=f"row {row}: {len(ends)} neighbors")
    ax.set(xlabel=f"x[{columns[0]}]", ylabel=f"x[{columns[1]}]")
    ax.legend()
    return ax
