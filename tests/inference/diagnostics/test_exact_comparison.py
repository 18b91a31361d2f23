"""Nearest-neighbor priors beside the exact process, against dense matrices and deleted data."""

import pyro.distributions as dist
import pytest
import torch
from oracles.dense import dense_covariance, dense_precision, gaussian_kl
from pyro.nn import PyroSample

from pyro_nngp.inference import (
    NNReport,
    compare_to_exact,
)
from pyro_nngp.kernels import Matern52
from pyro_nngp.neighbors.graph import NeighborGraph

F64 = torch.float64


def regression(n=30):
    x = torch.rand(n, 2, dtype=F64)
    return Matern52(2, variance=torch.tensor(1.5, dtype=F64)), x, torch.sin(4 * x[:, 0])


def test_nearest_neighbors_against_the_exact_process():
    kernel, x, y = regression()
    report = compare_to_exact(kernel, x, y, [1, 4, 29], 0.1, seed=3)
    assert report.num_neighbors.tolist() == [1, 4, 29]
    exact, zero = dense_covariance(kernel, x).detach(), torch.zeros(30, dtype=F64)
    noise = 0.1 * torch.eye(30, dtype=F64)
    for k, kl, loss in zip(*report, strict=True):
        precision = dense_precision(kernel, NeighborGraph(x, int(k), seed=3)).detach()
        torch.testing.assert_close(kl, gaussian_kl(zero, exact, precision), rtol=1e-6, atol=1e-7)
        approximate = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        expected = deleted_score(exact + noise, y) - deleted_score(approximate + noise, y)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)
    assert report.kl[0] > 2 * report.kl[1] > 0.01
    single = compare_to_exact(kernel, x.float(), y.float(), [1, 4, 29], 0.1, seed=3)
    torch.testing.assert_close(single.kl, report.kl, rtol=1e-4, atol=1e-5)
    assert abs(report.kl[2]) < 1e-7


def deleted_score(cov, y):
    """Mean log density of each y given the others, by conditioning a normal on them."""
    score = 0.0
    for i in range(len(y)):
        rest = torch.arange(len(y)) != i
        w = torch.cholesky_solve(cov[rest, i][:, None], torch.linalg.cholesky(cov[rest][:, rest]))[:, 0]
        score = score + dist.Normal(w @ y[rest], (cov[i, i] - w @ cov[rest, i]).sqrt()).log_prob(y[i]) / len(y)
    return score


def test_nearest_neighbor_report_needs_values_of_the_hyperparameters():
    _, x, y = regression()
    prior = dist.LogNormal(torch.tensor(0.0, dtype=F64), 1.0)
    own = Matern52(2, lengthscale=PyroSample(prior))
    for kernel in (own, lambda a, b: own(a, b)):
        with pytest.raises(ValueError, match=r"expected kernel to have values, got priors on \['lengthscale'\]. Build"):
            compare_to_exact(kernel, x, y, [3], 0.1)


def test_nearest_neighbor_report_on_a_module_in_single_precision():
    class Warped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kernel = torch.nn.Linear(2, 2), regression()[0]

        def forward(self, a, b):
            return self.kernel(self.linear(a), self.linear(b))

    _, x, y = regression(200)
    kernel = Warped().float()
    single = compare_to_exact(kernel, x.float(), y.float(), [4], 0.1)
    wide = compare_to_exact(kernel.double(), x.float().double(), y.float().double(), [4], 0.1)
    torch.testing.assert_close(single.kl, wide.kl, rtol=1e-6, atol=0)
    assert isinstance(single, NNReport)


def test_nearest_neighbor_report_errors():
    kernel, x, y = regression()
    for x_bad, y_bad, ks, noise_var, message in (
        (torch.zeros(2001, 2), y, [3], 0.1, "expected x to have at most 2000 points, got 2001"),
        (x, y[:3], [3], 0.1, r"expected y of shape \(30,\), got \(3,\)"),
        (x, y, [3, 30], 0.1, "expected num_neighbors in 1..29, got 30"),
        (x, y, [3], 0.0, "expected noise_var to be finite and > 0, got 0.0"),
        (x.where(x > 0.1, torch.nan), y, [3], 0.1, "expected x to be finite"),
    ):
        with pytest.raises(ValueError, match=f"compare_to_exact: {message}"):
            compare_to_exact(kernel, x_bad, y_bad, ks, noise_var)
