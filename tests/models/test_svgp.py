import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import labels, matern, stir, waves
from oracles.dense import dense_covariance, gaussian_kl
from oracles.waves import loss
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributions import kl_divergence

from pyro_nngp._memory import block_limit
from pyro_nngp.inference import PredictiveLogLikelihood, fit
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import (
    Bernoulli,
    Gaussian,
    NegativeBinomial,
    PolyaGammaBound,
)
from pyro_nngp.linalg import DEFAULT_JITTER
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import SVGP, VNNGP
from pyro_nngp.variational import FullRank, MeanField
from pyro_nngp.variational.gaussian import DenseGaussian, combined_variance, factor, neighbor_variance

F64 = torch.float64


N, M = 48, 11
FAMILIES = FullRank, MeanField


def build(x, y, likelihood=None, inducing=M, **settings):
    settings.setdefault("mean", ConstantMean(0.0))  # which the oracles assume
    return stir(
        SVGP(x, y, matern(), Gaussian(0.125) if likelihood is None else likelihood, inducing=inducing, **settings)
    )


def noise_of(gp):
    return gp.likelihood.variance.detach()


def dense_parts(gp, x_new):
    """Mean and covariance of q(u), the prior covariance of u, weights and variances of f at new points given u."""
    q, prior = gp.q.distribution(), dense_covariance(gp.kernel, gp.z).detach()
    chol = torch.linalg.cholesky(prior)
    root = chol @ factor(q).detach()
    cross = gp.kernel(gp.z, x_new).detach()
    weights = torch.cholesky_solve(cross, chol).mT
    var = gp.kernel(x_new, diag=True).detach() * (1 + DEFAULT_JITTER) - (weights.mT * cross).sum(0)
    return chol @ q.mean.detach(), root @ root.mT, prior, weights, var


