import gc
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from oracles.dense import dense_cholesky, dense_covariance, dense_precision, gaussian_kl
from pyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch.distributions import kl_divergence

from pyro_nngp._memory import block_limit
from pyro_nngp.distributions import NNGP, NNGPReparam, SparseCholeskyNormal, sparse_cholesky
from pyro_nngp.kernels import RBF, Matern32, Matern52
from pyro_nngp.neighbors.graph import NeighborGraph

F64 = torch.float64
N = 40


def points(n=N):
    return torch.rand(n, 2, dtype=F64)


def kernel():
    return Matern52(2, variance=torch.tensor(1.3, dtype=F64), lengthscale=torch.tensor([0.4, 0.8], dtype=F64))


def factor(graph, columns=4, batch=()):
    """A random guide on the nearest `columns` neighbors of each point."""
    n, pattern = graph.num_points, graph.neighbors[:, :columns]
    weights = 0.3 * torch.randn(*batch, n, columns, dtype=F64)
    return SparseCholeskyNormal(
        torch.randn(*batch, n, dtype=F64), 0.2 + torch.rand(*batch, n, dtype=F64), weights, pattern
    )


def test_full_neighbors_give_the_exact_process():
    x = points()
    prior, f = NNGP(kernel(), NeighborGraph(x, N - 1)), torch.randn(3, N, dtype=F64)
    exact = dist.MultivariateNormal(torch.zeros(N, dtype=F64), dense_covariance(kernel(), x))
    torch.testing.assert_close(prior.log_prob(f), exact.log_prob(f), rtol=1e-9, atol=0)


@pytest.mark.parametrize("ordering", ["random", "coordinate", "maximin", "given"])
def test_log_prob_agrees_with_the_assembled_precision(ordering):
    graph = NeighborGraph(points(), 6, ordering)
    f = torch.randn(N, dtype=F64)
    exact = dist.MultivariateNormal(torch.zeros(N, dtype=F64), precision_matrix=dense_precision(kernel(), graph))
    torch.testing.assert_close(NNGP(kernel(), graph).log_prob(f), exact.log_prob(f), rtol=1e-9, atol=0)


def test_draws_have_the_covariance_of_the_precision():
    graph = NeighborGraph(points(), 5)
    prior, white = NNGP(kernel(), graph), torch.eye(N, dtype=F64)
    color = prior.color(white).mT  # the columns of (I - A)^-1 V^1/2
    torch.testing.assert_close(
        color @ color.mT,
        torch.cholesky_inverse(torch.linalg.cholesky(dense_precision(kernel(), graph))),
        rtol=1e-8,
        atol=1e-9,
    )
    draws = prior.expand([2]).sample((3,))
    assert draws.shape == (3, 2, N)
    assert not torch.equal(draws[0, 0], draws[0, 1])


def test_new_points_are_drawn_the_same_whoever_searches():
    graph = NeighborGraph(points(), 5)
    prior = NNGP(kernel(), graph)
    f = prior.rsample((3,))
    torch.manual_seed(1)
    new = prior.sample_new(graph.x + 0.01, f)
    torch.manual_seed(1)
    searched = graph.extend(graph.x + 0.01)[1]
    torch.testing.assert_close(prior.sample_new(graph.x + 0.01, f, neighbors=searched), new, rtol=1e-9, atol=1e-12)


def test_draws_are_differentiable_in_the_hyperparameters():
    graph, white = NeighborGraph(points(), 5), torch.randn(N, dtype=F64)

    def draw(lengthscale):
        unit = RBF(2).double().bind()
        return NNGP(lambda a, b: unit(a / lengthscale, b / lengthscale), graph, jitter=1e-4).color(white)

    torch.autograd.gradcheck(draw, torch.tensor([0.5, 0.8], dtype=F64, requires_grad=True))


def test_disjoint_batches_add_up():
    graph = NeighborGraph(points(), 6)
    f, k = torch.randn(N, dtype=F64), kernel()
    whole = NNGP(k, graph).log_prob(f)
    total = 0
    for idx in torch.randperm(N).split(8):
        batch = graph.batch(idx)
        part = NNGP(k, graph, batch).log_prob(f[batch.rows])
        assert batch.scale == N / 8
        total = total + part * batch.scale / 5
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)


def test_a_batch_is_drawn_from_the_joint_distribution():
    graph = NeighborGraph(points(), 3, "given")
    batch = graph.batch(torch.tensor([N - 1]))
    draws = NNGP(kernel(), graph, batch).sample((4000,))
    precision = dense_precision(kernel(), graph)
    want = torch.cholesky_inverse(torch.linalg.cholesky(precision))[batch.rows][:, batch.rows]
    got = draws.mT.cov()
    error = ((want.diagonal()[:, None] * want.diagonal() + want.square()) / 4000).sqrt()
    assert ((got - want).abs() < 6 * error).all()


