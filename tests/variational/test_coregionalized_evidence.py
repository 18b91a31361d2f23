"""The evidence of sites of several outputs under the priors of latent values, against dense computations in float64."""

import pytest
import torch

from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.coregionalized import NNGPs
from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Gaussian, Poisson
from pyro_nngp.linalg.coupled_posterior import CoupledPosterior, coupled_elimination
from pyro_nngp.models import LMC
from pyro_nngp.variational import coregionalized_evidence
from pyro_nngp.variational.coregionalized_evidence import coregionalized_gradient, coregionalized_log_evidence

F64 = torch.float64
N, K, DRAWS = 50, 4, 8


def problem(noise):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(N, 2, generator=generator, dtype=F64)
    f = torch.stack([torch.sin(5 * x.sum(-1)), torch.cos(4 * x[:, 0]), x[:, 1]], -1)
    y = f + noise**0.5 * torch.randn(N, 3, generator=generator, dtype=F64)
    y[:10, 0], y[20:30, 2] = torch.nan, torch.nan
    return x, y, torch.randn(3, 2, generator=generator, dtype=F64)


def method(noise, shared=False, varying=False, mean=None):
    x, y, mixing = problem(noise)
    kernels = [Matern32(2, variance=1.0, lengthscale=scale).double() for scale in (0.3, 0.6)]
    loading = torch.nn.Linear(2, 6, dtype=F64)
    by_place = torch.nn.Sequential(loading, torch.nn.Unflatten(-1, (3, 2)))
    return LMC(
        x,
        y,
        kernels[0] if shared else kernels,
        [Gaussian(variance=noise * factor) for factor in (1.0, 0.5, 2.0)],
        num_latents=2 if shared else None,
        num_neighbors=K,
        mixing=by_place if varying else mixing,
        mean=mean,
    )


def priors(gp):
    batch = gp.graph.batch()
    return NNGPs([NNGP(kernel, gp.graph, batch, jitter=gp.jitter) for kernel in gp.kernel], len(gp.q.loc))


def dense_density(conditionals, near, a, noise, target):
    """Log density of targets (T, N), NaN where missing, of mean zero, given conditionals of the latent functions."""
    covs = []
    for w, var in conditionals:
        weights = torch.zeros(N, N, dtype=F64).scatter_add(-1, near.clamp(min=0), w * (near >= 0))
        root = (torch.eye(N, dtype=F64) - weights) / var.sqrt()[:, None]
        covs.append(torch.linalg.inv(root.mT @ root))
    cov = sum(torch.einsum("it,js,ij->tisj", a[..., i], a[..., i], part) for i, part in enumerate(covs))
    target, seen = target.flatten(), ~target.flatten().isnan()
    cov = (cov.reshape(3 * N, 3 * N) + noise.flatten().diag())[seen][:, seen]
    return torch.distributions.MultivariateNormal(0 * target[seen], (cov + cov.mT) / 2).log_prob(target[seen])


def dense_log_evidence(gp):
    """Density of all targets under the conditionals of the latent functions, written out."""
    noise = torch.stack([part.variance.expand(N) for part in gp.likelihood.bind().outputs])
    each = [prior.conditionals for prior in priors(gp).each]
    return dense_density(each, gp.graph.neighbors, gp.loading(gp.x).expand(N, -1, -1), noise, (gp.y - gp.mean(gp.x)).mT)


@pytest.mark.parametrize("noise", [0.01, 1.0])
@pytest.mark.parametrize(
    "settings", [{}, {"shared": True}, {"varying": True}, {"mean": torch.nn.Linear(2, 3, dtype=F64)}]
)
def test_loss_and_gradients_are_those_of_the_sparse_priors(noise, settings):
    gp = method(noise, **settings)
    gp.solve()
    solved = set(map(id, gp.solved_parameters()))
    parameters = [value for value in gp.parameters() if value.requires_grad and id(value) not in solved]
    loss, evidence = IntegratedELBO().differentiable_loss(gp.model, gp.guide), dense_log_evidence(gp)
    assert loss.item() == pytest.approx(-evidence.item(), rel=1e-6)
    pairs = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(evidence, parameters), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, -other, rtol=1e-5, atol=1e-5)
    rounds = [IntegratedELBO().loss(gp.model, gp.guide, idx) for idx in torch.arange(N).split(25)]
    assert sum(rounds) / len(rounds) == pytest.approx(loss.item(), rel=1e-9)


