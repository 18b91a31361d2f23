import pytest
import torch
from builders import matern
from oracles.dense import dense_precision

from pyro_nngp.distributions import NNGP
from pyro_nngp.linalg import gaussian_sampling
from pyro_nngp.linalg.gaussian_sampling import draw_posterior
from pyro_nngp.neighbors.graph import NeighborGraph

F64 = torch.float64
N = 30


def problem():
    graph = NeighborGraph(torch.rand(N, 2, dtype=F64), 5)
    kernel = matern()
    prior = NNGP(kernel, graph)
    tau = torch.rand(N, dtype=F64) * 5 * (torch.arange(N) % 3 > 0)  # a third of the points unobserved
    with torch.no_grad():
        factor = prior.factor
    covariance = torch.cholesky_inverse(torch.linalg.cholesky(dense_precision(kernel, graph) + torch.diag(tau)))
    return factor, torch.randn(N, dtype=F64), tau, covariance.detach()


def with_noise(monkeypatch, noise):
    """Give the draw this noise instead of random one."""
    monkeypatch.setattr(gaussian_sampling.torch, "randn", lambda *shape, **kind: noise.reshape(shape))
    monkeypatch.setattr(gaussian_sampling.torch, "randn_like", lambda like: noise.reshape(like.shape))


@pytest.mark.parametrize(("dense_up_to", "size"), [(1000, N), (0, 2 * N)])
def test_draws_are_the_posterior_mean_plus_noise_of_the_posterior_covariance(monkeypatch, dense_up_to, size):
    factor, linear, tau, covariance = problem()
    settings = {"tolerance": 1e-13, "dense_up_to": dense_up_to}
    zero, columns = torch.zeros_like(linear), []
    with_noise(monkeypatch, torch.zeros(size, dtype=F64))
    mean = draw_posterior(factor, linear, tau, **settings)
    torch.testing.assert_close(mean, covariance @ linear, rtol=1e-8, atol=1e-10)
    for unit in torch.eye(size, dtype=F64):
        with_noise(monkeypatch, unit)
        columns.append(draw_posterior(factor, zero, tau, **settings))
    root = torch.stack(columns, -1)
    torch.testing.assert_close(root @ root.mT, covariance, rtol=1e-8, atol=1e-10)


def test_tolerance_bounds_the_error_and_too_few_iterations_are_said(monkeypatch):
    factor, linear, tau, covariance = problem()
    with_noise(monkeypatch, torch.zeros(2 * N, dtype=F64))
    errors = []
    for tolerance in (1e-2, 1e-5):
        error = draw_posterior(factor, linear, tau, tolerance=tolerance, dense_up_to=0) - covariance @ linear
        errors.append(float(error.norm() / linear.norm()))
    assert errors[1] < 1e-4 < errors[0]
    with pytest.warns(UserWarning, match=r"conjugate gradients stopped after 1 iterations"):
        draw_posterior(factor, linear, tau, max_iterations=1, dense_up_to=0)


def test_draws_are_in_the_precision_of_the_data():
    factor, linear, tau, _ = problem()
    draw = draw_posterior(factor, linear.float(), tau.float())
    assert draw.dtype == torch.float32
    assert not torch.equal(draw, draw_posterior(factor, linear.float(), tau.float()))
