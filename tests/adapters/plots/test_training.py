"""Plots of training and of neighbors."""

import numpy as np
import pytest
import torch

import pyro_nngp as nngp
from pyro_nngp.adapters.plots import plot_fit, plot_neighbors
from pyro_nngp.inference import FitResult


def result(losses, scores=()):
    return FitResult(torch.tensor(losses), list(scores), 1.0, True, None, "adam", 10, 0, 0)


def test_losses_their_mean_and_scores():
    losses = [100.0, *np.linspace(2, 1, 60)]
    axis = plot_fit(result(losses, [(20, 1.5), (40, 1.2)]))
    step, mean, score = axis.lines
    np.testing.assert_allclose(step.get_ydata(), losses, rtol=1e-6)
    assert mean.get_xdata()[0] == 20
    assert mean.get_ydata()[-1] == pytest.approx(np.mean(losses[-20:]), rel=1e-6)
    np.testing.assert_array_equal(score.get_xydata(), [[20, 1.5], [40, 1.2]])
    assert axis.get_ylim()[1] < 3  # the first steps would hide the rest
    assert len(plot_fit(result([1.0, 1.0])).lines) == 1


def test_lines_go_to_the_neighbors():
    x = torch.rand(50, 3)
    graph = nngp.NeighborGraph(x, 4)
    axis = plot_neighbors(graph, torch.tensor([7]), columns=(2, 0))
    ends = {tuple(line.get_xydata()[1]) for line in axis.lines[1:-1]}
    near = graph.neighbors[7]
    assert ends == {tuple(place) for place in x[near[near >= 0]][:, [2, 0]].double().numpy()}
    assert len(plot_neighbors(graph).get_legend().get_texts()) == 3
    assert len(plot_neighbors(nngp.LOO(x, x[:, 0], num_neighbors=4).graph).get_legend().get_texts()) == 3


def test_malformed_arguments_are_refused():
    graph = nngp.NeighborGraph(torch.rand(20, 2), 3)
    with pytest.raises(ValueError, match=r"expected columns to be two in 0\.\.1, got \(0, 2\)"):
        plot_neighbors(graph, columns=(0, 2))
    with pytest.raises(ValueError, match=r"plot_neighbors: expected rows in 0\.\.19, got 20\.\.20"):
        plot_neighbors(graph, torch.tensor([20]))