def counts():
    """Two Poisson outputs and a Gaussian one, with missing values, of two latent functions."""
    x, y, mixing = problem(0.1)
    y[:, :2] = torch.poisson(y[:, :2].nan_to_num().exp(), generator=torch.Generator().manual_seed(0)) + 0 * y[:, :2]
    kernels = [Matern32(2, variance=1.0, lengthscale=scale).double() for scale in (0.3, 0.6)]
    parts = [Poisson(), Poisson(), Gaussian(variance=0.1)]
    return LMC(x, y, kernels, parts, num_neighbors=K, mixing=mixing)


def profiled(gp):
    """The loss of all rows at the optimum of q, and its gradient."""
    solved = set(map(id, gp.solved_parameters()))
    parameters = [value for value in gp.parameters() if value.requires_grad and id(value) not in solved]
    with gp.profile.optimum(tolerance=1e-8):
        loss = IntegratedELBO().differentiable_loss(gp.model, gp.guide)
        assert -gp.profile.bound().item() == pytest.approx(loss.item(), rel=1e-9)
    return loss.detach(), parameters, torch.autograd.grad(loss, parameters)


def test_the_profiled_gradient_is_that_of_differences_between_solutions():
    gp = counts()
    _, parameters, gradients = profiled(gp)
    assert len(parameters) == 6  # variances, lengthscales, loadings, noise
    for param, gradient in zip(parameters, gradients, strict=True):
        for entry in range(min(param.numel(), 2)):
            sides = []
            for step in (1e-3, -2e-3, 1e-3):
                with torch.no_grad():
                    param.reshape(-1)[entry].add_(step)
                sides.append(profiled(gp)[0])
            slope = (sides[0] - sides[1]).item() / 2e-3
            assert gradient.reshape(-1)[entry].item() == pytest.approx(slope, rel=1e-5, abs=1e-5)


