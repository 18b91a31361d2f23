"""Pooled observations, joint draws and training through Gaussian sites."""

import copy
import math

import pytest
import torch
from pyro.infer import SVI, Predictive, TraceMeanField_ELBO
from pyro.optim import Adam
from torch.distributions import kl_divergence

from pyro_nngp.distributions import NNGP
from pyro_nngp.distributions.site_posterior import SitePosterior
from pyro_nngp.inference import IntegratedELBO, fit, to_arviz
from pyro_nngp.kernels import Matern32, Wendland, bind
from pyro_nngp.likelihoods import Bernoulli, Categorical, Gaussian, NegativeBinomial, Poisson
from pyro_nngp.models import NPVI, VNNGP, Vecchia
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational import ObservedGaussian, PseudoObservations
from pyro_nngp.variational.pooling import PooledObservations

F64 = torch.float64
N = 40
LIKELIHOODS = {
    "gaussian": lambda: Gaussian(0.09),
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "negative binomial": lambda: NegativeBinomial(3.0),
}


def field(n, num_new, likelihood, lengthscale=0.2, seed=0):
    """A draw of the process, data at its first n points, and a kernel with the true hyperparameters."""
    torch.manual_seed(seed)
    x, kernel = torch.rand(n + num_new, 2, dtype=F64), Matern32(2, lengthscale=lengthscale).double()
    cov = kernel(x, x).detach() + 1e-8 * torch.eye(len(x), dtype=F64)
    f = torch.linalg.cholesky(cov) @ torch.randn(len(x), dtype=F64)
    with torch.no_grad():
        y = likelihood.double()(f[:n]).sample()
    return x[:n], y, f[:n], x[n:], f[n:], kernel


def small(likelihood="poisson", n=N, **settings):
    made = LIKELIHOODS[likelihood]()
    x, y, _, x_new, _, kernel = field(n, 7, made)
    return VNNGP(x, y, kernel, made, **{"num_neighbors": n - 1, "jitter": 1e-8} | settings), x_new


@torch.no_grad()
def dense(gp):
    """Covariance of the prior, and mean and covariance of u given the sites."""
    target, precision = gp.q.observations(gp.posterior(gp.bound()))
    prior = gp.kernel(gp.x, gp.x) + 1e-8 * torch.eye(len(gp.x), dtype=F64)
    root = torch.linalg.cholesky(prior + torch.diag(1 / precision))
    half = torch.linalg.solve_triangular(root, prior, upper=False)
    loc = half.mT @ torch.linalg.solve_triangular(root, target[:, None], upper=False)[:, 0]
    return prior, loc, prior - half.mT @ half


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_sites_are_those_of_the_optimal_gaussian_posterior(likelihood):
    """Gradient and curvature of the expected log likelihood at the marginals are those of the sites."""
    gp, _ = small(likelihood)
    gp.solve(max_steps=200, tolerance=1e-6)
    loc = (gp.mean.value + gp.q.loc).detach().requires_grad_()
    var = gp.q.variance.clone().requires_grad_()
    value = gp.likelihood.expected_log_prob(gp.y, loc, var).sum()
    gradient, curvature = torch.autograd.grad(value, (loc, var))
    torch.testing.assert_close(gp.q.precision, -2 * curvature, rtol=0.05, atol=1e-4)
    torch.testing.assert_close(gp.q.precision * (gp.q.target - gp.q.loc), gradient, rtol=0.02, atol=0.02)
    prior, *_ = dense(gp)
    assert abs(torch.linalg.solve(prior, gp.q.loc).sum()) < 0.05  # the level is the best one for the sites


def test_a_gaussian_likelihood_is_trained_as_the_response_model():
    x, y, *_, kernel = field(60, 1, Gaussian(0.09).double())
    elbo, made = IntegratedELBO(), []
    for method in (VNNGP, Vecchia):
        gp = method(x, y, copy.deepcopy(kernel), Gaussian(0.09), num_neighbors=9)
        loss = elbo.differentiable_loss(gp.model, gp.guide)
        loss.backward()
        made.append((loss.detach(), [gp.kernel.lengthscale_unconstrained.grad, gp.mean.value_unconstrained.grad]))
    torch.testing.assert_close(made[0], made[1], rtol=1e-8, atol=1e-8)


