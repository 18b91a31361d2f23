import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import F64, matern, normal, scalar, uniform
from oracles.dense import dense_covariance
from pyro.infer import MCMC, NUTS
from pyro.nn import PyroParam

from pyro_nngp.distributions import NNGP, FullScaleNNGP
from pyro_nngp.kernels import Matern52
from pyro_nngp.neighbors import NeighborGraph

N, M, K = 30, 6, 4
NUGGET = 1e-6


def low_rank(kernel, x, z):
    """Dense covariances: of all values, and of their low-rank part."""
    low = kernel(x, z) @ torch.linalg.solve(dense_covariance(kernel, z), kernel(z, x))
    return dense_covariance(kernel, x), low


def dense(kernel, graph, z, noise=0.0):
    """Covariance of a full-scale prior by its definition, each conditional of the residual from dense matrices."""
    x, n = graph.x, len(graph.x)
    cov, low = low_rank(kernel, x, z)
    residual, noise = cov - low, torch.as_tensor(noise, dtype=F64).expand(n)
    whole = residual + torch.diag(noise)
    a, v = torch.zeros(n, n, dtype=F64), torch.zeros(n, dtype=F64)
    for i in range(n):
        near = graph.neighbors[i][graph.neighbors[i] >= 0]
        a[i, near] = torch.linalg.solve(whole[near][:, near], residual[near, i])
        v[i] = whole[i, i] - residual[i, near] @ a[i, near]
    inverse = torch.linalg.inv(torch.eye(n, dtype=F64) - a)
    return low + inverse @ torch.diag(v) @ inverse.mT


@pytest.fixture
def x():
    return uniform(N)


@pytest.mark.parametrize("noise", [0.0, 0.2, torch.linspace(0.1, 1, N, dtype=F64)], ids=["none", "one", "each"])
def test_log_prob_and_draws_have_the_dense_covariance(x, noise):
    graph, z = NeighborGraph(x, K), uniform(M)
    prior, value = FullScaleNNGP(matern(), graph, z, noise), normal(3, N)
    cov = dense(matern(), graph, z, noise)
    exact = dist.MultivariateNormal(torch.zeros(N, dtype=F64), cov)
    torch.testing.assert_close(prior.log_prob(value), exact.log_prob(value), rtol=1e-8, atol=0)
    root = torch.cat([prior.features.mT, prior.residual.color(torch.eye(N, dtype=F64))])
    torch.testing.assert_close(root.mT @ root, cov, rtol=0, atol=1e-9)


def test_without_inducing_points_it_is_the_nearest_neighbor_process(x):
    graph, value = NeighborGraph(x, K), normal(N)
    none = FullScaleNNGP(matern(), graph, x[:0])
    torch.testing.assert_close(none.log_prob(value), NNGP(matern(), graph).log_prob(value))
    x_new = uniform(5)
    want, have = NNGP(matern(), graph).predict(x_new, value), none.predict(x_new, value)
    torch.testing.assert_close((have.mean, have.variance), (want.mean, want.variance))


def test_without_neighbors_it_is_fitc(x):
    graph, z, value = NeighborGraph(x, 1), uniform(M), normal(N)
    graph.neighbors.fill_(-1)
    cov, low = low_rank(matern(), x, z)
    exact = dist.MultivariateNormal(torch.zeros(N, dtype=F64), low + torch.diag((cov - low).diagonal()))
    torch.testing.assert_close(
        FullScaleNNGP(matern(), graph, z).log_prob(value), exact.log_prob(value), rtol=1e-8, atol=0
    )


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_all_neighbors_give_the_exact_process(x, noise):
    graph, value, x_new = NeighborGraph(x, N - 1), normal(N), uniform(5)
    prior, kernel = FullScaleNNGP(matern(), graph, uniform(M), noise), matern()
    cov = dense_covariance(kernel, x) + noise * torch.eye(N, dtype=F64)
    exact = dist.MultivariateNormal(torch.zeros(N, dtype=F64), cov)
    torch.testing.assert_close(prior.log_prob(value), exact.log_prob(value), rtol=1e-7, atol=0)
    w = torch.linalg.solve(cov, kernel(x, x_new)).mT
    new = prior.predict(x_new, value, N)
    torch.testing.assert_close(new.mean, w @ value, rtol=0, atol=1e-6)
    variance = (1 + NUGGET) * kernel(x_new, diag=True) - (w * kernel(x_new, x)).sum(-1)
    torch.testing.assert_close(new.variance, variance, rtol=0, atol=1e-6)


