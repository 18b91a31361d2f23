"""Plots of cross-validation: the numbers on their axes."""

import numpy as np
import pytest
import torch

import pyro_nngp as nngp
from pyro_nngp.adapters.plots import plot_residuals, plot_scores
from pyro_nngp.inference import CrossValidation
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Gaussian


@pytest.fixture(scope="module")
def results():
    torch.manual_seed(0)
    x = torch.rand(50, 2, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(50, dtype=torch.float64)
    good, bad = (nngp.Vecchia(x, y, Matern32(2, 1.0, scale), Gaussian(0.01), num_neighbors=8) for scale in (0.4, 0.02))
    return {name: nngp.cross_validate(gp, 5) for name, gp in {"good": good, "bad": bad}.items()}


def test_scores_with_their_errors_and_those_of_the_difference(results):
    axis = plot_scores(results)
    assert [label.get_text() for label in axis.get_yticklabels()] == ["good", "bad"]
    np.testing.assert_allclose(axis.lines[0].get_xdata(), results["good"].by_fold()["nll"])
    bars = [container.lines[2][0].get_segments()[0] for container in axis.containers]
    widths = [(each[1, 0] - each[0, 0]) / 4 for each in bars]
    own, paired = results["bad"].scores["nll"], results["bad"].difference(results["good"])["nll"]
    expected = [results["good"].scores["nll"].standard_error, own.standard_error, paired.standard_error]
    np.testing.assert_allclose(widths, torch.stack(expected))
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["folds", "2 standard errors", "2 of the difference from good"]
    one = plot_scores(results["bad"], "coverage")
    assert one.get_xlabel() == "coverage of 95 %"
    assert 0.95 in [line.get_xdata()[0] for line in one.lines]


def test_residuals_at_their_places(results):
    result = results["good"]
    axis = plot_residuals(result, (1, 0))
    places, colors = axis.collections[0].get_offsets(), axis.collections[0].get_array()
    residual = (result.y - result.mean) / result.sd
    order = residual.abs().argsort()
    np.testing.assert_allclose(colors, residual[order])
    np.testing.assert_allclose(places, result.x[order][:, [1, 0]])
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("x[1]", "x[0]")


def test_refusals(results):
    with pytest.raises(TypeError, match="results to be results by name, got float"):
        plot_scores(0.5)
    with pytest.raises(TypeError, match=r"results\['a'\] to be a CrossValidation, got float"):
        plot_scores({"a": 0.5})
    with pytest.raises(ValueError, match="score"):
        plot_scores(results, "brier")
    with pytest.raises(TypeError, match="result to be a CrossValidation, got dict"):
        plot_residuals(results)
    with pytest.raises(ValueError, match="columns to be two in 0..1"):
        plot_residuals(results["good"], (0, 2))
    with pytest.raises(ValueError, match=r"output in 0..0, got 1"):
        plot_residuals(results["good"], output=1)
    x = torch.rand(20, 1)
    labels = nngp.cross_validate(nngp.LOO(x, x[:, 0] > 0.5, Matern32(1, 1.0, 0.5), Bernoulli(), num_neighbors=5), 2)
    assert isinstance(labels, CrossValidation)
    with pytest.raises(ValueError, match="result of values, got labels, which have no residuals"):
        plot_residuals(labels)
