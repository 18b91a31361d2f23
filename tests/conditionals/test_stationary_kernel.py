"""The conditional of one stationary kernel where squared distances overflow; its agreement with others is in native."""

from itertools import product

import pytest
import torch

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.kernels import RBF, Matern, Matern12, Matern32, Matern52

KERNELS = [RBF, Matern12, Matern32, Matern52]


@pytest.mark.parametrize(("kernel", "way"), [*product(KERNELS, "01"), (Matern, "1")])
@pytest.mark.parametrize(
    ("dtype", "size", "lengthscale"),
    [
        (torch.float32, 1e19, 1.0),
        (torch.float32, 1.0, 1e-25),
        (torch.float64, 1e160, 1.0),
        (torch.float64, 1.0, 1e-200),
    ],
)
def test_points_too_far_apart_for_their_squared_distance_have_the_prior(
    monkeypatch, kernel, dtype, size, lengthscale, way
):
    """The first target's neighbors coincide with nothing; the second one has a neighbor in its own place."""
    monkeypatch.setenv("PYRO_NNGP_NATIVE", way)
    points = size * torch.tensor([[1.0, 0.0], [-1.0, 2.0], [0.5, 1.0], [3.0, 3.0]], dtype=dtype)
    x = torch.stack([torch.zeros(2, dtype=dtype), points[3]]).requires_grad_()
    neighbors = torch.tensor([[0, 1, 2], [0, 1, 3]])
    made = kernel(2, variance=torch.tensor(1.7, dtype=dtype), lengthscale=torch.tensor(lengthscale, dtype=dtype))
    w, var = graph_conditional(made, x, points, neighbors, jitter=1e-3)
    want = torch.zeros(2, 3, dtype=dtype)
    want[1, 2] = 1 / 1.001
    torch.testing.assert_close(w, want)
    torch.testing.assert_close(
        var, torch.tensor([1.7 * 1.001, 1.7 * (1.001 - 1 / 1.001)], dtype=dtype), rtol=1e-3, atol=0
    )
    (var.sum() + w.sum()).backward()
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in made.parameters())


@pytest.mark.parametrize("kernel", [*KERNELS, Matern])
def test_covariances_at_distances_that_overflow_are_zero(kernel):
    x = torch.tensor([[0.0], [1e19], [-3e19]])
    assert torch.equal(kernel(1)(x).detach(), torch.eye(3))
    assert torch.equal(kernel(1, lengthscale=1e-25)(x / 1e19).detach(), torch.eye(3))