def test_the_objective_is_the_derivative_of_the_evidence():
    """With all neighbors and optimal sites: central differences of the best bound, sites solved for at each end."""
    gp, _ = small("poisson")
    gp.mean.requires_grad_(False)
    gp.solve(max_steps=300, tolerance=1e-7)
    loss = IntegratedELBO().differentiable_loss(gp.model, gp.guide)
    (slope,) = torch.autograd.grad(loss, [gp.kernel.variance_unconstrained])
    ends = []
    for step in (-0.05, 0.05):
        other = copy.deepcopy(gp)
        other.kernel.variance_unconstrained.data += step
        other.solve(max_steps=300, tolerance=1e-7)
        ends.append(IntegratedELBO().loss(other.model, other.guide))
    assert float(slope) == pytest.approx((ends[1] - ends[0]) / 0.1, rel=0.03, abs=0.01)


@pytest.mark.slow
def test_joint_draws_have_the_moments_of_predictions_and_of_the_dense_posterior():
    gp, _ = small("poisson")
    gp.solve(max_steps=200, tolerance=1e-6)
    _, loc, cov = dense(gp)
    with torch.no_grad():
        draws = gp.sample(gp.x[:3], 20_000, num_neighbors=N, seed=0) - gp.mean.value
        through_guide = torch.stack([gp.guide() for _ in range(400)])[:, :3] - gp.mean.value
    for got, count in ((draws, 20_000), (through_guide, 2000)):
        torch.testing.assert_close(
            got.mean(0), loc[:3], rtol=0, atol=6 * float(cov.diagonal().max().sqrt()) / count**0.5
        )
        torch.testing.assert_close(got.mT.cov(), cov[:3, :3], rtol=0, atol=9 * float(cov.diagonal().max()) / count**0.5)


@pytest.mark.parametrize("lengthscale", [0.02, 0.2])
def test_pooling_comes_close_to_all_observations_where_noise_is_large(lengthscale):
    torch.manual_seed(0)
    x, new = torch.rand(2000, 2, dtype=F64), torch.rand(50, 2, dtype=F64)
    kernel = Matern32(2, lengthscale=lengthscale).double()
    table, noise = VNNGP(x, None, kernel, num_neighbors=8).graph, torch.full((2000,), 25.0, dtype=F64)
    with torch.no_grad():
        root = torch.linalg.cholesky(kernel(x, x) + 25 * torch.eye(2000, dtype=F64))
        half = torch.linalg.solve_triangular(root, kernel(x, new), upper=False)
        exact, near = 1 - half.square().sum(0), table.query(new, 64)
        pooled = PooledObservations(kernel, table, noise, 64)
        got = pooled.variance(kernel, new, near, noise)
        single = PooledObservations(kernel, table, noise, 2000).variance(kernel, new, near, noise)
    assert (single / exact).mean() > 1.3 or lengthscale < 0.1
    assert 0.98 < (got / exact).mean() < 1.1
    assert (got / exact).min() > 0.95


def test_points_at_one_place_pool():
    x = torch.rand(20, 2, dtype=F64).repeat(40, 1)
    gp = VNNGP(x, torch.randn(800, dtype=F64), Matern32(2, lengthscale=0.3), Gaussian(1.0), num_neighbors=5)
    gp.solve()
    assert all(part.isfinite().all() for part in gp(x[:5]))


def test_training_predictions_and_export_go_through_the_sites():
    gp, x_new = small("poisson", n=60, num_neighbors=8)
    fit(gp, 4, batch_size=20, progress=False)
    assert bool(gp.q.solved)
    idata = to_arviz(gp, num_samples=3)
    assert idata.posterior["u"].shape == (1, 3, 60)
    assert Predictive(gp.model, guide=gp.guide, num_samples=2)()["y"].shape == (2, 60)
    gp.refresh_neighbors()
    assert gp.predict(x_new).batch_shape == (7,)


