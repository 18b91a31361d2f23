"""Plots of calibration: transforms, coverage, reliability. Matplotlib is imported at the first plot.

Cost: O(N).
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._checks import check_int, check_tensor
from pyro_nngp._kinds import check_kind
from pyro_nngp._matplotlib import axis
from pyro_nngp.inference.diagnostics.calibration import Reliability, coverage_curve

_BAND = (0.005, 0.995)


def plot_pit(values: Float[Tensor, "..."], num_bins: int = 20, ax: Any = None) -> Any:
    """Histogram of transforms or ranks, with the band that holds a bar of uniform values with probability 0.99.

    Args:
        values: from :func:`~pyro_nngp.inference.diagnostics.calibration.pit` or ``sbc_ranks``.
        num_bins: number of bars.
        ax: axis to draw on; None makes one.

    Returns:
        The axis.

    Raises:
        TypeError, ValueError: for malformed arguments.
        ImportError: without matplotlib.
    """
    check_tensor("plot_pit", "values", values)
    check_int("plot_pit", "num_bins", num_bins, 1)
    ax = axis("plot_pit", ax)
    n = values.numel()
    from scipy import stats  # takes a second to import

    low, high = stats.binom.ppf(_BAND, n, 1 / num_bins) * num_bins / n
    counts, edges = np.histogram(values.detach().cpu(), num_bins, (0, 1))
    ax.axhspan(low, high, color="0.85", label="99 % band")
    ax.axhline(1, color="0.5", linewidth=1)
    ax.bar(edges[:-1], counts * num_bins / n, 0.9 / num_bins, align="edge")
    ax.set(xlabel="probability integral transform", ylabel="density", xlim=(0, 1))
    return ax


def plot_coverage(values: Float[Tensor, "..."], ax: Any = None) -> Any:
    """Plot the fraction of observations in central prediction intervals by level, with a pointwise 99 % band.

    Args:
        values: from :func:`~pyro_nngp.inference.diagnostics.calibration.pit`.
        ax: axis to draw on; None makes one.

    Returns:
        The axis.

    Raises:
        TypeError: if `values` is no tensor.
        ImportError: without matplotlib.
    """
    check_tensor("plot_coverage", "values", values)
    ax = axis("plot_coverage", ax)
    levels = np.linspace(0, 1, 101)
    from scipy import stats

    low, high = (stats.binom.ppf(p, values.numel(), levels) / values.numel() for p in _BAND)
    ax.fill_between(levels, low, high, color="0.85", label="99 % band")
    ax.plot([0, 1], [0, 1], color="0.5", linewidth=1)
    ax.plot(levels, coverage_curve(values.detach().cpu(), torch.as_tensor(levels)).numpy())
    ax.set(xlabel="level of the interval", ylabel="coverage", xlim=(0, 1), ylim=(0, 1))
    return ax


def plot_reliability(reliability: Reliability, ax: Any = None) -> Any:
    """Plot frequencies of labels by their predicted probabilities, with two standard errors.

    Args:
        reliability: from :func:`~pyro_nngp.inference.diagnostics.calibration.reliability`.
        ax: axis to draw on; None makes one.

    Returns:
        The axis.

    Raises:
        TypeError: if `reliability` is something else.
        ImportError: without matplotlib.
    """
    cure = "Pass the result of reliability."
    check_kind("plot_reliability", "reliability", reliability, Reliability, "a Reliability", cure)
    ax = axis("plot_reliability", ax)
    predicted, observed, number = (value.detach().cpu().numpy() for value in reliability)
    ax.plot([0, 1], [0, 1], color="0.5", linewidth=1)
    errors = 2 * np.sqrt(predicted * (1 - predicted) / number)
    ax.errorbar(predicted, observed, errors, fmt="o", capsize=2)
    ax.set(xlabel="predicted probability", ylabel="frequency", xlim=(0, 1), ylim=(0, 1))
    return ax
