"""Mean functions by themselves."""

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from builders import scalar
from pyro import poutine
from pyro.nn import PyroSample

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.means import BasisMean, ConstantMean, LinearMean
from pyro_nngp.models import VNNGP, Vecchia


def test_a_constant_that_is_assigned_is_a_constant_that_is_set():
    x = torch.rand(40, 2)
    y = 100 + torch.randn(40)
    mean = ConstantMean()
    mean.value = 3.0
    gp = VNNGP(x, y, num_neighbors=5, mean=mean)
    assert gp.mean.value.item() == pytest.approx(3.0)
    gp.mean.value = 7.0
    assert gp.mean(x[:2]).tolist() == pytest.approx([7.0, 7.0])
    assert gp.mean.value.requires_grad
    assert Vecchia(x, y, num_neighbors=5).mean.value.item() == pytest.approx(100, abs=1)


def test_constants_of_several_functions_are_assigned_together():
    mean = ConstantMean(num_latents=2)
    mean.value = torch.tensor([1.0, 2.0])
    assert mean(torch.zeros(3, 1)).tolist() == [[1.0, 2.0]] * 3


def test_coefficients_keep_their_shape():
    two = ConstantMean(num_latents=2)
    with pytest.raises(ValueError, match=r"ConstantMean: expected value of shape \(\), got \(3,\)\. Give num_l"):
        ConstantMean().value = torch.zeros(3)
    with pytest.raises(ValueError, match=r"ConstantMean: expected value of shape \(2,\), got \(\)"):
        two.value = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"LinearMean: expected slope of shape \(2,\), got \(3,\)"):
        LinearMean(2).slope = torch.zeros(3)
    two.value = 1.5  # a number is for all
    assert two.value.tolist() == [1.5, 1.5]


class Bare(BasisMean):
    """A mean function without any of its hooks."""


@pytest.mark.parametrize("hook", ["basis", "assign", "start"])
def test_a_mean_function_that_lacks_a_hook_is_told_its_name(hook):
    x = torch.zeros(2, 1)
    arguments = {"basis": (x,), "assign": (x,), "start": (torch.zeros(()), torch.ones(()), x)}[hook]
    match = rf"Bare: expected {hook} to be defined by the mean function, got nothing\. See docs/howto/write_a_method.md"
    with pytest.raises(NotImplementedError, match=match):
        getattr(Bare(), hook)(*arguments)


def test_coefficients_of_a_linear_mean_with_a_prior_are_sites():
    x, prior = torch.rand(20, 2, dtype=torch.float64) + 1e3, dist.Normal(scalar(0.0), 2.0)
    gp = Vecchia(x, x[:, 0], mean=LinearMean(2, prior=prior), num_neighbors=5)
    assert {"mean.value", "mean.slope"} <= set(poutine.trace(gp.model).get_trace().nodes)
    torch.testing.assert_close(gp.mean.center, x.mean(0))
    trace = poutine.trace(gp.mean).get_trace(x)
    value, slope = (site["value"] for site in trace.nodes.values() if site["type"] == "sample")
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], value + (x - x.mean(0)) @ slope)
    with pytest.raises(TypeError, match=r"LinearMean: expected prior to be a Pyro distribution of a number, got 2.0"):
        LinearMean(2, prior=2.0)


