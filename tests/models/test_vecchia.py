import pyro.distributions as dist
import pytest
import torch
from builders import waves
from oracles.dense import dense_covariance
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO
from pyro.nn import PyroSample
from pyro.optim import Adam

from pyro_nngp.inference import fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import MLLk, Vecchia

F64 = torch.float64
N = 40
methods = pytest.mark.parametrize("method", [Vecchia, MLLk])
PRIOR = dist.LogNormal(torch.tensor(-2.0, dtype=F64), 1.0)


def noisy():
    """A likelihood whose noise variance has a prior."""
    likelihood = Gaussian()
    likelihood.variance = PyroSample(PRIOR)
    return likelihood


def model(x, y, noise=0.1, method=Vecchia, **settings):
    k = Matern52(2, variance=torch.tensor(1.3), lengthscale=torch.tensor([0.3, 0.5]))
    gp = method(x, y, k, Gaussian(torch.as_tensor(noise, dtype=F64)), **settings)
    gp.mean.value = torch.full_like(gp.mean.value, 0.4)
    return gp


def loss(gp, *args):
    return TraceMeanField_ELBO().loss(gp.model, gp.guide, *args)


def dense_log_prob(gp, rows, noise=0.1):
    cov = dense_covariance(gp.kernel, gp.x[rows]).detach() + noise * torch.eye(len(rows), dtype=F64)
    return dist.MultivariateNormal(torch.full((len(rows),), 0.4, dtype=F64), cov).log_prob(gp.y[rows])


@methods
def test_full_neighbors_give_the_dense_marginal_likelihood(method):
    x, y = waves(N)
    gp = model(x, y, num_neighbors=N - 1, method=method)
    want = float(dense_log_prob(gp, torch.arange(N)))
    assert -loss(gp) == pytest.approx(want, rel=1e-9)
    assert float(gp.log_prob(batch_size=7)) == pytest.approx(want, rel=1e-9)
    if method is MLLk:
        assert -loss(gp, torch.tensor([11])) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("ordering", ["random", "maximin", torch.arange(N).flip(0)])
def test_few_neighbors_give_the_product_of_dense_conditionals(ordering):
    x, y = waves(N)
    gp = model(x, y, num_neighbors=4, ordering=ordering)
    want = torch.zeros((), dtype=F64)
    for j in range(N):
        near = gp.graph.neighbors[j]
        near = near[near >= 0]
        joint = torch.cat([near, torch.tensor([j])])
        want += dense_log_prob(gp, joint) - (dense_log_prob(gp, near) if len(near) else 0)
    assert -loss(gp) == pytest.approx(float(want), rel=1e-9)


def test_few_neighbors_give_the_mean_of_dense_blocks():
    x, y = waves(N)
    gp = model(x, y, num_neighbors=4, method=MLLk)
    scaled = x / gp.kernel.lengthscale.detach()
    near = torch.cdist(scaled, scaled).argsort(-1)[:, :5]  # the point itself comes first
    want = sum(dense_log_prob(gp, rows) for rows in near) / 5
    assert -loss(gp) == pytest.approx(float(want), rel=1e-9)


@methods
def test_outputs_with_means_of_their_own(method):
    def mean(x):
        return torch.stack([1 + x[:, 0], 2 * x[:, 1], -x.sum(-1)], -1)

    x, y = waves(N)
    y = torch.stack([y, 2 * y, 3 * y.cos()], -1)
    gp = model(x, y - mean(x), num_neighbors=5, method=method)
    gp.mean.value = torch.zeros_like(gp.mean.value)
    own = method(x, y, gp.kernel, gp.likelihood, num_neighbors=5, mean=mean)
    assert loss(own) == pytest.approx(loss(gp), rel=1e-9)
    assert float(own.log_prob(batch_size=7)) == pytest.approx(-loss(own), rel=1e-9)
    torch.testing.assert_close(own(x[:4] + 0.1)[0], gp(x[:4] + 0.1)[0] + mean(x[:4] + 0.1).mT)


