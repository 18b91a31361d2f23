"""The metric of a kernel against the correlations of all pairs; scales of columns."""

import math

import pytest
import torch
from builders import tensor

from pyro_nngp.kernels import (
    RBF,
    KernelMetric,
    Linear,
    Matern32,
    Matern52,
    Periodic,
    VerticalScaling,
    neighbor_metric,
)
from pyro_nngp.kernels.metric import column_scale

F64 = torch.float64
X = torch.rand(40, 2, dtype=F64, generator=torch.Generator().manual_seed(0))


def total():
    return Matern32(2, lengthscale=tensor(0.2, 1.0)) + RBF(1, variance=tensor(3.0)[0], active_dims=[1])


@pytest.mark.parametrize("make", [total, lambda: Matern52(2), lambda: VerticalScaling(RBF(2), lambda x: 1 + x[..., 0])])
def test_distance_is_one_less_the_correlation(make):
    kernel = make().double()
    cov = kernel(X).detach()
    scale = cov.diagonal().sqrt()
    expected = 1 - (cov / scale / scale[:, None]).abs()
    got = KernelMetric(kernel, X).distance(X, X.expand(40, 40, 2))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_features_are_the_inputs_over_the_lengthscales_for_all_parts_and_for_each():
    whole, first, second = KernelMetric(total(), X).features(X)
    torch.testing.assert_close(first, X / tensor(0.2, 1.0))
    torch.testing.assert_close(second, X[:, 1:])
    torch.testing.assert_close(whole, torch.cat([first, second], -1))


def test_features_of_a_periodic_kernel_lie_on_a_circle():
    (found,) = KernelMetric(Periodic(1, period=tensor(0.5)[0], lengthscale=tensor(2.0)), X[:, :1]).features(X[:, :1])
    angle = 2 * math.pi * X[:, :1] / 0.5
    torch.testing.assert_close(found, torch.cat([angle.sin(), angle.cos()], -1) / 2)


def test_columns_without_a_lengthscale_are_divided_by_their_spread():
    data = X * tensor(1.0, 1000.0)
    (found,) = KernelMetric(Linear(2).double(), data).features(data)
    torch.testing.assert_close(found, data / column_scale(data))


def test_a_metric_keeps_its_hyperparameters():
    kernel = total()
    metric = KernelMetric(kernel, X)
    before = metric.distance(X, X[None].expand(40, 40, 2))
    with torch.no_grad():
        kernel.kern1.variance = tensor(0.1)[0]
    assert torch.equal(metric.distance(X, X[None].expand(40, 40, 2)), before)
    assert not torch.allclose(KernelMetric(kernel, X).distance(X, X[None].expand(40, 40, 2)), before)


def test_a_loaded_state_searches_as_the_saved_one():
    trained, fresh = total(), total()
    with torch.no_grad():
        trained.kern0.lengthscale = tensor(0.7, 0.3)
    saved, loaded = KernelMetric(trained, X), KernelMetric(fresh, X)
    loaded.load_state_dict(saved.state_dict())
    for got, want in zip(loaded.features(X), saved.features(X), strict=True):
        assert torch.equal(got, want)


def test_lengthscales_are_the_metric_where_they_say_all():
    lengthscale = tensor(0.2, 1.0)
    assert torch.equal(neighbor_metric(Matern32(2, lengthscale=lengthscale), X).detach(), lengthscale)
    assert isinstance(neighbor_metric(total(), X), KernelMetric)


def test_column_scales_are_robust_and_go_with_the_units():
    x = torch.randn(4000, 1, dtype=F64, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, 5 * x + 100, torch.ones_like(x), (x > 2.5).double()], -1)
    x[:20, 0] = 50.0
    scale = column_scale(x)
    torch.testing.assert_close(scale[:2], tensor(1.0, 5.0), rtol=0.06, atol=0)
    assert scale[2] == 1  # a constant
    torch.testing.assert_close(scale[3], x[:, 3].std(correction=0))  # quartiles coincide
