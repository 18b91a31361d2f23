import gc

import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import matern, scalar, uniform
from oracles.dense import dense_covariance, dense_precision
from oracles.problems import conjugate_posterior, regression
from pyro.infer import SVI, Predictive, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam

from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import RBF, Matern32, Matern52, Sum, Warped
from pyro_nngp.neighbors.graph import NeighborGraph

F64 = torch.float64


N = 40


def test_full_neighbors_give_the_exact_process():
    x = uniform(N)
    prior, f = NNGP(matern(), NeighborGraph(x, N - 1)), torch.randn(3, N, dtype=F64)
    exact = dist.MultivariateNormal(torch.zeros(N, dtype=F64), dense_covariance(matern(), x))
    torch.testing.assert_close(prior.log_prob(f), exact.log_prob(f), rtol=1e-9, atol=0)


@pytest.mark.parametrize("ordering", ["random", "coordinate", "maximin", "principal", "given"])
def test_log_prob_agrees_with_the_assembled_precision(ordering):
    graph = NeighborGraph(uniform(N), 6, ordering)
    f = torch.randn(N, dtype=F64)
    exact = dist.MultivariateNormal(torch.zeros(N, dtype=F64), precision_matrix=dense_precision(matern(), graph))
    torch.testing.assert_close(NNGP(matern(), graph).log_prob(f), exact.log_prob(f), rtol=1e-9, atol=0)


def test_draws_have_the_covariance_of_the_precision():
    graph = NeighborGraph(uniform(N), 5)
    prior, white = NNGP(matern(), graph), torch.eye(N, dtype=F64)
    color = prior.color(white).mT  # the columns of (I - A)^-1 V^1/2
    torch.testing.assert_close(
        color @ color.mT,
        torch.cholesky_inverse(torch.linalg.cholesky(dense_precision(matern(), graph))),
        rtol=1e-8,
        atol=1e-9,
    )
    draws = prior.expand([2]).sample((3,))
    assert draws.shape == (3, 2, N)
    assert not torch.equal(draws[0, 0], draws[0, 1])


def test_new_points_are_drawn_the_same_whoever_searches():
    graph = NeighborGraph(uniform(N), 5)
    prior = NNGP(matern(), graph)
    f = prior.rsample((3,))
    torch.manual_seed(1)
    new = prior.sample_new(graph.x + 0.01, f)
    torch.manual_seed(1)
    searched = graph.extend(graph.x + 0.01)[1]
    torch.testing.assert_close(prior.sample_new(graph.x + 0.01, f, neighbors=searched), new, rtol=1e-9, atol=1e-12)


def test_draws_are_differentiable_in_the_hyperparameters():
    graph, white = NeighborGraph(uniform(N), 5), torch.randn(N, dtype=F64)

    def draw(lengthscale):
        unit = RBF(2).double().bind()
        return NNGP(lambda a, b: unit(a / lengthscale, b / lengthscale), graph, jitter=1e-4).color(white)

    torch.autograd.gradcheck(draw, torch.tensor([0.5, 0.8], dtype=F64, requires_grad=True))


@pytest.mark.parametrize("opaque", [False, True])
def test_a_density_after_a_draw_keeps_its_gradients(opaque):
    graph, f, kern = NeighborGraph(uniform(N), 5), torch.randn(N, dtype=F64), RBF(2).double()
    of = kern if not opaque else lambda a, b: kern(a, b)
    want = torch.autograd.grad(NNGP(of, graph).log_prob(f), list(kern.parameters()))
    prior = NNGP(of, graph)
    prior.sample()
    with torch.no_grad():
        prior.expand([2]).log_prob(f)
    torch.testing.assert_close(torch.autograd.grad(prior.log_prob(f), list(kern.parameters())), want)
    w = prior.conditionals[0]
    prior.sample()
    assert prior.conditionals[0] is w  # computed again only once


def test_conditionals_without_gradients_to_have_are_computed_once():
    prior = NNGP(matern().requires_grad_(False), NeighborGraph(uniform(N), 5))
    with torch.no_grad():
        w, _ = prior.conditionals
    assert prior.conditionals[0] is w


def test_disjoint_batches_add_up():
    graph = NeighborGraph(uniform(N), 6)
    f, k = torch.randn(N, dtype=F64), matern()
    whole = NNGP(k, graph).log_prob(f)
    total = 0
    for idx in torch.randperm(N).split(8):
        batch = graph.batch(idx)
        part = NNGP(k, graph, batch).log_prob(f[batch.rows])
        assert batch.scale == N / 8
        total = total + part * batch.scale / 5
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)


def test_a_batch_is_drawn_from_the_joint_distribution():
    graph = NeighborGraph(uniform(N), 3, "given")
    batch = graph.batch(torch.tensor([N - 1]))
    draws = NNGP(matern(), graph, batch).sample((4000,))
    precision = dense_precision(matern(), graph)
    want = torch.cholesky_inverse(torch.linalg.cholesky(precision))[batch.rows][:, batch.rows]
    got = draws.mT.cov()
    error = ((want.diagonal()[:, None] * want.diagonal() + want.square()) / 4000).sqrt()
    assert ((got - want).abs() < 6 * error).all()


def test_row_order_does_not_matter():
    x, k = uniform(N), matern()
    shuffle, order, f = torch.randperm(N), torch.randperm(N), torch.randn(N, dtype=F64)
    inverse = torch.argsort(shuffle)
    one = NNGP(k, NeighborGraph(x, 5, order)).log_prob(f)
    two = NNGP(k, NeighborGraph(x[shuffle], 5, inverse[order])).log_prob(f[shuffle])
    torch.testing.assert_close(one, two, rtol=1e-12, atol=0)


