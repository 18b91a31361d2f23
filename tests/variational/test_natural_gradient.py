"""Solutions for q(u) that end where the bound no longer gains, and what they say where they end before."""

import pytest
import torch

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.linalg.precision import PriorPrecision
from pyro_nngp.linalg.whitening import Whitening
from pyro_nngp.models import NPVI, VNNGP
from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.variational.natural_gradient import posterior_mean
from pyro_nngp.variational.sparse_factor import FactorOptimum

N = 200
F64 = torch.float64


def setting(kernel):
    graph = NeighborGraph(torch.rand(N, 2, dtype=F64), 8)
    w, var = NNGP(kernel.requires_grad_(False), graph, jitter=1e-5).conditionals
    return PriorPrecision(w, var, graph.neighbors), Whitening(w, var, graph.neighbors, graph.levels())


@pytest.mark.parametrize("easy", [False, True])
@pytest.mark.parametrize("tolerance", [0.3, 1e-2, 1e-4])
@pytest.mark.parametrize("kernel", [Matern52(2, lengthscale=0.05), RBF(2, lengthscale=0.4)])
def test_the_mean_costs_the_bound_no_more_than_the_tolerance_allows(monkeypatch, easy, tolerance, kernel):
    monkeypatch.setattr("pyro_nngp.variational.natural_gradient._DENSE_UP_TO", 0)
    prior, white = setting(kernel.double())
    y, precision, start = torch.randn(3, 2, N, dtype=F64)
    precision = precision.exp()
    m, _ = posterior_mean(prior, white, y, precision, start, easy, tolerance)
    posterior = prior.dense() + torch.diag_embed(precision)
    error = m - torch.cholesky_solve((precision * y)[..., None], torch.linalg.cholesky(posterior))[..., 0]
    lost = (error[:, None] @ posterior @ error[..., None])[:, 0, 0] / 2
    assert (lost <= tolerance**2 / 2 * N).all()
    assert lost.max() > 1e-12  # it did stop before rounding


def test_a_reduction_ends_sooner(monkeypatch):
    monkeypatch.setattr("pyro_nngp.variational.natural_gradient._DENSE_UP_TO", 0)
    prior, white = setting(RBF(2, lengthscale=0.4).double())
    y, counts = torch.randn(N, dtype=F64), []
    for reduction in (0.0, 0.1):
        products, color = [], white.color
        monkeypatch.setattr(white, "color", lambda z, p=products, c=color: p.append(1) or c(z))
        posterior_mean(prior, white, y, torch.ones(N, dtype=F64), torch.zeros(N, dtype=F64), False, 1e-6, reduction)
        monkeypatch.setattr(white, "color", color)
        counts.append(len(products))
    assert counts[1] < counts[0] / 2


@pytest.mark.parametrize("method", [NPVI, VNNGP])
def test_a_solution_that_still_moves_says_so(method):
    x = torch.rand(60, 2, dtype=F64)
    gp = method(x, (x[:, 0] > 0.5).double(), Matern52(2, variance=torch.tensor(50.0)), Bernoulli(), num_neighbors=5)
    with pytest.warns(UserWarning, match=r"means still moved by .* in the last natural-gradient step"):
        gp.solve(max_steps=1)


def test_the_factor_is_found_once_for_gaussian_noise_and_seldom_for_labels(monkeypatch):
    calls = []

    class Counted(FactorOptimum):
        def __call__(self, tau):
            calls.append(tau)
            return super().__call__(tau)

    monkeypatch.setattr("pyro_nngp.variational.natural_gradient.FactorOptimum", Counted)
    x = torch.rand(60, 2, dtype=F64)
    NPVI(x, x[:, 0], Matern52(2), Gaussian(0.1), num_neighbors=5).solve()
    assert len(calls) == 1
    labels = NPVI(x, (x[:, 0] > 0.5).double(), Matern52(2), Bernoulli(), num_neighbors=5)
    labels.solve()
    assert len(calls[1:]) <= 4
    calls.clear()
    labels.solve()
    assert len(calls) == 1  # it is there already