def test_the_profile_is_the_dense_bound_at_its_sites():
    gp = counts()
    with gp.profile.optimum(tolerance=1e-8):
        loss = IntegratedELBO().loss(gp.model, gp.guide)
    factors, (target, precision) = priors(gp).factors(), gp.q.observations(gp.posterior(gp.bound()))
    posterior = CoupledPosterior(factors, gp.loading(gp.x).detach(), precision.detach())
    cov, prior = torch.linalg.inv(posterior.tril @ posterior.tril.mT), [f.dense() for f in factors]
    loc = posterior.mean(target.detach(), torch.zeros(2, N, dtype=F64))
    torch.testing.assert_close(gp.q.loc, loc, rtol=1e-5, atol=1e-6)
    lam = torch.block_diag(*prior)
    divergence = (lam @ cov).trace() + loc.flatten() @ lam @ loc.flatten() - 2 * N
    divergence = (divergence - torch.logdet(cov) - torch.logdet(lam)) / 2
    variance = torch.einsum("ntl,nlk,ntk->tn", posterior.loading, posterior.covariances(), posterior.loading)
    f = posterior.at(loc) + gp.mean(gp.x).mT.detach()
    expected = gp.likelihood.bind().expected_log_prob(gp.y.mT, f, variance).sum()
    assert loss == pytest.approx((divergence - expected).item(), rel=1e-6)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_evidence_and_its_gradient_are_those_of_the_dense_density(is_sparse):
    gp = method(0.1, varying=True)
    factors, a = priors(gp).factors(), gp.loading(gp.x).detach().requires_grad_()
    missing = gp.y.mT.isnan()
    precision = torch.rand(3, N, dtype=F64).exp().requires_grad_()
    target = torch.randn(3, N, dtype=F64).requires_grad_()
    each = [(f.w.clone().requires_grad_(), f.var.clone().requires_grad_()) for f in factors]
    masked = torch.where(missing, torch.nan, target)
    value = dense_density(each, gp.graph.neighbors, a, 1 / precision, masked)
    want = torch.autograd.grad(
        value, [*(part for pair in zip(*each, strict=True) for part in pair), a, precision, target]
    )
    plan = coupled_elimination(gp.graph.x, gp.graph.neighbors, 2, 1e12) if is_sparse else None
    posterior = CoupledPosterior(factors, a.detach(), precision.detach() * ~missing, plan=plan)
    known = (target * ~missing).detach()
    loc = posterior.mean(known, torch.zeros(2, N, dtype=F64))
    assert coregionalized_log_evidence(posterior, known, loc).item() == pytest.approx(value.item(), rel=1e-7)
    found = coregionalized_gradient(posterior, known, loc)
    there = gp.graph.neighbors >= 0
    parts = [*(w * there for w in found.w), *found.var, found.loading, found.precision, found.target]
    for one, other in zip(parts, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_sparse_and_dense_gradients_agree():
    gp = counts()
    gp.solve()
    target, precision = (part.detach() for part in gp.q.observations(gp.posterior(gp.bound())))
    parts = priors(gp).factors(), gp.loading(gp.x).detach(), precision
    plan = coupled_elimination(gp.graph.x, gp.graph.neighbors, 2, 1e12)
    found, want = (coregionalized_gradient(CoupledPosterior(*parts, plan=p), target, gp.q.loc) for p in (plan, None))
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_counts_train_by_few_quasi_newton_steps():
    gp = counts()
    before = profiled(gp)[0]
    result = fit(gp, progress=False)
    assert "L-BFGS" in str(result)
    assert len(result.losses) < 60
    after, _, gradients = profiled(gp)
    assert after < before - 1
    assert all(float(gradient.abs().max()) < 0.5 for gradient in gradients)


@pytest.mark.parametrize("noise", [0.01, pytest.param(1.0, marks=pytest.mark.slow)])
def test_draws_give_the_gradient_within_its_error(monkeypatch, noise):
    monkeypatch.setattr(coregionalized_evidence, "TOLERANCE", 1e-3)
    monkeypatch.setattr(coregionalized_evidence, "number_of_draws", lambda size: DRAWS)
    gp = method(noise)
    gp.solve()
    target, precision = (part.detach() for part in gp.q.observations(gp.posterior(gp.bound())))
    parts = priors(gp).factors(), gp.loading(gp.x).detach(), precision
    exact = coregionalized_gradient(CoupledPosterior(*parts), target, gp.q.loc)
    drawn = CoupledPosterior(*parts, dense_up_to=0)
    found = [coregionalized_gradient(drawn, target, gp.q.loc, seed) for seed in range(8)]

    def check(values, want, most):
        values = torch.stack(values)
        assert values.std() < most
        assert abs(values.mean() - want) < 6 * values.std() / 8**0.5

    for i, factor in enumerate(drawn.factors):  # of the logarithm of a variance: without control N / 2 for one draw
        check([(g.var[i] * factor.var).sum() for g in found], (exact.var[i] * factor.var).sum(), (N / DRAWS / 2) ** 0.5)
    for p in range(3):
        own = [(g.precision[p] * precision[p]).sum() for g in found]
        check(own, (exact.precision[p] * precision[p]).sum(), (N / DRAWS / 2) ** 0.5)
        for i in range(2):
            size = exact.loading[:, p, i].norm()
            check([g.loading[:, p, i].sum() for g in found], exact.loading[:, p, i].sum(), size + N**0.5)


def test_counts_are_trained_on_the_evidence_of_latent_values():
    x, _, mixing = problem(0.1)
    f = torch.sin(5 * x.sum(-1))
    y = torch.poisson(f.exp(), generator=torch.Generator().manual_seed(0))
    pair = torch.stack([y, f], -1)
    gp = LMC(x, pair, 2, [Poisson(), Gaussian(variance=0.1)], num_neighbors=K, mixing=mixing[:2])
    gp.solve()
    excess = gp.q.excess
    assert excess.value.abs() > 1e-3
    (of_loading,) = torch.autograd.grad(excess(gp.posterior(gp.bound()).parameters), gp.mixing_unconstrained)
    assert of_loading.isfinite().all()
    assert of_loading.any()


def test_moves_along_the_difference_are_bounded():
    gp = method(1.0)
    gp.solve()
    excess = gp.q.excess
    value, slope = excess.value.item(), excess.slope.clone()
    assert slope.abs().max() > 0.1
    for far in (0.5, 2.0, 10.0):  # along the slope, and no further than the radius pays
        excess.place.sub_(far * slope.sign())
        assert excess(gp.posterior(gp.bound()).parameters).item() <= value + 0.25 * slope.abs().sum().item() + 1e-9
        excess.place.add_(far * slope.sign())
    assert excess(gp.posterior(gp.bound()).parameters).item() == pytest.approx(value)
