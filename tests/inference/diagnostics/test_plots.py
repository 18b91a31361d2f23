"""Plots of calibration: the numbers on their axes."""

import sys

import pytest
import torch

from pyro_nngp.inference import (
    Reliability,
    plot_coverage,
    plot_pit,
    plot_reliability,
)


@pytest.fixture
def axis():
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    yield pyplot.subplots()[1]
    pyplot.close("all")


def test_plots_show_the_numbers(axis):
    values = torch.tensor([0.05, 0.15, 0.12, 0.95])
    assert plot_pit(values, 10, axis) is axis
    bars = [patch for patch in axis.patches if getattr(patch, "get_width", lambda: 1)() < 0.5]  # the band is no bar
    assert [bar.get_height() for bar in bars] == pytest.approx([2.5, 5, *[0] * 7, 2.5])
    curve = plot_coverage(values).lines[-1].get_xydata()
    assert dict(map(tuple, curve))[0.8] == 0.5  # |0.12 - 0.5| and |0.15 - 0.5| are below 0.4
    found = Reliability(torch.tensor([0.2, 0.7]), torch.tensor([0.25, 0.6]), torch.tensor([8.0, 5.0]))
    points = plot_reliability(found).lines[1].get_xydata()
    assert points.flatten() == pytest.approx([0.2, 0.25, 0.7, 0.6])


def test_plots_need_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for plot, where in ((plot_pit, "plot_pit"), (plot_coverage, "plot_coverage")):
        with pytest.raises(ImportError, match=f"{where}: expected matplotlib to be installed"):
            plot(torch.rand(3))
    with pytest.raises(ImportError, match="plot_reliability: expected matplotlib"):
        plot_reliability(Reliability(torch.ones(1), torch.ones(1), torch.ones(1)))