def test_prediction_and_joint_draws_agree_with_the_dense_conditional():
    x, new = uniform(N), uniform(6)
    prior, f = NNGP(matern(), NeighborGraph(x, N - 1)), torch.randn(N, dtype=F64)
    cov = dense_covariance(matern(), torch.cat([x, new]))
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(cov[:N, :N]), cov[:N, N:], upper=False)
    weights = torch.cholesky_solve(cov[:N, N:], torch.linalg.cholesky(cov[:N, :N]))
    mean, posterior = f @ weights, cov[N:, N:] - half.mT @ half
    got = prior.predict(new, f, num_neighbors=N)
    torch.testing.assert_close(got.mean, mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(got.variance, posterior.diagonal(), rtol=1e-6, atol=1e-10)
    _, neighbors = prior.graph.extend(new, N + 5)  # searched once for all draws
    draws = prior.sample_new(new, f.expand(20_000, N), neighbors=neighbors)
    error = ((posterior.diagonal()[:, None] * posterior.diagonal() + posterior.square()) / 20_000).sqrt()
    assert ((draws.mT.cov() - posterior).abs() < 6 * error).all()
    assert ((draws.mean(0) - mean).abs() < 6 * (posterior.diagonal() / 20_000).sqrt()).all()


def test_prior_rejects_what_is_not_a_graph():
    with pytest.raises(TypeError, match=r"expected graph to be a NeighborGraph, got Tensor"):
        NNGP(matern(), uniform(N))


def test_a_lengthscale_left_at_one_in_other_units_is_warned_of_once():
    graph, warped = NeighborGraph(1e4 * uniform(N), num_neighbors=3), Warped(Matern32(2), torch.nn.Tanh(), 2)
    kernel = Sum(Matern32(2, lengthscale=3e3), Matern52(1, active_dims=[1]))
    with pytest.warns(UserWarning, match=r"lengthscale of the kernel was left out and is 1, .* spreads of \S+\. "):
        NNGP(kernel, graph)
    for silent in (kernel, Matern32(2, lengthscale=3e3), warped, lambda x, z: Matern32(2)(x, z)):
        NNGP(silent, graph)
    NNGP(Matern32(2), NeighborGraph(uniform(N), num_neighbors=3))


def test_new_points_are_checked():
    prior = NNGP(matern(), NeighborGraph(uniform(N), 5))
    with pytest.raises(TypeError, match=r"expected x_new of the dtype of x"):
        prior.predict(torch.rand(3, 2), torch.zeros(N, dtype=F64))
    with pytest.raises(ValueError, match=r"expected num_neighbors in 1\.\.40, got 41"):
        prior.predict(uniform(3), torch.zeros(N, dtype=F64), num_neighbors=41)


@pytest.mark.slow
def test_hand_written_mean_field_svi_reaches_the_optimum():
    graph, y = NeighborGraph(uniform(N).float(), 6), torch.randn(N)
    loc, log_scale = torch.zeros(N, requires_grad=True), torch.zeros(N, requires_grad=True)

    def guide(graph, y, noise_scale):
        pyro.sample("f", dist.Normal(pyro.param("loc", loc), pyro.param("log_scale", log_scale).exp()).to_event(1))

    svi = SVI(regression, guide, Adam({"lr": 0.05}), TraceMeanField_ELBO())
    visited = []
    for _ in range(400):
        svi.step(graph, y, 0.5)
        visited.append(pyro.param("loc").detach().double().clone())
    mean, _ = conjugate_posterior(Matern32(2, lengthscale=0.5).double(), graph.double(), y.double(), 0.25)
    assert (torch.stack(visited[200:]).mean(0) - mean).abs().max() < 0.05


def test_autonormal_trains_and_predictive_returns_the_site():
    graph, y = NeighborGraph(uniform(N).float(), 6), torch.randn(N)
    guide = AutoNormal(regression)
    svi = SVI(regression, guide, Adam({"lr": 0.05}), TraceMeanField_ELBO())
    losses = [svi.step(graph, y, 0.5) for _ in range(150)]
    assert sum(losses[-20:]) < 0.75 * sum(losses[:20])
    draws = Predictive(regression, guide=guide, num_samples=7)(graph, y, 0.5)
    assert draws["f"].reshape(7, -1).shape == (7, N)


def test_a_kernel_written_as_a_function_fires_its_sites_in_the_model():
    graph = NeighborGraph(uniform(N), 6)

    def model():
        def cov(a, b):
            scale = pyro.param("scale", scalar(0.5))
            return RBF(2).double().bind()(a / scale, b / scale)

        return pyro.sample("f", NNGP(cov, graph))

    trace = pyro.poutine.trace(model).get_trace()
    names = list(trace.nodes)
    assert 0 < names.index("scale") < names.index("f")


def test_a_model_that_builds_its_kernel_at_every_call_leaves_no_names_behind():
    graph, y = NeighborGraph(uniform(N), 6), torch.randn(N, dtype=F64)
    known = pyro.get_param_store()._param_to_name
    before = len(known)
    for _ in range(3):
        pyro.poutine.trace(regression).get_trace(graph, y, scalar(0.5))
    gc.collect()
    assert len(known) == before
    kept = matern()
    kept(uniform(N))
    assert len(known) > before