@pytest.mark.slow
def test_plain_svi_trains_between_solutions():
    gp, _ = small("poisson", n=60, num_neighbors=8)
    svi, losses = SVI(gp.model, gp.guide, Adam({"lr": 0.03}), TraceMeanField_ELBO()), []
    for step in range(60):
        if step % 10 == 0:
            gp.solve()
        losses.append(svi.step())
    assert all(map(math.isfinite, losses))


def test_classes_and_symmetric_graphs():
    x = torch.rand(80, 2, dtype=F64)
    y = torch.bucketize(torch.sin(5 * x.sum(-1)), torch.tensor([-0.4, 0.4], dtype=F64))
    gp = VNNGP(x, y, Matern32(2, lengthscale=0.3), Categorical(3), num_neighbors=8)
    gp.solve()
    assert gp(x[:4])[1].shape == (3, 4)
    assert gp.sample(x[:4], 5).shape == (5, 3, 4)
    npvi = NPVI(
        x, (y > 0).double(), Matern32(2, lengthscale=0.3), Bernoulli(), num_neighbors=8, guide=PseudoObservations()
    )
    npvi.solve()
    assert isinstance(npvi.q, ObservedGaussian)
    assert (npvi(x[:4])[1] > 0).all()


def test_site_posteriors_of_other_shapes_and_rows_are_errors():
    gp, _ = small(num_neighbors=5)
    prior, part = NNGP(gp.kernel, gp.graph), NNGP(gp.kernel, gp.graph, gp.graph.batch(torch.arange(5)))
    zero, one = torch.zeros(N, dtype=F64), torch.ones(N, dtype=F64)
    with pytest.raises(ValueError, match=r"expected target, precision, loc, variance of one shape \(\.\.\., 40\)"):
        SitePosterior(prior, zero, one, zero[:3], one)
    with pytest.raises(ValueError, match=r"expected q and p on the same rows"):
        kl_divergence(SitePosterior(prior, zero, one, zero, one), part)


@torch.no_grad()
def test_cells_serve_other_noise():
    x, _, _, x_new, _, kernel = field(600, 5, LIKELIHOODS["gaussian"]())
    graph = NeighborGraph(x, 10)
    noise = 5 + torch.rand(600, generator=torch.Generator().manual_seed(0), dtype=F64)
    near = graph.query(x_new, 10)
    first = PooledObservations(bind(kernel), graph, noise, 10)
    again = first.at_noise(bind(kernel), 1.1 * noise)  # weights of the places are the same up to a factor
    new = PooledObservations(bind(kernel), graph, 1.1 * noise, 10)
    want = new.variance(bind(kernel), x_new, near, 1.1 * noise)
    found = again.variance(bind(kernel), x_new, near, 1.1 * noise, first.plan(x_new, 10))
    torch.testing.assert_close(found, want, rtol=1e-9, atol=0)
    assert (found > first.variance(bind(kernel), x_new, near, noise)).all()


@torch.no_grad()
def test_predictions_follow_a_kernel_that_is_zero_between_the_first_rows():
    x, y, _, x_new, *_ = field(150, 9, Gaussian(20.0))
    x[:8] = 10 + 10 * torch.arange(8)[:, None]
    gp = VNNGP(x, y, Wendland(2, lengthscale=0.5).double(), Gaussian(20.0), num_neighbors=5)
    for lengthscale in (0.5, 2.0):
        gp.kernel.lengthscale = torch.tensor(lengthscale, dtype=F64)
        got = gp(x_new, num_neighbors=8)
    torch.testing.assert_close(got, copy.deepcopy(gp)(x_new, num_neighbors=8), rtol=1e-12, atol=0)


def test_gradients_after_predictions_in_inference_mode():
    x, y, _, x_new, _, kernel = field(150, 9, Gaussian(20.0))
    gp = VNNGP(x, y, kernel, Gaussian(20.0), num_neighbors=5)
    gp.solve()
    with torch.inference_mode():
        want = gp(x_new, num_neighbors=8)[1].clone()
    x_new.requires_grad_()
    variance = gp(x_new, num_neighbors=8)[1]
    torch.testing.assert_close(variance, want)
    assert torch.autograd.grad(variance.sum(), x_new)[0].isfinite().all()
