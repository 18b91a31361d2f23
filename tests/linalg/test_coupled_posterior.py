import pytest
import torch

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior, coupled_elimination
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
N, T = 30, 3
GRAPH = NeighborGraph(torch.rand(N, 2, generator=torch.Generator().manual_seed(0), dtype=F64), 6)


def plan():
    return coupled_elimination(GRAPH.x, GRAPH.neighbors, 2, 1e12)


def problem(noise=1.0, sparse=False, **settings):
    generator = torch.Generator().manual_seed(1)
    factors = [NNGP(k(2, lengthscale=0.3), GRAPH).factor.prepared() for k in (Matern52, RBF)]
    loading = torch.randn(N, T, 2, generator=generator, dtype=F64)
    precision = torch.rand(T, N, generator=generator, dtype=F64) / noise
    precision[0, :9] = 0.0
    target = torch.randn(T, N, generator=generator, dtype=F64)
    if sparse:
        settings["plan"] = plan()
    return CoupledPosterior(factors, loading, precision, **settings), factors, loading, precision, target


def dense(factors, loading, precision):
    """P, latent functions first."""
    total = torch.block_diag(*[factor.dense() for factor in factors])
    for i in range(N):
        rows = torch.tensor([i, N + i])
        total[rows[:, None], rows] += loading[i].mT @ torch.diag(precision[:, i]) @ loading[i]
    return total


@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4])
def test_iterations_agree_with_the_dense_solution(noise):
    posterior, factors, loading, precision, target = problem(noise, dense_up_to=0)
    system = dense(factors, loading, precision)
    right = torch.einsum("ntl,tn->ln", loading, precision * target)
    want = torch.linalg.solve(system, right.flatten()).view(2, N)
    u = torch.randn(2, N, dtype=F64)
    torch.testing.assert_close(posterior.product(u).flatten(), system @ u.flatten(), rtol=1e-9, atol=1e-9)
    found = posterior.mean(target, torch.zeros(2, N, dtype=F64), 1e-9)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    for sparse in (False, True):
        found = problem(noise, sparse)[0].mean(target, torch.zeros(2, N, dtype=F64))
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sparse", [False, True])
def test_factors_give_covariances_and_determinant(sparse):
    posterior, *parts, _ = problem(0.1, sparse)
    system = dense(*parts)
    assert posterior.log_det() == pytest.approx(float(torch.logdet(system)), rel=1e-12)
    right = torch.randn(4, 2, N, dtype=F64)
    want = right.flatten(1) @ torch.linalg.inv(system) @ right.flatten(1).mT
    torch.testing.assert_close(posterior.inner_products(right), want, rtol=1e-9, atol=1e-11)
    cov = torch.linalg.inv(system).view(2, N, 2, N).diagonal(dim1=1, dim2=3).permute(2, 0, 1)
    torch.testing.assert_close(posterior.covariances(), cov, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_factor_at_other_precisions_preconditions(sparse, monkeypatch):
    near, factors, loading, precision, target = problem(0.1, sparse)
    graph_plan = {"plan": plan()} if sparse else {}
    other = CoupledPosterior(factors, loading, 1.3 * precision, **graph_plan)
    want, zero = other.mean(target, torch.zeros(2, N, dtype=F64)), torch.zeros(2, N, dtype=F64)
    products, product = [], CoupledPosterior.product
    monkeypatch.setattr(CoupledPosterior, "product", lambda *args: products.append(1) or product(*args))
    found = other.mean(target, zero, tolerance=1e-8, near=near)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    assert len(products) < 12


@pytest.mark.parametrize("settings", [{}, {"sparse": True}, pytest.param({"dense_up_to": 0}, marks=pytest.mark.slow)])
def test_draws_have_the_posterior_covariance(settings):
    posterior, factors, loading, precision, _ = problem(0.1, **settings)
    cov = torch.linalg.inv(dense(factors, loading, precision))
    torch.manual_seed(0)
    draws = torch.stack([posterior.draw(torch.zeros(2, N, dtype=F64)).flatten() for _ in range(1000)])
    spread = (cov.diagonal()[:, None] * cov.diagonal() + cov.square()).sqrt() / 1000**0.5
    assert ((draws.mT.cov() - cov).abs() / spread).max() < 6


def test_too_few_iterations_warn():
    posterior, *_, target = problem(dense_up_to=0, max_iterations=1)
    with pytest.warns(UserWarning, match=r"CoupledPosterior: conjugate gradients stopped after 1 iterations"):
        posterior.mean(target, torch.zeros(2, N, dtype=F64), 1e-9)
    with pytest.warns(UserWarning, match=r"CoupledPosterior: conjugate gradients stopped at a residual of NaN"):
        posterior.mean(target * torch.nan, torch.zeros(2, N, dtype=F64), 1e-9)