def test_joint_draws_have_the_exact_covariance_with_all_neighbors(x):
    torch.manual_seed(0)
    x_new, noise, kernel = uniform(3), 0.2, matern()
    prior = FullScaleNNGP(kernel, NeighborGraph(x, N - 1), uniform(M), noise)
    value = prior.rsample()
    draws = prior.sample_new(x_new, value.expand(20_000, N), N + 2)
    cov = dense_covariance(kernel, x) + noise * torch.eye(N, dtype=F64)
    w = torch.linalg.solve(cov, kernel(x, x_new)).mT
    want = dense_covariance(kernel, x_new) - w @ kernel(x, x_new)
    torch.testing.assert_close(draws.mean(0), w @ value, rtol=0, atol=0.02)
    torch.testing.assert_close(draws.mT.cov(), want, rtol=0, atol=0.02)


def test_gradients_are_right_in_hyperparameters_noise_and_inducing_points(x):
    graph, value, z = NeighborGraph(x, K), normal(N), uniform(M)

    def density(lengthscale, noise, z):
        return FullScaleNNGP(Matern52(2, scalar(1.3), lengthscale), graph, z, noise).log_prob(value)

    arguments = [part.requires_grad_() for part in (scalar(0.4), scalar(0.2), z)]
    assert torch.autograd.gradcheck(density, arguments, atol=1e-4)


def test_an_inducing_point_at_a_datum_leaves_its_residual_the_nugget(x):
    prior = FullScaleNNGP(matern(), NeighborGraph(x, K), x[:M])
    assert (prior.residual.var[:M] < 1e-5).all()
    assert (prior.residual.var[:M] > 0).all()
    assert (prior.residual.var[M:] > 1e-4).any()


def test_float32_agrees_with_float64(x):
    z, value = uniform(M), normal(N)
    double = FullScaleNNGP(matern(), NeighborGraph(x, K), z, 0.1).log_prob(value)
    single = FullScaleNNGP(matern(), NeighborGraph(x.float(), K), z.float(), 0.1).log_prob(value.float())
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-3)


def test_it_is_a_site_of_a_program_that_nuts_samples(x):
    graph, z, y = NeighborGraph(x, K), uniform(M), normal(N)

    def model():
        variance = pyro.sample("variance", dist.LogNormal(scalar(0.0), 0.5))
        prior = FullScaleNNGP(Matern52(2, variance, scalar(0.3)), graph, z, 0.5)
        with pyro.plate("copies", 2):
            pyro.sample("y", prior.expand([2]), obs=y.expand(2, N))

    chain = MCMC(NUTS(model, max_tree_depth=2), num_samples=3, warmup_steps=3, disable_progbar=True)
    chain.run()
    assert torch.isfinite(chain.get_samples()["variance"]).all()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"graph": 3}, "NeighborGraph"),
        ({"kernel": Matern52}, "covariance function|Kernel"),
        ({"inducing": torch.zeros(2, 3, dtype=F64)}, r"inducing of shape \(M, 2\)"),
        ({"inducing": torch.zeros(2, 2)}, "dtype"),
        ({"noise": -1.0}, "noise"),
        ({"noise": torch.full((N,), -1.0, dtype=F64)}, "noise to be >= 0"),
        ({"noise": torch.ones(3, dtype=F64)}, "noise of shape"),
        ({"jitter": -1.0}, "jitter"),
    ],
)
def test_wrong_arguments_are_named(x, change, match):
    arguments = {"kernel": matern(), "graph": NeighborGraph(x, K), "inducing": uniform(M)} | change
    with pytest.raises((ValueError, TypeError), match=match):
        FullScaleNNGP(**arguments)


def test_a_batch_of_hyperparameters_is_refused(x):
    kernel = Matern52(2, PyroParam(torch.ones(3, dtype=F64)))
    with pytest.raises(NotImplementedError, match="Build one for each set"):
        FullScaleNNGP(kernel, NeighborGraph(x, K), uniform(M))


def test_values_of_another_shape_are_named(x):
    prior = FullScaleNNGP(matern(), NeighborGraph(x, K), uniform(M))
    for call in (prior.log_prob, lambda value: prior.predict(x, value), lambda value: prior.sample_new(x, value)):
        with pytest.raises(ValueError, match=rf"value of shape \(\.\.\., {N}\)"):
            call(normal(N - 1))
