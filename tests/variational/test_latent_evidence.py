"""The evidence of sites under the prior of latent values, against dense computations in float64."""

import math
from functools import partial

import pytest
import torch
from pyro import poutine

from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import IntegratedELBO
from pyro_nngp.kernels import Matern32, bind
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from pyro_nngp.linalg import NotPositiveDefiniteError, VecchiaFactor
from pyro_nngp.models import VNNGP
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational import factored_posterior, latent_evidence
from pyro_nngp.variational.evidence_excess import excess_gradient
from pyro_nngp.variational.factored_posterior import FactoredPosterior, elimination_of
from pyro_nngp.variational.latent_evidence import ExactLogEvidence, evidence_gradient, latent_log_evidence
from pyro_nngp.variational.latent_prior import LatentPrior

F64 = torch.float64
N, K = 120, 5


def kernel(variance=1.3, lengthscale=0.4):
    return Matern32(2, variance=variance, lengthscale=lengthscale).double()


def sites(n=N, noise=5.0):
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(n, 2, generator=generator, dtype=F64)
    precision = (0.5 + torch.rand(n, generator=generator, dtype=F64)) / noise
    return NeighborGraph(x, K), torch.sin(5 * x.sum(-1)) + torch.randn(n, generator=generator, dtype=F64), precision


def dense_log_evidence(w, var, graph, target, precision):
    """Density of the targets under the precision of the conditionals, written out; and the posterior mean."""
    n = len(var)
    real = graph.neighbors >= 0
    weights = torch.zeros(n, n, dtype=F64).scatter_add(-1, graph.neighbors.clamp(min=0), w * real)
    root = (torch.eye(n, dtype=F64) - weights) / var.sqrt()[:, None]
    cov = torch.linalg.inv(root.mT @ root)
    total = (cov + cov.mT) / 2 + torch.diag(1 / precision)
    mean = cov @ torch.linalg.solve(total, target)
    return torch.distributions.MultivariateNormal(torch.zeros(n, dtype=F64), total).log_prob(target), mean


def solution(graph, target, precision, cov=None):
    """The prior's factor, and log Z with its gradients by autograd through dense matrices."""
    with torch.no_grad():
        prior = NNGP(kernel() if cov is None else cov, graph).factor.prepared()
    w, var = prior.w.clone().requires_grad_(), prior.var.clone().requires_grad_()
    value, mean = dense_log_evidence(w, var, graph, target, precision)
    return prior, mean.detach(), value.detach(), torch.autograd.grad(value, (w, var))


