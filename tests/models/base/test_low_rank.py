"""Inducing points beside neighbors, by the exact process, where all others are neighbors, and FullScaleNNGP."""

import pyro.distributions as dist
import pytest
import torch
from builders import F64, matern, normal, scalar, uniform, waves, zero
from pyro import poutine
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributions import FullScaleNNGP
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.means import LinearMean
from pyro_nngp.models import Vecchia

N, M, K, NOISE = 40, 7, 5, 0.2


def model(x, y, inducing=None, num_neighbors=N - 1, **settings):
    gp = Vecchia(x, y, matern(), Gaussian(NOISE), num_neighbors=num_neighbors, inducing=inducing, **settings)
    if gp.can_solve:
        gp.solve()
    return gp


def evidence(gp, idx=None):
    trace = poutine.trace(gp.model).get_trace(idx)
    return trace.log_prob_sum()


MEANS = {
    "constant": lambda: None,
    "flat": lambda: LinearMean(2),
    "normal": lambda: LinearMean(2, prior=dist.Normal(torch.tensor(0.0, dtype=F64), 2.0)),
    "function": lambda: zero,
}


@pytest.mark.parametrize("mean", MEANS)
def test_with_all_neighbors_everything_is_exact(mean):
    x, y = waves(N)
    weights = torch.rand(N, dtype=F64) + 0.5
    have, want = (model(x, y, z, mean=MEANS[mean](), weights=weights, offset=x[:, 0]) for z in (uniform(M), None))
    x_new, k = uniform(4).requires_grad_(), N
    if mean != "normal":  # its coefficients are drawn
        torch.testing.assert_close(evidence(have), evidence(want), rtol=1e-8, atol=0)
        torch.testing.assert_close(have.log_prob(7), want.log_prob(7), rtol=1e-8, atol=0)
    torch.testing.assert_close(have(x_new, num_neighbors=k), want(x_new, num_neighbors=k), rtol=0, atol=1e-8)
    torch.testing.assert_close(
        have.joint(x_new, num_neighbors=k), want.joint(x_new, num_neighbors=k), rtol=0, atol=1e-8
    )
    torch.testing.assert_close(have.loo(num_neighbors=k - 1), want.loo(num_neighbors=k - 1), rtol=0, atol=1e-8)
    if mean == "normal":  # without inducing points the posterior of the coefficients is as training left it
        return
    gradients = []
    for gp in (have, want):
        loc, var = gp(x_new, num_neighbors=k)
        inputs = [x_new, *gp.kernel.parameters(), *gp.likelihood.parameters()]
        gradients.append(torch.autograd.grad((loc + 3 * var).sum(), inputs))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


def test_with_few_neighbors_it_is_the_full_scale_process():
    x, y = waves(N)
    z, x_new = uniform(M).requires_grad_(), uniform(4)
    gp = model(x, y, z, K, mean=zero)
    prior = FullScaleNNGP(gp.kernel, gp.graph, z, gp.likelihood.variance)
    density = evidence(gp)
    torch.testing.assert_close(density, prior.log_prob(y), rtol=1e-8, atol=0)
    parameters = [*gp.kernel.parameters(), *gp.likelihood.parameters()]
    have, want = (torch.autograd.grad(value, parameters) for value in (density, prior.log_prob(y)))
    torch.testing.assert_close(have, want, rtol=1e-8, atol=1e-8)
    loc, var = gp(x_new, num_neighbors=K)
    new = prior.predict(x_new, y, K)
    torch.testing.assert_close((loc, var), (new.mean, new.variance), rtol=0, atol=1e-8)


def test_a_batch_has_the_joint_density_of_its_errors_given_their_neighbors():
    x, y = waves(N)
    gp, idx = model(x, y, uniform(M), K, mean=zero), torch.tensor([3, 17, 8, 30])
    prior = FullScaleNNGP(matern(), gp.graph, gp.z, NOISE)
    errors = torch.eye(N, dtype=F64)
    near = gp.graph.neighbors
    for i in range(N):
        real = near[i] >= 0
        errors[i, near[i][real]] -= prior.residual.w[i][real]
    root = torch.cat([prior.features.mT, prior.residual.color(torch.eye(N, dtype=F64))])
    cov = (errors @ root.mT @ root @ errors.mT)[idx][:, idx]
    want = dist.MultivariateNormal(torch.zeros(4, dtype=F64), cov).log_prob((errors @ y)[idx])
    torch.testing.assert_close(evidence(gp, idx), want * N / 4, rtol=1e-8, atol=0)


