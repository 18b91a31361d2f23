"""Mean functions by themselves."""

import pyro.distributions as dist
import pytest
import torch
from builders import scalar
from pyro import poutine

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


@pytest.mark.parametrize("prior", [None, dist.Normal(0.0, 1.0)])
def test_a_linear_mean_is_one_of_the_columns_of_x(prior):
    x = torch.rand(20, 2)
    with pytest.raises(
        ValueError, match=r"LinearMean: expected x with input_dim = 1 columns, got 2\. Write LinearMean\(2\)"
    ):
        Vecchia(x, x[:, 0], mean=LinearMean(1, prior=prior))
    with pytest.raises(ValueError, match=r"LinearMean: expected input_dim >= 1, got 0"):
        LinearMean(0)