def test_value_and_gradient_are_the_dense_ones():
    graph, target, precision = sites()
    prior, mean, value, (w, var) = solution(graph, target, precision)
    torch.testing.assert_close(latent_log_evidence(prior, target, mean, precision), value, rtol=1e-9, atol=0)
    got = evidence_gradient(prior, target, mean, precision)
    torch.testing.assert_close(got.w, w, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(got.var, var, rtol=1e-7, atol=1e-8)


def test_gradient_in_the_sites_is_that_of_differences():
    graph, target, precision = sites()
    prior, mean, _, _ = solution(graph, target, precision)
    got = evidence_gradient(prior, target, mean, precision)

    def value(target, precision):
        return dense_log_evidence(prior.w, prior.var, graph, target, precision)[0]

    for row in (0, 17, N - 1):
        step = torch.zeros(N, dtype=F64)
        step[row] = 1e-4
        by_target = value(target + step, precision) - value(target - step, precision)
        by_precision = value(target, precision + step) - value(target, precision - step)
        assert got.target[row].item() == pytest.approx(by_target.item() / 2e-4, rel=1e-5, abs=1e-7)
        assert got.precision[row].item() == pytest.approx(by_precision.item() / 2e-4, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("noise", [0.01, 5.0])
def test_draws_give_the_gradient_in_the_noise(monkeypatch, noise):
    graph, target, precision = sites(noise=noise)
    prior, mean, _, _ = solution(graph, target, precision)
    exact = (precision * evidence_gradient(prior, target, mean, precision).precision).sum()
    monkeypatch.setattr(latent_evidence, "DENSE_UP_TO", 0)
    monkeypatch.setattr(latent_evidence, "TOLERANCE", 1e-3)
    found = torch.stack(
        [(precision * evidence_gradient(prior, target, mean, precision, i).precision).sum() for i in range(24)]
    )
    # 32 draws of N numbers without control variates had an error of sqrt(N / 2 / 32) where noise is small
    assert found.std() < 0.75 * (N / 64) ** 0.5
    assert abs(found.mean() - exact) < 6 * found.std() / len(found) ** 0.5


def test_draws_give_the_gradient_of_hyperparameters_within_a_fraction_of_its_standard_error(monkeypatch):
    graph, target, precision = sites()
    prior, mean, _, (_, var) = solution(graph, target, precision)
    monkeypatch.setattr(latent_evidence, "DENSE_UP_TO", 0)
    log_scale = torch.zeros((), dtype=F64, requires_grad=True)
    _, moved = NNGP(Matern32(2, variance=1.3 * log_scale.exp(), lengthscale=0.4).double(), graph).conditionals
    (slope,) = torch.autograd.grad(moved.sum(), log_scale)  # the variances of the conditionals; weights do not change
    exact = float((var * prior.var).sum())
    assert slope == pytest.approx(float(prior.var.sum()))
    found = torch.tensor(
        [float((evidence_gradient(prior, target, mean, precision, i).var * prior.var).sum()) for i in range(8)]
    )
    # the draws share most of their randomness with draws of the prior: without these the error were sqrt(N / 2 / 32)
    assert found.std() < 0.5 * (N / 64) ** 0.5
    assert abs(found.mean() - exact) < 6 * found.std() / len(found) ** 0.5


def test_excess_is_the_difference_of_two_gradients():
    graph, target, precision = sites()
    cov = kernel()
    prior, mean, _, _ = solution(graph, target, precision, cov)
    parameters = list(cov.parameters())

    def observed():
        w, var = NNGP(cov, graph).response_conditionals(1 / precision)
        loc = (w * target[graph.neighbors.clamp(min=0)]).sum(-1)
        return torch.distributions.Normal(loc, (var + 1 / precision).sqrt()).log_prob(target).sum()

    def latent():
        return dense_log_evidence(*NNGP(cov, graph).conditionals, graph, target, precision)[0]

    want = [torch.autograd.grad(f(), parameters) for f in (latent, observed)]
    gradients = [evidence_gradient(prior, target, mean, precision)]
    target.requires_grad_()  # the gradients of sites go to parameters of the sites alone
    found, value = excess_gradient(parameters, bind(cov), graph, 1e-6, target[None], precision[None], gradients)
    for got, one, other in zip(found, *want, strict=True):
        torch.testing.assert_close(got, one - other, rtol=1e-6, atol=1e-7)
    assert value == pytest.approx(observed().item(), rel=1e-9)


def test_exact_evidence_has_the_dense_gradients():
    graph, target, precision = sites(n=40)
    prior, _, value, _ = solution(graph, target, precision)
    last = FactoredPosterior(prior, elimination_of(graph))
    parts = [part.clone().requires_grad_() for part in (prior.w, prior.var, target, precision)]
    for _ in range(2):  # with a factor of its own, and with the last one
        found = ExactLogEvidence.apply(*parts, graph.neighbors, last)
        dense = dense_log_evidence(*parts[:2], graph, *parts[2:])[0]
        torch.testing.assert_close(found, value, rtol=1e-10, atol=0)
        for one, other in zip(torch.autograd.grad(found, parts), torch.autograd.grad(dense, parts), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
        last.factors(precision)


@pytest.mark.parametrize(("lengthscale", "is_near"), [(0.402, True), (0.8, False)])
def test_the_last_factor_serves_as_long_as_hyperparameters_are_near(lengthscale, is_near):
    graph, target, precision = sites(n=40)
    last, plan = (
        FactoredPosterior(NNGP(kernel(), graph).factor.prepared(), elimination_of(graph)),
        elimination_of(graph),
    )
    last.factors(precision)
    cov = kernel(lengthscale=lengthscale)
    assert last.is_near(NNGP(cov, graph).factor.prepared()) == is_near
    latent = LatentPrior(bind(cov), graph, 1e-6, plan=plan, last=last)
    found = latent.posterior_mean(target, precision, 0 * target, 1e-6, 0.0)
    torch.testing.assert_close(found, solution(graph, target, precision, cov)[1], rtol=1e-5, atol=1e-6)
    assert not latent.exact.has_factors  # until variances are asked for
    assert latent.precedes(precision)


def profile(gp):
    """The loss of all rows at the optimum of q, and its gradient in the kernel."""
    with gp.profile.optimum(tolerance=1e-8):
        loss = IntegratedELBO().differentiable_loss(gp.model, gp.guide)
    return loss.detach(), torch.autograd.grad(loss, list(gp.kernel.parameters()))


@pytest.mark.parametrize(
    "likelihood", [Gaussian(variance=0.3), Poisson(), pytest.param(Bernoulli(), marks=pytest.mark.slow)]
)
def test_the_profiled_gradient_is_that_of_differences_between_solutions(likelihood):
    x, y = labels(60)
    gp = VNNGP(x, y, kernel(), likelihood, num_neighbors=K)
    _, gradients = profile(gp)
    for param, gradient in zip(gp.kernel.parameters(), gradients, strict=True):
        sides = []
        for step in (1e-3, -1e-3):
            with torch.no_grad():
                param.reshape(-1)[0].add_(step)
            sides.append(profile(gp)[0])
            with torch.no_grad():
                param.reshape(-1)[0].sub_(step)
        assert gradient.reshape(-1)[0].item() == pytest.approx((sides[0] - sides[1]).item() / 2e-3, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("likelihood", [partial(Gaussian, variance=0.3), Bernoulli])
def test_an_evaluation_near_the_last_one_takes_one_factorization(likelihood, dtype, monkeypatch):
    x, y = labels(60)
    gp = VNNGP(x.to(dtype), y.to(dtype), kernel().to(dtype), likelihood(), num_neighbors=K)
    with gp.profile.optimum(keep=True):
        pass
    gp.kernel.variance = 1.02 * gp.kernel.variance.detach()
    made, make = [], VecchiaFactor.multifrontal
    monkeypatch.setattr(VecchiaFactor, "multifrontal", lambda *args: made.append(1) or make(*args))
    with gp.profile.optimum(keep=True):
        loss = IntegratedELBO().differentiable_loss(gp.model, gp.guide)
        loss.backward()
    assert len(made) == 1
    with gp.profile.optimum(tolerance=1e-8):
        best = IntegratedELBO().differentiable_loss(gp.model, gp.guide)
    assert loss.item() == pytest.approx(best.item(), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_level_is_that_of_least_squares_where_noise_is_tiny(dtype):
    x, _ = labels(60)
    y, noise = torch.sin(5 * x.sum(-1)), 2e-8
    gp = VNNGP(x.to(dtype), y.to(dtype), kernel().to(dtype), Gaussian(variance=noise), num_neighbors=K)
    with torch.no_grad():
        cov = torch.linalg.inv(NNGP(gp.kernel, gp.graph).factor.dense()) + noise * torch.eye(60, dtype=F64)
        level = torch.linalg.solve(cov, torch.stack([gp.y.double(), torch.ones_like(y)], -1)).sum(0)
    for start in (0.0, 5.0):
        gp.mean.assign(torch.full((1, 1), start, dtype=dtype))
        with gp.profile.optimum():
            assert gp.mean.value.item() == pytest.approx((level[0] / level[1]).item(), rel=1e-3)


def test_hyperparameters_without_a_solution_leave_q_as_it_was():
    x, y = labels(60)
    gp = VNNGP(x, y, kernel(), Poisson(), num_neighbors=K)
    gp.solve()
    before = [part.clone() for part in (gp.q.loc, gp.q.precision)]
    gp.mean.assign(torch.full((1, 1), torch.nan, dtype=F64))
    with pytest.raises(NotPositiveDefiniteError, match="no optimum at these hyperparameters"), gp.profile.optimum():
        pass
    assert all(map(torch.equal, before, (gp.q.loc, gp.q.precision)))


def test_with_all_neighbors_the_profile_is_the_evidence_of_the_exact_process():
    x, y = labels(50)
    gp = VNNGP(x, y, kernel(), Gaussian(variance=0.3), num_neighbors=49)
    with torch.no_grad():
        loss = profile_value(gp)
        cov = gp.kernel(x) + (0.3 + gp.jitter * 1.3) * torch.eye(50, dtype=F64)
        level = torch.linalg.solve(cov, torch.stack([y, torch.ones_like(y)], -1)).sum(0)
        normal = torch.distributions.MultivariateNormal((level[0] / level[1]).expand(50), cov)
    torch.testing.assert_close(loss, -normal.log_prob(y), rtol=1e-6, atol=0)


def test_with_all_neighbors_the_profile_of_labels_is_the_largest_bound_of_the_exact_process():
    x, y = labels(40)
    gp = VNNGP(x, y, kernel(), Bernoulli(), num_neighbors=39, mean=lambda x: x.new_zeros(len(x)))
    prior = gp.kernel(x).detach() + gp.jitter * 1.3 * torch.eye(40, dtype=F64)
    root = torch.linalg.cholesky(prior)
    loc, tril = torch.zeros(40, dtype=F64).requires_grad_(), torch.eye(40, dtype=F64).requires_grad_()
    optimizer = torch.optim.LBFGS([loc, tril], max_iter=300, line_search_fn="strong_wolfe")
    likelihood = Bernoulli().bind()

    def negative_bound():
        """Of q(f) with the mean `root loc` and the factor `root tril` of its covariance."""
        scale = (root @ tril.tril()).square().sum(-1)
        divergence = loc.square().sum() + tril.tril().square().sum() - 40 - 2 * tril.diagonal().abs().log().sum()
        return divergence / 2 - likelihood.expected_log_prob(y, root @ loc, scale).sum()

    def closure():
        optimizer.zero_grad()
        value = negative_bound()
        value.backward()
        return value

    optimizer.step(closure)
    with torch.no_grad():
        torch.testing.assert_close(profile_value(gp), negative_bound(), rtol=0, atol=2e-4)


def profile_value(gp):
    with gp.profile.optimum(tolerance=1e-7):
        return torch.tensor(IntegratedELBO().loss(gp.model, gp.guide), dtype=F64)


def labels(n, amplitude=2.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=F64)
    f = amplitude * torch.sin(6 * x[:, 0]) * torch.cos(5 * x[:, 1])
    return x, (torch.rand(n, generator=generator, dtype=F64) < f.sigmoid()).to(F64)


def test_loss_and_gradient_are_those_of_the_sparse_prior():
    x, y = labels(N)
    gp = VNNGP(x, y, kernel(), Bernoulli(), num_neighbors=K, mean=torch.nn.Linear(2, 1, dtype=F64))
    gp.solve(tolerance=1e-6)
    local = gp.q

    def evidence():
        return dense_log_evidence(*NNGP(gp.kernel, gp.graph).conditionals, gp.graph, local.target, local.precision)[0]

    def loss(idx=None):
        return IntegratedELBO().differentiable_loss(gp.model, gp.guide, *(() if idx is None else (idx,)))

    with torch.no_grad():
        mean = gp.mean(x)[:, 0]
        expected = gp.likelihood.bind().expected_log_prob(y, mean + local.loc, local.variance).sum()
        misfit = (local.target - local.loc).square() + local.variance
        site = -0.5 * (local.precision * misfit + (2 * math.pi / local.precision).log()).sum()
    torch.testing.assert_close(loss(), -(expected - site + evidence()), rtol=1e-6, atol=0)
    parameters = list(gp.kernel.parameters())
    for one, other in zip(
        torch.autograd.grad(loss(), parameters), torch.autograd.grad(evidence(), parameters), strict=True
    ):
        torch.testing.assert_close(one, -other, rtol=1e-4, atol=1e-4)
    parts = [loss(idx).item() for idx in torch.arange(N).split(30)]
    assert sum(parts) / len(parts) == pytest.approx(loss().item(), rel=1e-9)


@pytest.mark.parametrize("has_factor", [True, False])
def test_losses_of_one_run_compare_beyond_the_dense_size(monkeypatch, has_factor):
    if not has_factor:
        monkeypatch.setattr(factored_posterior, "MOST_OPERATIONS", 0.0)
    x, y = labels(N)
    gp = VNNGP(x, y, kernel(), Bernoulli(), num_neighbors=K)
    exact = []
    for small in (True, False):
        if not small:
            monkeypatch.setattr("pyro_nngp.variational.evidence_excess.DENSE_UP_TO", 0)
        found = []
        for variance in (1.0, 1.2, 1.44):
            gp.kernel.variance = variance
            gp.solve(tolerance=1e-6)
            found.append(IntegratedELBO().loss(gp.model, gp.guide))
        exact.append([value - found[0] for value in found[1:]])
        gp.q.excess.slope.zero_()
        gp.q.excess.due.fill_(True)
    assert exact[1] == pytest.approx(exact[0], abs=1e-4 if has_factor else 0.05)  # without it, a line integral
    assert abs(exact[0][1]) > 0.1


def test_classes_share_the_difference():
    x, y = labels(60)
    gp = VNNGP(x, y.long(), kernel(), Categorical(2), num_neighbors=K)
    gp.solve()
    trace = poutine.trace(gp.guide).get_trace()
    q = trace.nodes["u"]["fn"].base_dist
    prior = NNGP(gp.kernel, gp.graph)
    factor, local = prior.factor.prepared(), gp.q
    want = sum(
        latent_log_evidence(factor, *parts) for parts in zip(local.target, local.loc, local.precision, strict=True)
    )
    torch.testing.assert_close(q.log_evidence(prior).sum(), want, rtol=1e-6, atol=0)


@torch.no_grad()
def test_variances_at_labels_are_those_given_all_of_them():
    x, y = labels(400)
    gp = VNNGP(x, y, kernel(variance=30.0, lengthscale=1.0), Bernoulli(), num_neighbors=10)
    gp.solve()
    factor = NNGP(gp.kernel, gp.graph).factor
    sparse = torch.linalg.inv(factor.dense() + gp.q.precision.diag()).diagonal()
    torch.testing.assert_close(gp.q.variance, sparse, rtol=0.01, atol=0)  # the sites moved by less
    cov = gp.kernel(x)
    exact = (cov - cov @ torch.linalg.solve(cov + torch.diag(1 / gp.q.precision), cov)).diagonal()
    assert 0.97 < (gp.q.variance / exact).mean() < 1.01  # from the 10 nearest pseudo-observations 2.7


@pytest.mark.slow
def test_one_call_converges_at_a_large_variance():
    x, y = labels(300, amplitude=20.0)
    gp = VNNGP(x, y, kernel(variance=1e4, lengthscale=1.0), Bernoulli(), num_neighbors=10)
    gp.solve()
    before = gp.q.loc.clone()
    gp.solve()
    moved = (gp.q.loc - before).abs() / gp.q.variance.sqrt()
    assert moved.max() < 0.3  # after 20 steps 2.7


@pytest.mark.parametrize("noise", [1e-3, 0.1, 2.0])
def test_gaussian_noise_has_the_evidence_of_the_sparse_prior_and_its_gradients(noise):
    x, _ = labels(N)
    y = torch.sin(5 * x.sum(-1)) + noise**0.5 * torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=F64)
    line = torch.nn.Linear(2, 1, dtype=F64)
    weights = torch.linspace(0.5, 2.0, N, dtype=F64)
    gp = VNNGP(x, y, kernel(), Gaussian(variance=noise), num_neighbors=K, mean=line, weights=weights)
    gp.solve()

    def evidence():
        precision = weights / gp.likelihood.variance
        found = dense_log_evidence(*NNGP(gp.kernel, gp.graph).conditionals, gp.graph, y - line(x)[:, 0], precision)[0]
        powers = (1 - weights) * (2 * math.pi * gp.likelihood.variance).log() - weights.log()  # density to the weight
        return found + powers.sum() / 2

    loss = IntegratedELBO().differentiable_loss(gp.model, gp.guide)
    torch.testing.assert_close(loss, -evidence(), rtol=1e-7, atol=1e-7)
    parameters = [*gp.kernel.parameters(), *gp.likelihood.parameters(), *line.parameters()]
    want = torch.autograd.grad(evidence(), parameters)
    for one, other in zip(torch.autograd.grad(loss, parameters), want, strict=True):
        torch.testing.assert_close(one, -other, rtol=1e-5, atol=1e-5)
    rounds = [IntegratedELBO().loss(gp.model, gp.guide, idx) for idx in torch.arange(N).split(30)]
    assert sum(rounds) / len(rounds) == pytest.approx(loss.item(), rel=1e-9)


def test_evidence_of_gaussian_noise_is_kept_while_parameters_stay(monkeypatch):
    monkeypatch.setattr("pyro_nngp.variational.evidence_excess.DENSE_UP_TO", 0)
    x, y = labels(N)
    gp = VNNGP(x, y, kernel(), Gaussian(variance=0.5), num_neighbors=K)
    gp.solve()
    excess, slopes = gp.q.excess, []
    for change, refresh in ((1.05, False), (1.3, False), (1.0, False), (1.0, True)):
        gp.kernel.variance = gp.kernel.variance.item() * change
        if refresh:
            gp.refresh_neighbors()
            excess.slope.zero_()
        before = excess.slope.clone()
        gp.solve()
        slopes.append(not torch.equal(before, excess.slope))
    assert slopes == [False, True, False, True]


@pytest.mark.parametrize("limited", [False, True])
def test_a_step_of_the_level_does_not_depend_on_errors_of_means(limited):
    """Of 10^6 values the means are never so accurate that their errors do not add up to more than the step."""
    graph, target, precision = sites(n=60)
    latent, free = LatentPrior(bind(kernel().requires_grad_(False)), graph, 1e-6), torch.tensor(True)
    weight = torch.linalg.inv(solution(graph, target, precision)[0].dense().inverse() + torch.diag(1 / precision))
    want = (weight @ target).sum() / weight.sum()  # generalized least squares
    for loc in torch.randn(3, 60, dtype=F64):
        change, shift = latent.level_step(free, loc, precision * (target - loc), precision, limited)
        torch.testing.assert_close(change, want.clamp(-(1.3**0.5), 1.3**0.5), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(shift / change, weight.new_ones(60) - (weight @ weight.new_ones(60)) / precision)