@methods
def test_predictions_and_joint_draws_agree_with_dense_conditionals(method):
    x, y = waves(N)
    gp = model(x, y, num_neighbors=5, method=method)
    gp.mean.requires_grad_(False)  # predictions take it as it is
    new = waves(4)[0]
    cross = gp.kernel(x, new).detach()
    tril = torch.linalg.cholesky(dense_covariance(gp.kernel, x).detach() + 0.1 * torch.eye(N, dtype=F64))
    w = torch.cholesky_solve(cross, tril)
    mean, cov = 0.4 + (y - 0.4) @ w, dense_covariance(gp.kernel, new).detach() - w.mT @ cross
    loc, var = gp(new, num_neighbors=N)
    torch.testing.assert_close(loc.detach(), mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(var.detach(), cov.diagonal(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        gp.predict(new, num_neighbors=N).variance.detach(), cov.diagonal() + 0.1, rtol=1e-8, atol=0
    )
    draws = gp.sample(new, 20_000, num_neighbors=N + 3)
    assert ((draws.mean(0) - mean) / (cov.diagonal() / 20_000).sqrt()).abs().max() < 6
    spread = (cov.diagonal()[:, None] * cov.diagonal() + cov.square()).sqrt() / 20_000**0.5
    assert ((draws.mT.cov() - cov).abs() / spread).max() < 6


@methods
@pytest.mark.slow
def test_training_finds_the_noise_and_refreshes_neighbors(method):
    torch.manual_seed(1)
    x, y = waves(300)
    gp = model(x, y, 1.0, num_neighbors=8, method=method)
    fit(gp, 120, batch_size=32, lr=0.1, refresh_every=40, progress=False)
    assert 0.02 < float(gp.likelihood.variance.detach()) < 0.07  # 0.04
    assert not torch.equal(gp.graph.lengthscale, torch.ones(2, dtype=F64))


def test_hyperparameters_with_priors_are_sites_of_the_collapsed_model():
    x, y = waves(N)
    gp = Vecchia(x, y, Matern52(2), noisy(), num_neighbors=N - 1, mean=lambda x: torch.full_like(x[:, 0], 0.4))
    noise = torch.tensor(0.2, dtype=F64)
    trace = poutine.trace(poutine.condition(gp.model, {"likelihood.variance": noise})).get_trace()
    assert set(trace.observation_nodes) == {"likelihood.variance", "y"}
    want = PRIOR.log_prob(noise) + dense_log_prob(gp, torch.arange(N), noise)
    assert float(trace.log_prob_sum().detach()) == pytest.approx(float(want), rel=1e-9)


@pytest.mark.slow
def test_collapsed_posterior_by_nuts_and_by_variational_inference():
    """Both find the posterior of the noise variance that a grid gives."""
    x, y = waves(N)
    grid = torch.linspace(-6, 2, 200, dtype=F64)
    gp = model(x, y, num_neighbors=N - 1)
    weight = torch.stack([PRIOR.log_prob(t.exp()) + t + dense_log_prob(gp, torch.arange(N), t.exp()) for t in grid])
    weight = weight.softmax(0)
    mean = (weight * grid).sum()
    scale = ((weight * grid.square()).sum() - mean.square()).sqrt()

    k = Matern52(2, variance=torch.tensor(1.3), lengthscale=torch.tensor([0.3, 0.5])).double().requires_grad_(False)
    gp = Vecchia(x, y, k, noisy(), num_neighbors=10, mean=lambda x: torch.full_like(x[:, 0], 0.4))
    mcmc = MCMC(NUTS(gp.model, jit_compile=False), num_samples=60, warmup_steps=30, disable_progbar=True)
    mcmc.run()
    draws = mcmc.get_samples()["likelihood.variance"].log()
    assert abs(float(draws.mean() - mean)) < 6 * float(scale) / 20**0.5
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.02}), TraceMeanField_ELBO(num_particles=4))
    for _ in range(120):
        svi.step()
    found = Predictive(gp.model, guide=gp.guide, num_samples=300)()["likelihood.variance"].log()
    assert abs(float(found.mean() - mean)) < 0.5 * float(scale)
    assert 0.6 < float(found.std() / scale) < 1.5


def test_predictions_average_over_posterior_draws_of_the_hyperparameters():
    x, y = torch.rand(N, 2, dtype=F64), torch.randn(N, dtype=F64)

    def unit_kernel():
        return Matern52(2, variance=1.0, lengthscale=0.5)

    x_new, draws = torch.rand(5, 2, dtype=F64), {"likelihood.variance": torch.tensor([0.1, 0.7], dtype=F64)}
    noise = Gaussian(PyroSample(PRIOR))
    got = Vecchia(x, y, unit_kernel(), noise, num_neighbors=9).predict(x_new, num_neighbors=9, samples=draws)
    ones = [Vecchia(x, y, unit_kernel(), Gaussian(v), num_neighbors=9) for v in draws["likelihood.variance"]]
    for one in ones:
        one.mean.requires_grad_(False)  # draws take it as it is
    each = [one.predict(x_new, num_neighbors=9) for one in ones]
    target = torch.randn(5, dtype=F64)
    expected = torch.stack([one.log_prob(target) for one in each]).exp().mean(0).log()
    torch.testing.assert_close(got.log_prob(target), expected)
    torch.testing.assert_close(got.mean, torch.stack([one.mean for one in each]).mean(0))
    with pytest.raises(ValueError, match=r"expected samples to hold the site 'likelihood.variance'"):
        Vecchia(x, y, Matern52(2), noise, num_neighbors=9).predict(x_new, samples={"other": torch.ones(2)})
