"""The encoder by sites against the exact posterior."""

import pytest
import torch
from builders import matern, q_of, waves
from oracles.dense import dense_covariance
from oracles.waves import N, factor

from pyro_nngp.likelihoods import (
    Gaussian,
)
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import NPVI
from pyro_nngp.variational import Amortized
from pyro_nngp.variational.encoders import (
    SiteEncoder,
)

F64 = torch.float64


def test_sizes_are_small_where_none_are_given():
    encoder = SiteEncoder(2)
    assert [layer.out_features for layer in encoder.own] == [20, 10]
    assert (encoder.head.in_features, encoder.num_context) == (10, 10)


@pytest.mark.parametrize("num_neighbors", [4, N - 1])
def test_right_sites_on_all_points_give_the_exact_posterior(num_neighbors):
    """With y and its noise for sites and every point among the nodes: the mean, and rows of the factor, at any K."""
    x, y = waves()
    encoder = SiteEncoder(2, num_context=N - 1)
    settings = {"mean": ConstantMean(0.0), "jitter": 1e-6}
    gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=num_neighbors, guide=Amortized(encoder), **settings)
    variance, noise = gp.kernel.variance.detach(), gp.likelihood.variance.detach()
    encoder.head.bias.data[1] = 8 * ((variance / noise).log() / 8).atanh()
    q, cov = q_of(gp), dense_covariance(gp.kernel, x).detach()
    tril = torch.linalg.cholesky(cov + noise * torch.eye(N, dtype=F64))
    half = torch.linalg.solve_triangular(tril, cov, upper=False)
    want, root = cov - half.mT @ half, factor(gp)
    torch.testing.assert_close(q.loc, cov @ torch.cholesky_solve(y[:, None], tril)[:, 0], rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(q.variance.detach(), want.diagonal(), rtol=1e-7, atol=0)
    for i in range(N):
        near = gp.graph.neighbors[i][gp.graph.neighbors[i] >= 0]
        near = near[torch.argsort(torch.argsort(gp.graph.order)[near])]
        nodes = torch.cat([near, torch.tensor([i])])
        row = torch.linalg.cholesky(want[nodes][:, nodes])[-1]
        torch.testing.assert_close(root[i, nodes], row, rtol=1e-6, atol=1e-9)
