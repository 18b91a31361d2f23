"""Loadings at their optimum against the dense evidence and its gradient."""

import pytest
import torch
from builders import F64, matern, normal, uniform

from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LMC
from pyro_nngp.variational import factor_solution
from pyro_nngp.variational.factor_solution import FactorSolution, find_intervals

N, T, F = 25, 4, 2


def build(likelihood, mean=None, kernels=None, holes=True):
    torch.manual_seed(0)
    x, a = uniform(N), normal(T, F)
    u = torch.stack([torch.sin(5 * x[:, 0]), torch.cos(4 * x[:, 1])])
    y = (a @ u).mT + 0.3 * normal(N, T) + 1.0
    y = (y > 1).to(F64) if isinstance(likelihood, Bernoulli) else y
    if holes:
        y[3, 1] = y[5:8, 2] = torch.nan
    kernels = [matern(0.3, 1.0), matern(0.6, 1.0)] if kernels is None else kernels
    return LMC(x, y, kernels, likelihood, mean=mean, mixing=FactorLoadings(T, F), num_neighbors=N - 1)


def solution_of(gp):
    given = gp.posterior(gp.bound())
    return FactorSolution(given, gp.q.latent_prior(given), gp.mixing, gp.q.loc, gp.q.covariance)


def log_joint(gp, loading, coefficients, basis):
    """Log evidence of Gaussian data, and log prior of loadings at expected precisions, without the part of scales."""
    kernels = list(gp.kernel) * (F if len(gp.kernel) == 1 else 1)
    cov = sum(torch.kron(torch.outer(loading[:, f], loading[:, f]), k(gp.x, gp.x)) for f, k in enumerate(kernels))
    noise = torch.cat([part.variance.expand(N) for part in gp.likelihood.outputs])
    residual = (gp.y.mT - coefficients @ basis.mT).flatten()
    seen = ~residual.isnan()
    cov = (cov + torch.diag(noise))[seen][:, seen]
    evidence = torch.distributions.MultivariateNormal(torch.zeros(len(cov), dtype=F64), cov).log_prob(residual[seen])
    prior = (gp.mixing.precision(gp.mixing.mode) * loading.square()).sum()
    prior = prior - torch.einsum("pf,fpq,qf->", loading, gp.mixing.radial_precision(gp.mixing.mode), loading)
    return evidence - prior / 2


@pytest.mark.parametrize(("linear", "noise"), [(False, 0.1), (True, 0.1), (False, 1e-3)])  # the last with long steps
def test_gaussian_data_the_gradient_of_the_dense_evidence_is_zero_at_the_optimum(linear, noise):
    mean = LinearMean(2, num_latents=T).to(F64) if linear else None
    gp = build(Gaussian(torch.tensor(noise, dtype=F64)), mean)
    gp.solve()
    solution = solution_of(gp)
    with torch.no_grad():
        assert solution.run(60, 1e-9) < 1e-2
        solution.finish()
    basis = gp.mean.basis(gp.x).detach()
    parts = gp.mixing.mode.clone().requires_grad_(), gp.mean.coefficients.mT.detach().clone().requires_grad_()
    in_loading, in_coefficients = torch.autograd.grad(log_joint(gp, *parts, basis), parts)
    assert in_loading.abs().max() < 0.3
    assert in_coefficients.abs().max() < 0.3
    (off,) = torch.autograd.grad(log_joint(gp, parts[0] + 0.1, parts[1].detach(), basis), parts[:1])
    assert off.abs().max() > 5


def test_intervals_leave_rotations_out_where_factors_share_a_kernel():
    found = []
    for kernels in (matern(0.4, 1.0), [matern(0.4, 1.0), matern(0.4, 1.0)]):
        gp = build(Gaussian(torch.tensor(0.1, dtype=F64)), kernels=kernels)
        gp.solve()
        find_intervals(gp.q, gp.posterior(gp.bound()), gp.mixing)
        along = (gp.mixing.mode @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=F64)).flatten()
        found.append(float((along / along.norm() @ gp.mixing.tril.to(F64)).norm()))
    assert found[0] < 0.2 * found[1]


def test_signs_and_order_follow_the_convention():
    gp = build(Gaussian(torch.tensor(0.1, dtype=F64)), kernels=matern(0.4, 1.0))
    gp.solve()
    scaled = gp.mixing.mode / gp.mixing.unit[:, None]
    gram = scaled.mT @ scaled
    assert gram[0, 0] > gram[1, 1]
    assert gram[0, 1].abs() < 1e-8 * gram[0, 0]
    assert bool((scaled.sum(0) > 0).all())


def test_factors_are_solved_for_at_known_loadings_once(monkeypatch):
    """Before the first solution for loadings; later ones start from the last."""
    gp, levels = build(Gaussian(torch.tensor(0.1, dtype=F64))), []
    solve = type(gp.q).solve
    monkeypatch.setattr(type(gp.q), "solve", lambda *args, **rest: levels.append(rest["level"]) or solve(*args, **rest))
    for _ in range(2):
        gp.solve(1)
        assert levels == [False]


def test_rounds_raise_the_evidence_of_labels():
    gp = build(Bernoulli())
    gp.solve(1)
    few = gp.mixing.mode.clone()
    first = -gp.correlations().estimate.sum()
    gp.solve(30)
    assert (gp.mixing.mode - few).abs().max() > 1e-3
    assert torch.isfinite(first)
    with torch.no_grad():
        assert solution_of(gp).round() < 0.1


def test_information_that_is_not_positive_is_raised_to_a_part_of_the_complete_one(monkeypatch):
    gp = build(Gaussian(torch.tensor(0.1, dtype=F64)))
    gp.solve(1)
    solution = solution_of(gp)
    width = F + 1  # of each output, its constant and its loadings
    some = torch.eye(T * width, dtype=F64)
    with torch.no_grad():
        monkeypatch.setattr(factor_solution, "information_of_means", lambda *_: 1e9 * some)
        found = solution.information()
        monkeypatch.setattr(factor_solution, "information_of_means", lambda *_: 0 * some)
        monkeypatch.setattr(factor_solution, "information_of_variances", lambda _: torch.zeros(()))
        whole = solution.information()
    each = [slice(t * width, (t + 1) * width) for t in range(T)]
    blocks = torch.block_diag(*[found[rows, rows] for rows in each])
    torch.testing.assert_close(found, blocks)  # nothing is left of what couples outputs
    shares = torch.linalg.eigvals(torch.linalg.solve(whole, found)).real
    assert 0 < shares.min() < shares.max() < 0.02
