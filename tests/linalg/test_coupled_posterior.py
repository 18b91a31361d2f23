import pytest
import torch

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import RBF, Matern52
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior
from pyro_nngp.neighbors import NeighborGraph

F64 = torch.float64
N, T = 30, 3


def problem(noise=1.0, **settings):
    generator = torch.Generator().manual_seed(0)
    graph = NeighborGraph(torch.rand(N, 2, generator=generator, dtype=F64), 6)
    factors = [NNGP(k(2, lengthscale=0.3), graph).factor.prepared() for k in (Matern52, RBF)]
    loading = torch.randn(N, T, 2, generator=generator, dtype=F64)
    precision = torch.rand(T, N, generator=generator, dtype=F64) / noise
    precision[0, :9] = 0.0
    target = torch.randn(T, N, generator=generator, dtype=F64)
    return CoupledPosterior(factors, loading, precision, **settings), factors, loading, precision, target


def dense(factors, loading, precision):
    """P, latent functions first."""
    total = torch.block_diag(*[factor.dense() for factor in factors])
    for i in range(N):
        rows = torch.tensor([i, N + i])
        total[rows[:, None], rows] += loading[i].mT @ torch.diag(precision[:, i]) @ loading[i]
    return total


@pytest.mark.parametrize("noise", [1.0, 1e-2])
@pytest.mark.parametrize("easy", [True, False])
def test_iterations_agree_with_the_dense_solution(easy, noise):
    posterior, factors, loading, precision, target = problem(noise, dense_up_to=0)
    system = dense(factors, loading, precision)
    right = torch.einsum("ntl,tn->ln", loading, precision * target)
    want = torch.linalg.solve(system, right.flatten()).view(2, N)
    u = torch.randn(2, N, dtype=F64)
    torch.testing.assert_close(posterior.product(u).flatten(), system @ u.flatten(), rtol=1e-9, atol=1e-9)
    found, _ = posterior.mean(target, torch.zeros(2, N, dtype=F64), easy, 1e-9)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    found, _ = problem(noise)[0].mean(target, torch.zeros(2, N, dtype=F64))
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [{}, pytest.param({"dense_up_to": 0}, marks=pytest.mark.slow)])
def test_draws_have_the_posterior_covariance(settings):
    posterior, factors, loading, precision, _ = problem(0.1, **settings)
    cov = torch.linalg.inv(dense(factors, loading, precision))
    torch.manual_seed(0)
    draws = torch.stack([posterior.draw(torch.zeros(2, N, dtype=F64)).flatten() for _ in range(1000)])
    spread = (cov.diagonal()[:, None] * cov.diagonal() + cov.square()).sqrt() / 1000**0.5
    assert ((draws.mT.cov() - cov).abs() / spread).max() < 6


def test_too_few_iterations_warn():
    posterior, *_, target = problem(1e-4, dense_up_to=0, max_iterations=1)
    with pytest.warns(UserWarning, match=r"CoupledPosterior: conjugate gradients stopped after 1 iterations"):
        posterior.mean(target, torch.zeros(2, N, dtype=F64), False, 1e-9)
    with pytest.warns(UserWarning, match=r"CoupledPosterior: conjugate gradients stopped at a residual of NaN"):
        posterior.mean(target * torch.nan, torch.zeros(2, N, dtype=F64), False, 1e-9)
