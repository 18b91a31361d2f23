"""Posterior means by iterations against dense solutions: their cost to the bound, and when they end."""

from functools import partial

import pytest
import torch

from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.factor import ShardedFactor
from pyro_nngp.distributed.table import ShardedGraph
from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.linalg import vecchia_factor
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.models import VNNGP
from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.variational import MeanField, SparseCholesky
from pyro_nngp.variational import posterior_mean as solver
from pyro_nngp.variational.natural_gradient import variational_optimum
from pyro_nngp.variational.posterior_mean import posterior_mean

N = 200
F64 = torch.float64


@pytest.fixture
def iterative(monkeypatch):
    monkeypatch.setattr(solver, "DENSE_UP_TO", 0)


def setting(kernel):
    graph = NeighborGraph(torch.rand(N, 2, dtype=F64), 8)
    return NNGP(kernel.requires_grad_(False), graph, jitter=1e-5).factor.prepared()


@pytest.mark.parametrize("strength", [1.0, 30.0])  # the prior says more than the data, or less
@pytest.mark.parametrize("tolerance", [0.3, 1e-2, 1e-4])
@pytest.mark.parametrize("kernel", [Matern52(2, lengthscale=0.05), RBF(2, lengthscale=0.4)])
def test_the_mean_costs_the_bound_no_more_than_the_tolerance_allows(strength, tolerance, kernel, iterative):
    prior = setting(kernel.double())
    y, precision, start = torch.randn(3, 2, N, dtype=F64)
    precision = strength * precision.exp()
    m = posterior_mean(prior, y, precision, start, tolerance)
    posterior = prior.dense() + torch.diag_embed(precision)
    error = m - torch.cholesky_solve((precision * y)[..., None], torch.linalg.cholesky(posterior))[..., 0]
    lost = (error[:, None] @ posterior @ error[..., None])[:, 0, 0] / 2
    assert (lost <= tolerance**2 / 2 * N).all()
    assert strength > 1 or lost.max() > 1e-12  # it did stop before rounding


def test_a_reduction_ends_sooner(monkeypatch, iterative):
    prior = setting(RBF(2, lengthscale=0.4).double())
    y, counts, products = torch.randn(N, dtype=F64), [], []
    one, zero = torch.ones(N, dtype=F64), torch.zeros(N, dtype=F64)
    iterate = vecchia_factor.conjugate_gradients

    def counted(product, *args, **options):
        return iterate(lambda z: counts.append(1) or product(z), *args, **options)

    monkeypatch.setattr(vecchia_factor, "conjugate_gradients", counted)
    for reduction in (0.0, 0.1):
        posterior_mean(prior, y, one, zero, 1e-6, reduction)
        products.append(len(counts))
    assert products[1] - products[0] < products[0] / 2


def sharded(kernel):
    """The prior as of a group of one process."""
    x = torch.rand(N, 2, dtype=F64)
    graph = ShardedGraph(ShardedData(x, x[:, 0]), 8)
    return ShardedFactor(graph, lambda rows, near: graph_conditional(kernel, graph.x[rows], graph.x, near))


@pytest.mark.parametrize("solver", ["one process", "several processes", "coupled"])
def test_a_reduction_is_of_the_residual_at_the_start(solver, iterative):
    """From near the solution as from afar: some of the error at the start is left, and not all."""
    kernel = Matern52(2, lengthscale=0.2).double().requires_grad_(False)
    prior = sharded(kernel) if solver == "several processes" else setting(kernel)
    y, start, precision = torch.randn(3, 1, N, dtype=F64)
    precision = 5 * precision.exp()
    if solver == "coupled":
        posterior = CoupledPosterior([prior], torch.ones(N, 1, 1, dtype=F64), precision, dense_up_to=0)
        solve = partial(posterior.mean, y)
    else:
        solve = partial(posterior_mean, prior, y, precision)
    exact = solve(0 * y, 1e-10)
    size = float((prior.product(exact) + precision * exact - precision * y).norm() / (precision * y).norm())
    assert size < 1e-6
    for distance in (1.0, 1e-3):
        error = solve(exact + distance * start, 1e-12, 0.1) - exact
        assert 1e-4 < error.norm() / (distance * start).norm() < 0.5


def test_few_values_of_several_processes_are_solved_densely_and_many_by_iterations(monkeypatch):
    prior = sharded(Matern52(2, lengthscale=0.2).double().requires_grad_(False))
    y, precision = torch.randn(2, N, dtype=F64)
    precision = precision.exp()
    posterior = prior.gathered().dense() + torch.diag(precision)
    exact = torch.cholesky_solve((precision * y)[:, None], torch.linalg.cholesky(posterior))[:, 0]
    torch.testing.assert_close(posterior_mean(prior, y, precision, 0 * y, 1.0), exact, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(solver, "DENSE_UP_TO", 0)
    monkeypatch.setattr(prior, "gathered", None)
    found = posterior_mean(prior, y, precision, 0 * y, 1e-2)
    assert 1e-9 < (found - exact).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("plain_iterations", [0, 5, 1000])
@pytest.mark.parametrize("guide", [MeanField(), SparseCholesky(8)])
@torch.no_grad()
def test_solving_by_conjugate_gradients_is_solving_densely(plain_iterations, guide, monkeypatch):
    x = torch.rand(300, 2, dtype=F64)
    y = torch.sin(5 * x.sum(-1))
    kernel = Matern52(2, lengthscale=torch.tensor(0.3, dtype=F64)).requires_grad_(False)
    gp = VNNGP(x, y, kernel, Gaussian(0.05), num_neighbors=8, guide=guide, jitter=1e-4)
    factor, q = NNGP(kernel, gp.graph, jitter=1e-4).factor, gp.q.distribution()
    problem = Gaussian(0.05), y, torch.zeros(300, dtype=F64), factor, q
    dense = variational_optimum(*problem)
    monkeypatch.setattr(solver, "DENSE_UP_TO", 0)
    monkeypatch.setattr(solver, "PLAIN_ITERATIONS", plain_iterations)
    iterative = variational_optimum(*problem)
    torch.testing.assert_close(iterative.loc, dense.loc, rtol=0, atol=1e-3)
    torch.testing.assert_close(iterative.scale, dense.scale)
    torch.testing.assert_close(iterative.weights, dense.weights)


@pytest.mark.parametrize("strength", [1.0, 30.0])
def test_a_preconditioner_that_does_not_suffice_is_left(strength, iterative):
    """With a solution for P itself at hand for it, else for other iterations."""
    prior = setting(RBF(2, lengthscale=0.4).double())
    y, precision = torch.randn(N, dtype=F64), strength * torch.randn(N, dtype=F64).exp()
    posterior, asked = prior.dense() + torch.diag(precision), []

    def direct(right):
        asked.append(right)
        return torch.linalg.solve(posterior, right)

    want = torch.linalg.solve(posterior, precision * y)
    for solve in (direct, None):
        found = posterior_mean(prior, y, precision, 0 * y, 1e-9, precondition=lambda r: 1e-3 * r, direct=solve)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    assert len(asked) == 1