@pytest.mark.parametrize("guide", FAMILIES)
@pytest.mark.parametrize("objective", ["vfe", "fitc"])
def test_elbo_and_predictions_agree_with_dense_ones(objective, guide):
    x, y = waves()
    gp = build(x, y, objective=objective, guide=guide())
    gp.mean.value = torch.full_like(gp.mean.value, 0.25)
    mean, cov, prior, weights, var = dense_parts(gp, x)
    spread = (weights @ cov @ weights.mT).diagonal()
    var, noise = (0, noise_of(gp) + var) if objective == "fitc" else (var, noise_of(gp))
    spread = var + spread
    expected = -0.5 * ((2 * torch.pi * noise).log() + ((y - 0.25 - weights @ mean).square() + spread) / noise)
    want = gaussian_kl(mean, cov, torch.cholesky_inverse(torch.linalg.cholesky(prior))) - expected.sum()
    assert loss(gp) == pytest.approx(float(want), rel=1e-9)

    new, _ = waves(7)
    mean, cov, prior, weights, var = dense_parts(gp, new)
    loc, got = gp(new)
    torch.testing.assert_close(loc.detach(), 0.25 + weights @ mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.detach(), var + (weights @ cov @ weights.mT).diagonal(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(gp.predict(new).variance.detach(), got.detach() + noise_of(gp), rtol=1e-9, atol=0)


def test_prediction_from_the_nearest_inducing_points():
    x, y = waves()
    gp, new = build(x, y), waves(9)[0]
    for guide in FAMILIES:
        gp = build(x, y, guide=guide())
        for one, two in zip(gp(new, num_neighbors=M), gp(new), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-9)
        mean, cov, prior, _, _ = dense_parts(gp, new)
        loc, var = (value.detach() for value in gp(new, num_neighbors=4))
        scale = gp.kernel.lengthscale.detach()
        for i, point in enumerate(new):
            near = ((gp.z - point) / scale).norm(dim=-1).detach().argsort()[:4]
            cross = gp.kernel(gp.z[near], point[None]).detach()
            w = torch.cholesky_solve(cross, torch.linalg.cholesky(prior[near][:, near]))[:, 0]
            own = gp.kernel(point[None], diag=True)[0].detach() * (1 + DEFAULT_JITTER)
            want = own - w @ cross[:, 0] + w @ cov[near][:, near] @ w
            assert float(loc[i]) == pytest.approx(float(w @ mean[near]), rel=1e-8)
            assert float(var[i]) == pytest.approx(float(want), rel=1e-6)


def test_posterior_draws_from_the_nearest_inducing_points_have_the_hyperparameters_of_each_draw():
    x, y = waves()
    kernel, new = matern(), waves(5)[0]
    kernel.lengthscale = PyroSample(dist.LogNormal(torch.full((2,), -1.0, dtype=F64), 1.0).to_event(1))
    gp = SVGP(x, y, kernel, Gaussian(0.125), inducing=x[:M], mean=ConstantMean(0.0), metric=torch.ones(2, dtype=F64))
    nu, scales = torch.randn(2, M, dtype=F64), torch.tensor([0.2, 0.8], dtype=F64)
    near = (new[:, None] - x[:M]).norm(dim=-1).argsort(-1)[:, :4]
    want = torch.zeros(2, 5, dtype=F64)
    for s, scale in enumerate(scales):
        cov = matern((scale, scale))
        prior = dense_covariance(cov, x[:M]).detach()
        u = torch.linalg.cholesky(prior) @ nu[s]
        for i, rows in enumerate(near):
            chol = torch.linalg.cholesky(prior[rows][:, rows])
            want[s, i] = u[rows] @ torch.cholesky_solve(cov(x[rows], new[i : i + 1]).detach(), chol)[:, 0]
    samples = {"nu": nu, "kernel.lengthscale": scales[:, None].expand(2, 2)}
    torch.testing.assert_close(
        gp(new, num_neighbors=4, samples=samples)[0].detach(), want.mean(0), rtol=1e-8, atol=1e-9
    )


@pytest.mark.parametrize("objective", ["vfe", "fitc"])
def test_optimum_is_the_bound_of_titsias_or_the_evidence_of_fitc(objective):
    x, y = waves()
    gp = build(x, y, objective=objective)
    gp.solve()
    prior, cross = dense_covariance(gp.kernel, gp.z).detach(), gp.kernel(x, gp.z).detach()
    low_rank = cross @ torch.cholesky_solve(cross.mT, torch.linalg.cholesky(prior))
    rest = gp.kernel(x, diag=True).detach() * (1 + DEFAULT_JITTER) - low_rank.diagonal()
    noise = noise_of(gp) + (rest if objective == "fitc" else torch.zeros_like(rest))
    want = dist.MultivariateNormal(torch.zeros(N, dtype=F64), low_rank + torch.diag(noise)).log_prob(y)
    want = want - (0 if objective == "fitc" else rest.sum() / (2 * noise_of(gp)))
    assert loss(gp) == pytest.approx(-float(want), rel=1e-9)


def test_inducing_points_at_the_data_give_the_exact_process():
    x, y = waves()
    gp = build(x, y, inducing=x, jitter=1e-10)
    gp.solve()
    cov = gp.kernel(x).detach() + noise_of(gp) * torch.eye(N, dtype=F64)
    exact = dist.MultivariateNormal(torch.zeros(N, dtype=F64), cov)
    assert loss(gp) == pytest.approx(-float(exact.log_prob(y)), rel=1e-6)
    new = waves(6)[0]
    weights = torch.cholesky_solve(gp.kernel(x, new).detach(), torch.linalg.cholesky(cov)).mT
    loc, var = (value.detach() for value in gp(new))
    torch.testing.assert_close(loc, weights @ y, rtol=1e-6, atol=1e-7)
    own = gp.kernel(new, diag=True).detach()
    torch.testing.assert_close(var, own - (weights.mT * gp.kernel(x, new).detach()).sum(0), rtol=1e-5, atol=1e-7)


def test_blocks_of_the_data_do_not_matter():
    x, y = waves()
    whole, blocks = (build(x, labels(y), Bernoulli()) for _ in range(2))
    blocks.load_state_dict(whole.state_dict())
    whole.solve()
    with block_limit(5 * M):
        blocks.solve()
    for one, two in zip(whole.solved_parameters(), blocks.solved_parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kl_scale", [1.0, 0.05])
def test_predictive_objective_scores_the_predictive_distribution(kl_scale):
    x, y = waves()
    prior = dist.Normal(torch.zeros(M, dtype=F64), 1.0).to_event(1)
    for likelihood, target in ((Gaussian(0.125), y), (Bernoulli(), labels(y))):
        gp = build(x, target, likelihood)
        divergence = kl_divergence(gp.q.distribution(), prior)
        want = kl_scale * divergence - gp.predict(x).log_prob(target).sum()
        assert loss(gp, elbo=PredictiveLogLikelihood(kl_scale)) == pytest.approx(float(want.detach()), rel=1e-9)


def test_predictive_objective_serves_other_methods():
    x, y = waves()
    gp = VNNGP(x, y, matern(), Gaussian(0.125), num_neighbors=N - 1, guide=MeanField(), mean=ConstantMean(0.0))
    gp.solve()
    q = gp.q.distribution()
    precision = torch.cholesky_inverse(torch.linalg.cholesky(dense_covariance(gp.kernel, x).detach()))
    divergence = gaussian_kl(q.mean.detach(), torch.diag(q.variance.detach()), precision)
    fitted = dist.Normal(q.mean.detach(), (q.variance.detach() + noise_of(gp)).sqrt()).log_prob(y).sum()
    assert loss(gp, elbo=PredictiveLogLikelihood(0.2)) == pytest.approx(float(0.2 * divergence - fitted), rel=1e-8)


def test_fit_leaves_the_optimum_of_the_bound_to_the_bound():
    x, y = waves()
    gp, start = build(x, y), build(x, y).state_dict()
    results = []
    for elbo in (None, PredictiveLogLikelihood()):
        gp.load_state_dict(start)
        before = loss(gp)
        fit(gp, 1, lr=1e-6, elbo=elbo, progress=False)
        results.append(before - loss(gp))
    assert results[0] > 10  # solved
    assert abs(results[1]) < 0.1  # one small step
    with pytest.raises(ValueError, match=r"to be able to solve\(\) with solve_every"):
        fit(gp, 1, elbo=PredictiveLogLikelihood(), solve_every=5, progress=False)


def test_negative_regularization_is_refused():
    with pytest.raises(ValueError, match=r"PredictiveLogLikelihood: expected kl_scale >= 0, got -1"):
        PredictiveLogLikelihood(-1)


@pytest.mark.slow
def test_ppgpr_does_not_overestimate_noise_where_svgp_does():
    """Few inducing points for a quick function: SVGP calls what they cannot follow noise, PPGPR calls it variance."""
    x = torch.rand(150, 1, dtype=F64)
    y = torch.sin(30 * x[:, 0]) + 0.05 * torch.randn(150, dtype=F64)
    noise = []
    for elbo in (None, PredictiveLogLikelihood(0.05)):
        k = Matern52(1, lengthscale=torch.tensor(0.1))
        gp = SVGP(x, y, k, Gaussian(0.125), inducing=8, learn_inducing=False)
        fit(gp, 100, lr=0.1, elbo=elbo, progress=False)
        noise.append(float(gp.likelihood.variance.detach()))
    assert noise[0] > 0.05
    assert noise[1] < noise[0] / 2


@pytest.mark.filterwarnings("ignore:SVGP.solve. means still moved")  # single steps
def test_coordinate_ascent_of_pg_vi_never_goes_down():
    x, y = waves()
    gp = build(x, labels(y), PolyaGammaBound(Bernoulli()))
    losses = [loss(gp)]
    for _ in range(6):
        gp.solve(max_steps=1)
        losses.append(loss(gp))
    drops = -torch.tensor(losses).diff()
    assert (drops > -1e-9).all()
    assert drops[-1] < 1e-3 * drops[0]
    assert gp.predict(x).log_prob(gp.y).mean() > -0.55


def test_polya_gamma_bound_trains_hyperparameters_of_its_likelihood():
    x, y = waves()
    gp = build(x, y.exp().round(), PolyaGammaBound(NegativeBinomial(3.0)))
    fit(gp, 5, progress=False)
    assert abs(float(gp.likelihood.base.total_count.detach()) - 3.0) > 0.01
    with pytest.raises(ValueError, match=r"PolyaGammaBound: expected likelihood Bernoulli\('logit'\), Binomial or"):
        PolyaGammaBound(Bernoulli("probit"))


def test_dense_guide_agrees_with_torch():
    guide = DenseGaussian(6, 3, scale=0.5, like=torch.empty(0, dtype=F64))
    with torch.no_grad():
        for param in guide.parameters():
            param.add_(torch.randn_like(param))
    q = guide.distribution()
    cov, a = q.covariance_matrix, torch.randn(4, 6, dtype=F64)
    torch.testing.assert_close(combined_variance(q, a), torch.einsum("bi,lij,bj->lb", a, cov, a))
    loc, scale = torch.randn(6, dtype=F64), torch.rand(6, dtype=F64) + 0.5
    want = kl_divergence(q, dist.MultivariateNormal(loc, torch.diag(scale.square())))
    torch.testing.assert_close(kl_divergence(q, dist.Normal(loc, scale).to_event(1)), want)
    with pytest.raises(NotImplementedError, match=r"known for Normal\(...\).to_event\(1\) only"):
        kl_divergence(q, dist.Laplace(loc, scale).to_event(1))
    other = DenseGaussian(6, 3, like=loc)
    other.assign(q)
    torch.testing.assert_close(other.distribution().covariance_matrix, cov)
    rows, w = torch.tensor([[0, 3], [5, 2]]), torch.randn(2, 2, dtype=F64)
    want = torch.stack([torch.einsum("i,lij,j->l", v, cov[:, r][:, :, r], v) for r, v in zip(rows, w, strict=True)], -1)
    torch.testing.assert_close(neighbor_variance(w, rows, cov), want)


@pytest.mark.parametrize("num_neighbors", [None, 6])
def test_joint_draws_have_the_joint_moments(num_neighbors):
    x, y = waves()
    gp, new = build(x, y), waves(7)[0]
    gp.mean.value = torch.full_like(gp.mean.value, 0.5)
    mean, cov, _, weights, _ = dense_parts(gp, new)
    prior = dense_covariance(gp.kernel, new).detach()
    want = prior - gp.kernel(new, gp.z).detach() @ weights.mT + weights @ cov @ weights.mT
    draws = gp.sample(new, 20_000, num_neighbors=num_neighbors)
    error = ((want.diagonal()[:, None] * want.diagonal() + want.square()) / 20_000).sqrt()
    assert ((draws.mT.cov() - want).abs() < 6 * error).all()
    assert ((draws.mean(0) - 0.5 - weights @ mean).abs() < 6 * (want.diagonal() / 20_000).sqrt()).all()


class Deep(nn.Module):
    """A kernel on the outputs of a network, of no class of the package."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        self.kernel = Matern52(2, lengthscale=0.3)

    def forward(self, a, b):
        return self.kernel(self.network(a), self.network(b))


@pytest.mark.parametrize("num_neighbors", [pytest.param(None, marks=pytest.mark.slow), 10])
def test_joint_draws_with_a_deep_kernel_in_single_precision(num_neighbors):
    x, y = waves(300, torch.float32)
    deep = Deep()
    wide = SVGP(x.double(), y.double(), copy.deepcopy(deep), Gaussian(0.125), inducing=x[:M].double())
    gp = SVGP(x, y, deep, Gaussian(0.125), inducing=x[:M])
    nu = torch.randn(2, M)
    draws = gp.sample(x, 2, num_neighbors=num_neighbors, seed=0, samples={"nu": nu})
    want = wide.sample(x.double(), 2, num_neighbors=num_neighbors, seed=0, samples={"nu": nu.double()})
    assert draws.dtype == torch.float32
    assert all(param.dtype == torch.float32 for param in gp.parameters())
    torch.testing.assert_close(draws.double(), want, rtol=1e-5, atol=1e-5)


class PyroDeep(PyroModule):
    """The same as a PyroModule, whose parameters Pyro must keep track of."""

    def __init__(self, deep):
        super().__init__()
        self.deep = deep

    def forward(self, a, b):
        return self.deep(a, b)


@pytest.mark.parametrize("wrap", [lambda deep: lambda a, b: deep(a, b), PyroDeep], ids=["function", "PyroModule"])
def test_joint_draws_with_kernels_that_compute_in_single_precision(wrap):
    x, y = waves(dtype=torch.float32)
    deep, samples = Deep(), {"nu": torch.randn(1, M)}
    want, draws = (
        SVGP(x, y, kernel, Gaussian(0.125), inducing=x[:M]).sample(x[:20], 1, seed=0, samples=samples)
        for kernel in (deep, wrap(deep))
    )
    torch.testing.assert_close(draws, want, rtol=0, atol=0.03)  # .0104 on one processor, .01 at most on others


def test_joint_draws_of_few_points_take_the_neighbors_there_are():
    x, y = waves()
    gp = build(x, y)
    for p in (1, 3):
        exact = gp.sample(x[:p], 4000)
        draws = gp.sample(x[:p], 4000, num_neighbors=5)
        se = (2 * exact.var(0) / 4000).sqrt()
        assert ((draws.mean(0) - exact.mean(0)).abs() < 6 * se).all()
        torch.testing.assert_close(draws.std(0), exact.std(0), rtol=0.15, atol=0)
    for number in (0, M + 1):
        with pytest.raises(ValueError, match=rf"SVGP: expected num_neighbors in 1\.\.11, got {number}"):
            gp.sample(x[:1], 2, num_neighbors=number)


def test_inducing_points_are_learned_or_not():
    x, y = waves(150)
    for learn in (True, False):
        gp = SVGP(x, y, matern(), Gaussian(0.125), inducing=9, learn_inducing=learn)
        before, start = gp.z.detach().clone(), loss(gp)
        fit(gp, 20, batch_size=50, lr=0.05, progress=False)
        assert loss(gp) < start
        assert ((gp.z - before).abs().max() > 0.03) == learn


def test_model_never_reads_the_guide():
    x, y = waves()
    gp, nu, f = build(x, y), torch.randn(M, dtype=F64), torch.randn(N, dtype=F64)
    values = []
    for _ in range(2):
        trace = pyro.poutine.trace(pyro.poutine.condition(gp.model, {"nu": nu, "f": f})).get_trace()
        values.append(float(trace.log_prob_sum().detach()))
        stir(gp)
    assert values[0] == values[1]
    _, _, _, weights, var = dense_parts(gp, x)
    u = torch.linalg.cholesky(dense_covariance(gp.kernel, gp.z)).detach() @ nu
    parts = (dist.Normal(weights @ u, var.sqrt()).log_prob(f), dist.Normal(f, noise_of(gp).sqrt()).log_prob(y))
    want = sum(part.sum() for part in parts) + dist.Normal(0, 1).log_prob(nu).sum()
    assert values[0] == pytest.approx(float(want.detach()), rel=1e-9)


def test_kernels_that_are_not_ours_and_sums_work():
    x, y = waves()
    own = Matern32(2).double()
    foreign = SVGP(x, y, lambda a, b: own(a, b), Gaussian(0.125), inducing=x[:M])
    ours = SVGP(x, y, own, Gaussian(0.125), inducing=x[:M])
    assert loss(foreign) == pytest.approx(loss(ours), rel=1e-12)
    torch.testing.assert_close(foreign(x, num_neighbors=5), ours(x, num_neighbors=5))