def test_row_order_does_not_matter():
    x, k = points(), kernel()
    shuffle, order, f = torch.randperm(N), torch.randperm(N), torch.randn(N, dtype=F64)
    inverse = torch.argsort(shuffle)
    one = NNGP(k, NeighborGraph(x, 5, order)).log_prob(f)
    two = NNGP(k, NeighborGraph(x[shuffle], 5, inverse[order])).log_prob(f[shuffle])
    torch.testing.assert_close(one, two, rtol=1e-12, atol=0)


def test_prediction_and_joint_draws_agree_with_the_dense_conditional():
    x, new = points(), points(6)
    prior, f = NNGP(kernel(), NeighborGraph(x, N - 1)), torch.randn(N, dtype=F64)
    cov = dense_covariance(kernel(), torch.cat([x, new]))
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


@pytest.mark.parametrize("columns", [0, 4, N - 1])
def test_divergence_agrees_with_the_dense_one(columns):
    graph = NeighborGraph(points(), N - 1 if columns == N - 1 else 6)
    q = (
        factor(graph, columns)
        if columns
        else SparseCholeskyNormal(torch.randn(N, dtype=F64), 0.1 + torch.rand(N, dtype=F64))
    )
    root = dense_cholesky(q)
    want = gaussian_kl(q.loc, root @ root.mT, dense_precision(kernel(), graph))
    torch.testing.assert_close(kl_divergence(q, NNGP(kernel(), graph)), want, rtol=1e-9, atol=0)


def test_divergence_with_a_pattern_that_is_not_the_graphs():
    x, order = points(), torch.randperm(N)
    prior = NNGP(kernel(), NeighborGraph(x, 4, order))
    q = factor(NeighborGraph(x / torch.tensor([0.1, 3.0], dtype=F64), 5, order), 5)
    root = dense_cholesky(q)
    want = gaussian_kl(q.loc, root @ root.mT, dense_precision(kernel(), prior.graph))
    torch.testing.assert_close(kl_divergence(q, prior), want, rtol=1e-9, atol=0)


def test_divergence_from_a_batch_averages_to_the_whole():
    graph, k = NeighborGraph(points(), 6), kernel()
    q = factor(graph, 4, (2,))
    whole = kl_divergence(q, NNGP(k, graph).expand([2]))
    parts = []
    for idx in torch.randperm(N).split(10):
        b = graph.batch(idx)
        local = SparseCholeskyNormal(
            q.loc[:, b.rows], q.scale[:, b.rows], q.weights[:, b.rows], q.pattern[b.rows], b.rows, b.targets
        )
        parts.append(kl_divergence(local, NNGP(k, graph, b).expand([2])) * b.scale)
    assert whole.shape == (2,)
    torch.testing.assert_close(torch.stack(parts).mean(0), whole, rtol=1e-11, atol=0)


def test_divergence_of_a_normal_guide_is_the_mean_field_one():
    graph, loc, scale = NeighborGraph(points(), 6), torch.randn(N, dtype=F64), torch.rand(N, dtype=F64) + 0.1
    prior = NNGP(kernel(), graph)
    got = kl_divergence(dist.Normal(loc, scale).to_event(1), prior)
    torch.testing.assert_close(got, kl_divergence(SparseCholeskyNormal(loc, scale), prior), rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match=r"known for Normal"):
        kl_divergence(dist.Laplace(loc, scale).to_event(1), prior)


def test_divergence_needs_the_same_rows():
    graph = NeighborGraph(points(), 6)
    q = SparseCholeskyNormal(torch.zeros(5, dtype=F64), torch.ones(5, dtype=F64), rows=torch.arange(5))
    with pytest.raises(ValueError, match=r"expected q and p on the same rows"):
        kl_divergence(q, NNGP(kernel(), graph))


@pytest.mark.parametrize("columns", [0, 4])
def test_guide_density_and_moments_agree_with_the_dense_normal(columns):
    graph = NeighborGraph(points(), 6)
    q = (
        factor(graph, columns)
        if columns
        else SparseCholeskyNormal(torch.randn(N, dtype=F64), 0.1 + torch.rand(N, dtype=F64))
    )
    root = dense_cholesky(q)
    exact, value = dist.MultivariateNormal(q.loc, root @ root.mT), torch.randn(2, N, dtype=F64)
    torch.testing.assert_close(q.log_prob(value), exact.log_prob(value), rtol=1e-9, atol=0)
    torch.testing.assert_close(q.variance, exact.variance, rtol=1e-12, atol=0)
    drawn = q.rsample()
    torch.testing.assert_close(q.log_prob(drawn), exact.log_prob(drawn), rtol=1e-9, atol=0)
    draws = q.sample((20_000,))
    want = exact.covariance_matrix
    error = ((want.diagonal()[:, None] * want.diagonal() + want.square()) / 20_000).sqrt()
    assert ((draws.mT.cov() - want).abs() < 6 * error).all()