def test_coefficients_with_a_prior_on_a_half_line_are_not_taken_for_normal():
    """A log-normal distribution is a normal one behind a transform: coefficients stay positive, and are sampled."""
    x = torch.rand(60, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = LinearMean(1, prior=dist.LogNormal(torch.tensor(0.0, dtype=torch.float64), 1.0))
    gp = Vecchia(x, 2 + 3 * x[:, 0], mean=mean, num_neighbors=5)
    assert not mean.is_normal
    assert not mean.has_posterior
    fit(gp, 3, lr=1e-2, progress=False)
    sites = poutine.trace(gp.guide).get_trace().nodes
    assert bool((sites["mean.slope"]["value"] > 0).all())


def test_a_slope_that_is_learned_counts_beside_a_level_with_a_prior():
    x, mean = torch.rand(20, 2, dtype=torch.float64), LinearMean(2)
    mean.value = PyroSample(dist.Normal(scalar(0.0), 1.0))
    gp = Vecchia(x, x[:, 0], mean=mean, num_neighbors=5)
    gp.mean.slope = torch.tensor([2.0, -1.0], dtype=torch.float64)
    values = gp.bound().mean(x)
    torch.testing.assert_close(values - values[0], (x - x[0]) @ gp.mean.slope)


@pytest.mark.parametrize(("input_dim", "active"), [(2, None), (1, [1]), (2, np.array([0, 1])), (0, None)])
def test_waves_repeat_after_their_periods(input_dim, active):
    x = torch.rand(30, 2, dtype=torch.float64)
    mean = LinearMean(input_dim, active_dims=active, periods={1: [0.5, 0.2], 0: 3})
    basis = mean.basis(x)
    own = 1 + input_dim
    for i, (column, period) in enumerate([(1, 0.5), (1, 0.2), (0, 3.0)]):
        angle = 2 * torch.pi * x[:, column] / period
        torch.testing.assert_close(basis[:, own + 2 * i : own + 2 * i + 2], torch.stack([angle.sin(), angle.cos()], 1))
    torch.testing.assert_close(basis[:, 1:own], x[:, range(input_dim) if active is None else active])


def test_a_season_and_a_trend_are_forecast():
    t = torch.arange(96, dtype=torch.float64)[:, None]
    y = 0.05 * t[:, 0] + 4 * torch.cos(2 * torch.pi * t[:, 0] / 12) + 0.3 * torch.randn(96, dtype=torch.float64)
    mean = LinearMean(1, prior="weak", periods={0: 12})
    gp = Vecchia(t[:72], y[:72], Matern32(1, 0.1, 3.0), Gaussian(0.09), mean=mean, num_neighbors=20)
    gp.solve()
    found = gp(t[72:])
    assert float((found[0].detach() - y[72:]).square().mean().sqrt()) < 0.6
    table = gp.summary()
    assert list(table.filter(like="slope", axis=0).index) == [
        "mean.slope[0]",
        "mean.slope[sin(2 pi x[0] / 12)]",
        "mean.slope[cos(2 pi x[0] / 12)]",
    ]
    assert list(table.unit.filter(like="slope")) == ["y per x[0]", "y", "y"]
    assert table.estimate["mean.slope[cos(2 pi x[0] / 12)]"] == pytest.approx(4, abs=0.4)


def test_periods_are_positive_numbers_by_column():
    for wrong in (12, [12], 0, []):
        with pytest.raises(TypeError, match=r"LinearMean: expected periods to be a dictionary, got \w+\. Pass per"):
            LinearMean(1, periods=wrong)
    for wrong in ({0: 0}, {0: [1, -2.0]}, {-1: 3}):
        with pytest.raises(ValueError, match=r"LinearMean: expected periods .* Pass periods by column number"):
            LinearMean(1, periods=wrong)
    with pytest.raises(TypeError, match=r"LinearMean: expected periods to be a list or tuple, got str"):
        LinearMean(1, periods={0: "12"})
    x = torch.rand(20, 2)
    with pytest.raises(ValueError, match=r"LinearMean: expected x to have column 2, as periods say, got 2 columns"):
        Vecchia(x, x[:, 0], mean=LinearMean(1, active_dims=[0], periods={2: 12}))


@pytest.mark.parametrize("prior", [None, dist.Normal(0.0, 1.0)])
def test_a_linear_mean_is_one_of_the_columns_of_x(prior):
    x = torch.rand(20, 2)
    with pytest.raises(
        ValueError, match=r"LinearMean: expected x with input_dim = 1 columns, got 2\. Write LinearMean\(2\)"
    ):
        Vecchia(x, x[:, 0], mean=LinearMean(1, prior=prior))
    with pytest.raises(ValueError, match=r"LinearMean: expected input_dim >= 1, got 0"):
        LinearMean(0)
