"""Space-time kernels: the formula, neighbors and starts, every error."""

import math

import pytest
import torch
from builders import normal, tensor, uniform
from oracles.kernels import space_time

import pyro_nngp as nngp
from pyro_nngp.kernels import RBF, Gneiting, KernelMetric, Matern32, Wendland, bind, neighbor_metric


def test_the_formula() -> None:
    x, z = normal(5, 3), normal(4, 3)
    psi = 1 + ((x[:, None, 1] - z[None, :, 1]).abs() / 0.7).pow(1.2)
    h = ((x[:, None, [0, 2]] - z[None, :, [0, 2]]) / tensor(0.5, 2.0)).square().sum(-1).sqrt()
    s = math.sqrt(3) * h * psi.pow(-0.4)
    want = 1.5 * psi.pow(-(0.4 + 0.8)) * (1 + s) * torch.exp(-s)
    torch.testing.assert_close(bind(space_time())(x, z), want, rtol=1e-6, atol=1e-7)


def test_neighbors_and_starts_follow_time_and_space() -> None:
    x = torch.rand(150, 3, dtype=torch.float64) * tensor(1000.0, 10.0, 1.0)
    metric = neighbor_metric(space_time(), x)
    assert isinstance(metric, KernelMetric)
    torch.testing.assert_close(metric.features(x)[0], x[:, [0, 2, 1]] / tensor(0.5, 2.0, 0.7), rtol=1e-6, atol=1e-6)
    kernel = Gneiting(Matern32(2, active_dims=[0, 1]), 2)
    y = torch.sin(x[:, 0] / 200) + torch.sin(3 * x[:, 2]) + 0.1 * torch.randn(150, dtype=torch.float64)
    gp = nngp.Vecchia(x, y, kernel, num_neighbors=10)
    assert 0.02 < gp.kernel.timescale.item() < 50
    assert 0 < gp.kernel.interaction.item() < 1
    assert gp.kernel.kern.lengthscale[0] > 10


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Gneiting(Wendland(2, active_dims=[0, 1]), 2), TypeError, "Gneiting: expected kern to be RBF"),
        (lambda: Gneiting(RBF(2), 2), ValueError, "Gneiting: expected kern with active_dims without the column 2"),
        (lambda: Gneiting(RBF(1, active_dims=[0]), 0), ValueError, "without the column 0 of time"),
        (lambda: Gneiting(RBF(1, active_dims=[0]), -1), ValueError, "Gneiting: expected time_dim >= 0"),
        (
            lambda: Gneiting(RBF(1, active_dims=[0]), 2)(uniform(3), uniform(3)),
            ValueError,
            r"inputs with columns \[0, 2\]",
        ),
        (
            lambda: Gneiting(RBF(1, active_dims=[0]), 1, interaction=1.0),
            ValueError,
            "interaction to lie between 0 and 1",
        ),
    ],
)
def test_errors(make: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()  # type: ignore[operator]