@pytest.mark.parametrize("batch", [(), (3,)])
def test_combinations_are_computed_in_blocks_of_bounded_size(batch, monkeypatch):
    graph = NeighborGraph(points(), 5)
    q = factor(graph, columns=4, batch=batch)
    coefficients, positions = torch.randn(50, 6, dtype=F64), torch.rand(50, N).argsort(-1)[:, :6]
    whole, sizes, align = q.combined_rows(coefficients, positions), [], sparse_cholesky.align
    monkeypatch.setattr(sparse_cholesky, "align", lambda columns: sizes.append(columns.shape) or align(columns))
    with block_limit(20 * 6 * 5 * (10 + 2 * math.prod(batch))):
        assert torch.equal(q.combined_rows(coefficients, positions), whole)
    assert sizes == [(20, 30), (20, 30), (10, 30)]


def test_guide_on_some_rows_is_the_marginal():
    graph = NeighborGraph(points(), 6)
    q, rows = factor(graph), torch.tensor([3, 8, 21, 30])
    part = SparseCholeskyNormal(
        q.loc[rows], q.scale[rows], q.weights[rows], q.pattern[rows], rows, torch.tensor([0, 2])
    )
    root = dense_cholesky(q)
    want = (root @ root.mT)[rows][:, rows]
    draws = part.sample((20_000,))
    error = ((want.diagonal()[:, None] * want.diagonal() + want.square()) / 20_000).sqrt()
    assert ((draws.mT.cov() - want).abs() < 6 * error).all()
    drawn = part.rsample()
    assert part.log_prob(drawn).isfinite()
    with pytest.raises(ValueError, match=r"expected value to be the last draw of these rows"):
        part.log_prob(drawn + 1)


def test_guide_rejects_wrong_shapes():
    one = torch.ones(4)
    for args, message in [
        ((one, torch.ones(3)), r"expected loc, scale of one shape"),
        ((one, one, torch.ones(4, 2)), r"expected weights, pattern together"),
        ((one, one, torch.ones(4, 2), torch.zeros(4, 3, dtype=torch.long)), r"expected weights of shape \(4, 3\)"),
        ((one, one, None, None, torch.arange(3)), r"expected loc to have 3 entries"),
    ]:
        with pytest.raises(ValueError, match=message):
            SparseCholeskyNormal(*args)


def test_prior_rejects_what_is_not_a_graph():
    with pytest.raises(TypeError, match=r"expected graph to be a NeighborGraph, got Tensor"):
        NNGP(kernel(), points())


def test_new_points_are_checked():
    prior = NNGP(kernel(), NeighborGraph(points(), 5))
    with pytest.raises(TypeError, match=r"expected x_new of the dtype of x"):
        prior.predict(torch.rand(3, 2), torch.zeros(N, dtype=F64))
    with pytest.raises(ValueError, match=r"expected num_neighbors in 1\.\.40, got 41"):
        prior.predict(points(3), torch.zeros(N, dtype=F64), num_neighbors=41)


def conjugate_posterior(k, graph, y, noise_var):
    precision = dense_precision(k, graph) + torch.eye(len(y), dtype=F64) / noise_var
    cov = torch.cholesky_inverse(torch.linalg.cholesky(precision))
    return cov @ y / noise_var, cov


def regression(graph, y, noise_scale):
    f = pyro.sample("f", NNGP(Matern32(2, lengthscale=torch.tensor(0.5)), graph))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(f, noise_scale), obs=y)


def test_hand_written_mean_field_svi_reaches_the_optimum():
    graph, y = NeighborGraph(points().float(), 6), torch.randn(N)
    loc, log_scale = torch.zeros(N, requires_grad=True), torch.zeros(N, requires_grad=True)

    def guide(graph, y, noise_scale):
        pyro.sample("f", dist.Normal(pyro.param("loc", loc), pyro.param("log_scale", log_scale).exp()).to_event(1))

    svi = SVI(regression, guide, Adam({"lr": 0.05}), TraceMeanField_ELBO())
    visited = []
    for _ in range(400):
        svi.step(graph, y, 0.5)
        visited.append(pyro.param("loc").detach().double().clone())
    mean, _ = conjugate_posterior(Matern32(2, lengthscale=torch.tensor(0.5)).double(), graph.double(), y.double(), 0.25)
    assert (torch.stack(visited[200:]).mean(0) - mean).abs().max() < 0.05


