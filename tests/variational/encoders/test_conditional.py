"""The encoder by one conditional against the exact mean and the weights of the prior."""

import pytest
import torch
from builders import matern, q_of, waves
from oracles.dense import dense_covariance
from oracles.waves import N

from pyro_nngp.distributions import NNGP
from pyro_nngp.likelihoods import (
    Gaussian,
)
from pyro_nngp.models import NPVI
from pyro_nngp.variational import Amortized
from pyro_nngp.variational.encoders import (
    ConditionalEncoder,
)

F64 = torch.float64


@pytest.mark.parametrize("num_neighbors", [4, N - 1])
def test_conditional_encoder_starts_at_the_exact_mean_for_gaussian_noise(num_neighbors):
    """With every point among the nodes; and the deviation is that given the parents and the own observation."""
    x, y = waves()
    encoder = ConditionalEncoder(num_context=N - 1)
    mean = torch.nn.Linear(2, 1).double()
    gp = NPVI(
        x, y, matern(), Gaussian(0.1), num_neighbors=num_neighbors, guide=Amortized(encoder), mean=mean, jitter=1e-6
    )
    noise, q = gp.likelihood.variance.detach(), q_of(gp)
    cov = dense_covariance(gp.kernel, x).detach()
    tril = torch.linalg.cholesky(cov + noise * torch.eye(N, dtype=F64))
    want = cov @ torch.cholesky_solve(y[:, None] - mean(x).detach(), tril)[:, 0]
    torch.testing.assert_close(q.loc, want, rtol=1e-7, atol=1e-8)
    _, var = NNGP(gp.kernel, gp.graph).conditionals
    torch.testing.assert_close(q.scale, (1 / var + 1 / noise).rsqrt())
    assert not q.weights.any()


def test_rows_of_the_conditional_encoder_follow_the_weights_of_the_prior():
    x, y = waves()
    encoder = ConditionalEncoder(num_context=6)
    encoder.network[-1].bias.data[2] = 8 * torch.tensor(0.5 / 8, dtype=F64).atanh()
    gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=5, guide=Amortized(encoder))
    q, (w, var) = q_of(gp), NNGP(gp.kernel, gp.graph, jitter=gp.jitter).conditionals
    base = (1 / var + 10).rsqrt()
    torch.testing.assert_close(q.scale, base * torch.tensor(0.5, dtype=F64).exp())
    torch.testing.assert_close(q.weights, 0.5 * w * (q.scale / (1 + 10 * var))[:, None])