def test_joint_draws_have_the_exact_moments_with_all_neighbors():
    x, y = waves(N)
    gp, x_new = model(x, y, uniform(M)), uniform(3)
    draws = gp.sample(x_new, 20_000, num_neighbors=N + 2, seed=0)
    loc, cov = gp.joint(x_new, num_neighbors=N)
    torch.testing.assert_close(draws.mean(0), loc.detach(), rtol=0, atol=0.02)
    torch.testing.assert_close(draws.mT.cov(), cov.detach(), rtol=0, atol=0.02)


def test_predictions_average_over_posterior_draws():
    x, y = waves(N)
    kernel = Matern52(2, scalar(1.3), PyroSample(dist.LogNormal(scalar(-1.0), 1.0)))
    gp = Vecchia(x, y, kernel, Gaussian(NOISE), num_neighbors=K, inducing=uniform(M), mean=zero)
    lengthscales, x_new = torch.tensor([0.3, 0.6], dtype=F64), uniform(3)
    loc, _ = gp(x_new, num_neighbors=K, samples={"kernel.lengthscale": lengthscales})
    each = [
        FullScaleNNGP(Matern52(2, scalar(1.3), scale), gp.graph, gp.z, NOISE).predict(x_new, y, K).mean
        for scale in lengthscales
    ]
    torch.testing.assert_close(loc, torch.stack(each).mean(0), rtol=0, atol=1e-8)


def test_no_inducing_points_are_none():
    x, y = waves(N)
    plain, none = (model(x, y, inducing, K) for inducing in (None, 0))
    assert torch.equal(plain.log_prob(), none.log_prob())
    assert "z" not in dict(none.named_buffers())
    assert len(model(x, y, M, K).z) == M


@pytest.mark.slow
def test_training_lowers_the_loss_on_rows_that_need_the_long_range():
    x = uniform(300, seed=0)
    y = torch.sin(3 * x[:, 0]) + 0.05 * torch.randn(300, dtype=F64)
    gp = Vecchia(x, y, Matern52(2), num_neighbors=2, inducing=15)
    plain = Vecchia(x, y, Matern52(2), num_neighbors=2)
    for each in (gp, plain):
        nngp.fit(each, progress=False)
    assert gp.log_prob() > plain.log_prob() + 10


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"inducing": 1}, ValueError, r"expected inducing in 2\.\.40, got 1"),
        ({"inducing": uniform(3, 5)}, ValueError, r"expected inducing of shape \(M, 2\), got \(3, 5\)"),
        (
            {"y": normal(N, 2)},
            NotImplementedError,
            r"expected inducing None with several outputs.*one model per output",
        ),
    ],
)
def test_wrong_input(settings, error, message):
    x, y = waves(N)
    with pytest.raises(error, match=message):
        Vecchia(x, settings.get("y", y), num_neighbors=K, inducing=settings.get("inducing", M))


def test_what_is_not_there_yet_says_so():
    x, y = waves(N)
    gp = model(x, y, M, K)
    with pytest.raises(NotImplementedError, match=r"expected inducing None on several processes.*Train on one process"):
        Vecchia(ShardedData(x, y), num_neighbors=K, inducing=M)
    with pytest.raises(ValueError, match=r"expected y of shape \(P,\).*Condition on one fantasy at a time"):
        gp.condition_on(uniform(2), normal(3, 2))
    kernel = Matern52(2, scalar(1.0), PyroSample(dist.LogNormal(scalar(0.0), 1.0)))
    gp = Vecchia(x, y, kernel, Gaussian(NOISE), num_neighbors=K, inducing=M)
    given = poutine.condition(gp.model, {"kernel.lengthscale": torch.ones(3, 1, dtype=F64)})
    with pytest.raises(NotImplementedError, match=r"expected hyperparameters of one set with inducing points"):
        given()
    assert set(model(x, y, M, K).summary()["note"][:3]) == {"no interval with inducing points"}