def test_autonormal_trains_and_predictive_returns_the_site():
    graph, y = NeighborGraph(points().float(), 6), torch.randn(N)
    guide = AutoNormal(regression)
    svi = SVI(regression, guide, Adam({"lr": 0.05}), TraceMeanField_ELBO())
    losses = [svi.step(graph, y, 0.5) for _ in range(150)]
    assert sum(losses[-20:]) < 0.75 * sum(losses[:20])
    draws = Predictive(regression, guide=guide, num_samples=7)(graph, y, 0.5)
    assert draws["f"].reshape(7, -1).shape == (7, N)


@pytest.mark.slow
def test_nuts_with_whitening_recovers_the_exact_posterior():
    graph = NeighborGraph(points(100), 99)
    k = Matern32(2, lengthscale=torch.tensor(0.5)).double().requires_grad_(False)
    prior = NNGP(k, graph)  # built once: its hyperparameters are fixed, so its conditionals are too
    y = prior.sample() + 0.3 * torch.randn(100, dtype=F64)

    def conjugate():
        f = pyro.sample("f", prior)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    model = pyro.poutine.reparam(conjugate, config={"f": NNGPReparam()})
    mcmc = MCMC(NUTS(model), num_samples=600, warmup_steps=300, disable_progbar=True)
    mcmc.run()
    draws = prior.color(mcmc.get_samples()["f_white"])
    mean, cov = conjugate_posterior(k, graph, y, 0.09)
    ess = pyro.ops.stats.effective_sample_size(draws[None], chain_dim=0, sample_dim=1).clamp(max=600)
    assert ((draws.mean(0) - mean).abs() < 6 * (cov.diagonal() / ess).sqrt()).all()
    assert ((draws.var(0) / cov.diagonal()).log().abs() < 6 * (2 / ess).sqrt()).all()


def test_whitening_keeps_the_density():
    graph, y = NeighborGraph(points(), 6), torch.randn(N, dtype=F64)
    model = pyro.poutine.reparam(regression, config={"f": NNGPReparam()})
    white = torch.randn(N, dtype=F64)
    conditioned = pyro.condition(model, data={"f_white": white})
    trace = pyro.poutine.trace(conditioned).get_trace(graph, y, torch.tensor(0.5, dtype=F64))
    prior = NNGP(Matern32(2, lengthscale=torch.tensor(0.5)), graph)
    f = prior.color(white)
    _, var = prior.conditionals
    torch.testing.assert_close(trace.nodes["f"]["value"], f)
    torch.testing.assert_close(prior.whiten(f), white)
    torch.testing.assert_close(prior.log_prob(f), trace.nodes["f_white"]["fn"].log_prob(white) - 0.5 * var.log().sum())


def test_whitening_rejects_other_sites():
    graph, y = NeighborGraph(points(), 6), torch.randn(N, dtype=F64)
    with pytest.raises(TypeError, match=r"site 'y' to be an NNGP over all points"):
        pyro.poutine.reparam(regression, config={"y": NNGPReparam()})(graph, y, torch.tensor(0.5, dtype=F64))
    with pytest.raises(ValueError, match=r"site 'f' to be latent"):
        pyro.poutine.reparam(pyro.condition(regression, {"f": y}), config={"f": NNGPReparam()})(
            graph, y, torch.tensor(0.5, dtype=F64)
        )


def test_a_kernel_written_as_a_function_fires_its_sites_in_the_model():
    graph = NeighborGraph(points(), 6)

    def model():
        def cov(a, b):
            scale = pyro.param("scale", torch.tensor(0.5, dtype=F64))
            return RBF(2).double().bind()(a / scale, b / scale)

        return pyro.sample("f", NNGP(cov, graph))

    trace = pyro.poutine.trace(model).get_trace()
    names = list(trace.nodes)
    assert 0 < names.index("scale") < names.index("f")


def test_a_model_that_builds_its_kernel_at_every_call_leaves_no_names_behind():
    graph, y = NeighborGraph(points(), 6), torch.randn(N, dtype=F64)
    known = pyro.get_param_store()._param_to_name
    before = len(known)
    for _ in range(3):
        pyro.poutine.trace(regression).get_trace(graph, y, torch.tensor(0.5, dtype=F64))
    gc.collect()
    assert len(known) == before
    kept = kernel()
    kept(points())
    assert len(known) > before


@pytest.mark.parametrize(("width", "dtype"), [(1, torch.int64), (7, torch.int64), (8, torch.int32), (90, torch.int64)])
def test_equal_columns_come_together_in_slots_of_their_own(width, dtype):
    columns = torch.randint(-1, 5 if width < 90 else 10**9, (40, width), generator=torch.Generator().manual_seed(0))
    order, slots = sparse_cholesky.align(columns.to(dtype))
    for row, place, slot in zip(columns, order, slots, strict=True):
        assert sorted(place.tolist()) == list(range(width))
        _, expected = row.unique(return_inverse=True)
        assert torch.equal(slot, expected[place])
    assert torch.equal(order, columns.sort(dim=-1, stable=True).indices)  # as on other devices
