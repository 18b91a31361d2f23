import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from oracles.dense import dense_cholesky, dense_covariance, dense_precision
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroSample
from pyro.optim import Adagrad, Adam

from pyro_nngp._memory import block_limit
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.kernels import Matern32, Matern52
from pyro_nngp.likelihoods import (
    Bernoulli,
    Binomial,
    Categorical,
    Gaussian,
    HeteroskedasticGaussian,
    LogNormal,
    NegativeBinomial,
    Poisson,
)
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import NPVI, VNNGP
from pyro_nngp.neighbors.graph import NeighborGraph
from pyro_nngp.neighbors.symmetric import SymmetricGraph
from pyro_nngp.variational.encoders import (
    ConditionalEncoder,
    GraphConvolutionEncoder,
    SiteEncoder,
    observed,
    rough_latent,
)

F64 = torch.float64
N = 48
ENCODERS = [
    GraphConvolutionEncoder,
    lambda: SiteEncoder(2, num_context=6),
    lambda: ConditionalEncoder(num_context=6),
]


def data(n=N, dtype=F64):
    x = torch.rand(n, 2, dtype=dtype)
    return x, torch.sin(5 * x.sum(-1)) + 0.2 * torch.randn(n, dtype=dtype)


def kernel():
    return Matern52(2, variance=torch.tensor(1.3), lengthscale=torch.tensor([0.3, 0.5]))


def shaken(encoder, amount=0.3):
    """The encoder with every parameter moved, so that no output is zero or constant by its start."""
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(amount * torch.randn_like(parameter))
    return encoder


def loss(gp, *args, elbo=None):
    return (IntegratedELBO() if elbo is None else elbo).loss(gp.model, gp.guide, *args)


def dense(gp):
    """R of q(u), as a matrix."""
    return dense_cholesky(gp.local.distribution()).detach()


# The graph


def parents_by_hand(x, order, k):
    """The rule of the paper, point by point, in rows of x."""
    rank = {row: place for place, row in enumerate(order)}

    def distance(i, j):
        return float((x[i] - x[j]).square().sum())

    def nearest(i, rows):
        return sorted(rows, key=lambda j: (distance(i, j), rank[j]))

    edges = {frozenset((i, j)) for i in order for j in nearest(i, set(order) - {i})[:k]}
    table = []
    for i in range(len(x)):
        before = [j for j in order if rank[j] < rank[i]]
        parents = [j for j in before if frozenset((i, j)) in edges][:k]  # the latest go first
        further = nearest(i, set(before) - set(parents))
        parents += further[: min(k, rank[i]) - len(parents)]
        table.append(nearest(i, parents) + [-1] * (k - len(parents)))
    return torch.tensor(table)


@pytest.mark.parametrize("ordering", ["random", "maximin", "coordinate", "given"])
@pytest.mark.parametrize("k", [1, 4, 39])
def test_graph_follows_the_rule_of_the_paper(ordering, k):
    x = torch.rand(40, 2, dtype=F64)
    graph = SymmetricGraph(x, k, ordering)
    assert torch.equal(graph.neighbors, parents_by_hand(x, graph.order.tolist(), k))
    place = torch.argsort(graph.order)
    assert torch.equal((graph.neighbors >= 0).sum(-1), place.clamp(max=k))


def test_graph_of_a_grid_with_ties_and_duplicates():
    grid = torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0)).double()
    x = torch.cat([grid, grid[:6]])
    graph = SymmetricGraph(x, 3)
    assert torch.equal(graph.neighbors, parents_by_hand(x, graph.order.tolist(), 3))


def test_graph_is_refreshed_by_the_same_rule():
    x = torch.rand(40, 2, dtype=F64)
    graph, lengthscale = SymmetricGraph(x, 4), torch.tensor([0.1, 2.0], dtype=F64)
    graph.refresh(lengthscale)
    assert torch.equal(graph.neighbors, parents_by_hand(x / lengthscale, graph.order.tolist(), 4))


def test_more_pairs_of_near_points_are_joined_than_by_predecessors_alone():
    x = torch.rand(400, 2, dtype=F64)
    graph, order = SymmetricGraph(x, 6), SymmetricGraph(x, 6).order
    wanted = {frozenset((i, int(j))) for i, row in enumerate(graph.others()) for j in row}
    joined = [
        len(wanted & {frozenset((i, int(j))) for i, row in enumerate(table) for j in row if j >= 0})
        for table in (graph.neighbors, NeighborGraph(x, 6, order).neighbors)
    ]
    assert joined[0] > joined[1]


# NPVI


def test_full_pattern_and_gaussian_noise_give_the_exact_posterior():
    x, y = data()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=N - 1, mean=ConstantMean(0.0))
    gp.solve()
    cov = dense_covariance(gp.kernel, x).detach()
    tril = torch.linalg.cholesky(cov + gp.likelihood.variance.detach() * torch.eye(N, dtype=F64))
    half = torch.linalg.solve_triangular(tril, cov, upper=False)
    want_mean, want = half.mT @ torch.linalg.solve_triangular(tril, y[:, None], upper=False)[:, 0], cov - half.mT @ half
    root = dense(gp)
    torch.testing.assert_close(gp.local.distribution().loc.detach(), want_mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(root @ root.mT, want, rtol=1e-7, atol=1e-10)
    evidence = dist.MultivariateNormal(torch.zeros(N, dtype=F64), scale_tril=tril).log_prob(y)
    assert loss(gp) == pytest.approx(-float(evidence), rel=1e-9)


def test_theorem_of_the_paper_covariances_on_edges_can_be_matched():
    """Rows set one after the other so that Cov(u_i, u_j) under q is the posterior's for every edge (i, j), i = j too.

    The lengthscale is short: with 0.3, what is left for the diagonal of some row is negative.
    """
    x, y = data()
    k = Matern32(2, lengthscale=torch.tensor(0.1))
    gp = NPVI(x, y, k, Gaussian(0.3), num_neighbors=5)
    sites = torch.eye(N, dtype=F64) / gp.likelihood.variance.detach()
    posterior = torch.cholesky_inverse(torch.linalg.cholesky(dense_precision(k, gp.graph).detach() + sites))
    root, q = torch.zeros(N, N, dtype=F64), gp.local.distribution()
    for i in gp.graph.order.tolist():
        near = gp.graph.neighbors[i][gp.graph.neighbors[i] >= 0]
        near = near[torch.argsort(torch.argsort(gp.graph.order)[near])]  # so that the block is a lower triangle
        block = root[near][:, near]
        torch.testing.assert_close(block, block.tril())
        row = torch.linalg.solve_triangular(block, posterior[near, i, None], upper=False)[:, 0]
        root[i, near], root[i, i] = row, (posterior[i, i] - row.square().sum()).sqrt()
    weights = torch.where(q.pattern >= 0, root.gather(1, q.pattern.clamp(min=0)), 0.0)
    gp.local.assign(type(q)(q.loc, root.diagonal(), weights, q.pattern))
    q = gp.local.distribution()
    torch.testing.assert_close(q.variance.detach(), posterior.diagonal(), rtol=1e-9, atol=0)
    for i, row in enumerate(gp.graph.neighbors):
        for j in row[row >= 0].tolist():
            both = q.combined_rows(torch.ones(1, 2, dtype=F64), torch.tensor([[i, j]]))
            covariance = (both - q.variance[i] - q.variance[j]) / 2
            torch.testing.assert_close(covariance.detach()[0], posterior[i, j], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("likelihood", "make"),
    [
        (lambda: Gaussian(0.05), lambda f: f),
        (lambda: Poisson("softplus"), lambda f: (3 * torch.nn.functional.softplus(f)).round()),
        (lambda: LogNormal(0.01), lambda f: (0.1 * f).exp()),
        (lambda: Bernoulli("logit"), lambda f: (f > 0).to(f.dtype)),
        (lambda: Categorical(3), lambda f: torch.bucketize(f, torch.tensor([-0.4, 0.4], dtype=f.dtype))),
    ],
)
def test_solving_ends_where_the_gradient_vanishes(likelihood, make):
    x, f = data()
    gp = NPVI(x, make(f), kernel(), likelihood(), num_neighbors=8)
    gp.solve(max_steps=300, tolerance=1e-7)
    IntegratedELBO().differentiable_loss(gp.model, gp.guide).backward()
    scale = gp.local.log_scale.detach().exp()
    assert (gp.local.loc.grad * scale).abs().max() < 1e-4
    assert gp.local.log_scale.grad.abs().max() < 1e-4
    assert gp.local.weights.grad.abs().max() < 1e-4
    assert set(map(id, gp.solved_parameters())) == set(map(id, gp.local.parameters()))


def test_bound_improves_on_the_mean_field_of_the_same_graph():
    class MeanField(VNNGP):
        graph_type = SymmetricGraph

    x, y = data()
    full, few, mean_field = (
        NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=N - 1),
        NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=8),
        MeanField(x, y, kernel(), Gaussian(0.1), num_neighbors=8),
    )
    for gp in (full, few, mean_field):
        gp.solve()
    assert torch.equal(few.graph.neighbors, mean_field.graph.neighbors)
    assert loss(mean_field) > loss(few) + 1 > loss(full)


def test_monte_carlo_elbos_estimate_the_integrating_one():
    x, f = data(24)
    gp = NPVI(x, f.exp().round(), kernel(), Poisson(), num_neighbors=4)
    gp.solve()
    exact = loss(gp)
    for elbo in (TraceMeanField_ELBO(), Trace_ELBO()):
        values = torch.tensor([loss(gp, elbo=elbo) for _ in range(60)])
        assert abs(values.mean() - exact) < 6 * values.std() / 60**0.5


def test_recipe_of_the_paper():
    """AdaGrad with minibatches of 50, in plain Pyro, comes near the optimum that solve() finds."""
    x, f = data(100)
    gp = NPVI(
        x,
        (1 + f).exp().round(),
        Matern32(2, lengthscale=torch.tensor(0.2)),
        Poisson("softplus"),
        num_neighbors=6,
        scale=0.1,
    )
    gp.kernel.requires_grad_(False)
    gp.mean.requires_grad_(False)
    start, optimizer = loss(gp), Adagrad({"lr": 0.2})
    svi = SVI(gp.model, gp.guide, optimizer, TraceMeanField_ELBO())
    for _ in range(100):
        svi.step(torch.randperm(100)[:50])
    found = loss(gp)
    gp.solve()
    assert found - loss(gp) < 0.25 * (start - loss(gp))


# The encoders


@pytest.mark.parametrize("make", [lambda: None, *ENCODERS])
@pytest.mark.parametrize("outputs", [1, 2])
def test_disjoint_batches_average_exactly(make, outputs):
    x, y = data()
    encoder = make()
    gp = NPVI(
        x,
        y if outputs == 1 else torch.stack([y, -2 * y], -1),
        kernel(),
        Gaussian(0.1),
        num_neighbors=5,
        encoder=encoder and shaken(encoder),
    )
    if encoder is None:
        torch.nn.init.normal_(gp.local.weights, std=0.3)
    parts = [loss(gp, idx) for idx in torch.randperm(N).split(12)]
    assert sum(parts) / len(parts) == pytest.approx(loss(gp), rel=1e-10)


def test_graph_convolution_is_that_of_the_paper():
    """Equation 13 written out for single points."""
    x, y = data()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=5, encoder=GraphConvolutionEncoder((4, 3)))
    q, encoder = gp.local.distribution(), gp.local.encoder
    for i in (int(gp.graph.order[2]), 7, 20):
        near = gp.graph.neighbors[i][gp.graph.neighbors[i] >= 0]
        nodes = torch.cat([torch.tensor([i]), near])
        adjacency = gp.kernel(x[nodes]).detach().clone()
        adjacency[0, 1:] = 0
        root = torch.diag(adjacency.sum(-1).rsqrt())
        outputs = []
        for layers in (encoder.loc, encoder.row):
            hidden = y[nodes, None]
            for number, layer in enumerate(layers):
                hidden = root @ adjacency @ root @ hidden @ layer.weight.mT
                hidden = hidden if number == 2 else hidden.relu()
            outputs.append(hidden[:, 0])
        torch.testing.assert_close(q.loc[i], outputs[0].mean())
        torch.testing.assert_close(q.scale[i], torch.nn.functional.softplus(outputs[1][0]))
        torch.testing.assert_close(q.weights[i, : len(near)], outputs[1][1:])


@pytest.mark.parametrize("num_neighbors", [4, N - 1])
def test_right_sites_on_all_points_give_the_exact_posterior(num_neighbors):
    """With y and its noise for sites and every point among the nodes: the mean, and rows of the factor, at any K."""
    x, y = data()
    encoder = SiteEncoder(2, num_context=N - 1)
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=num_neighbors, encoder=encoder, mean=ConstantMean(0.0))
    variance, noise = gp.kernel.variance.detach(), gp.likelihood.variance.detach()
    encoder.head.bias.data[1] = 8 * ((variance / noise).log() / 8).atanh()
    q, cov = gp.local.distribution(), dense_covariance(gp.kernel, x).detach()
    tril = torch.linalg.cholesky(cov + noise * torch.eye(N, dtype=F64))
    half = torch.linalg.solve_triangular(tril, cov, upper=False)
    want, root = cov - half.mT @ half, dense(gp)
    torch.testing.assert_close(q.loc, cov @ torch.cholesky_solve(y[:, None], tril)[:, 0], rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(q.variance.detach(), want.diagonal(), rtol=1e-7, atol=0)
    for i in range(N):
        near = gp.graph.neighbors[i][gp.graph.neighbors[i] >= 0]
        near = near[torch.argsort(torch.argsort(gp.graph.order)[near])]
        nodes = torch.cat([near, torch.tensor([i])])
        row = torch.linalg.cholesky(want[nodes][:, nodes])[-1]
        torch.testing.assert_close(root[i, nodes], row, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("num_neighbors", [4, N - 1])
def test_conditional_encoder_starts_at_the_exact_mean_for_gaussian_noise(num_neighbors):
    """With every point among the nodes; and the deviation is that given the parents and the own observation."""
    x, y = data()
    encoder = ConditionalEncoder(num_context=N - 1)
    mean = torch.nn.Linear(2, 1).double()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=num_neighbors, encoder=encoder, mean=mean)
    noise, q = gp.likelihood.variance.detach(), gp.local.distribution()
    cov = dense_covariance(gp.kernel, x).detach()
    tril = torch.linalg.cholesky(cov + noise * torch.eye(N, dtype=F64))
    want = cov @ torch.cholesky_solve(y[:, None] - mean(x).detach(), tril)[:, 0]
    torch.testing.assert_close(q.loc, want, rtol=1e-7, atol=1e-8)
    _, var = NNGP(gp.kernel, gp.graph).conditionals
    torch.testing.assert_close(q.scale, (1 / var + 1 / noise).rsqrt())
    assert not q.weights.any()


def test_rows_of_the_conditional_encoder_follow_the_weights_of_the_prior():
    x, y = data()
    encoder = ConditionalEncoder(num_context=6)
    encoder.network[-1].bias.data[2] = 8 * torch.tensor(0.5 / 8, dtype=F64).atanh()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=5, encoder=encoder)
    q, (w, var) = gp.local.distribution(), NNGP(gp.kernel, gp.graph).conditionals
    base = (1 / var + 10).rsqrt()
    torch.testing.assert_close(q.scale, base * torch.tensor(0.5, dtype=F64).exp())
    torch.testing.assert_close(q.weights, 0.5 * w * (q.scale / (1 + 10 * var))[:, None])


@pytest.mark.parametrize("make", ENCODERS)
def test_order_of_neighbors_does_not_matter(make):
    x, y = data()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=6, encoder=shaken(make()))
    before, loc = dense(gp), gp.local.distribution().loc
    gp.graph.neighbors.copy_(gp.graph.neighbors[:, torch.randperm(6)])
    torch.testing.assert_close(dense(gp), before, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gp.local.distribution().loc, loc, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", ENCODERS)
def test_neither_row_order_nor_translation_matters(make):
    x, y = data()
    encoder, shuffle, order = shaken(make()), torch.randperm(N), torch.randperm(N)
    settings = {"kernel": kernel(), "likelihood": Gaussian(0.1), "num_neighbors": 6}
    one = NPVI(x, y, ordering=order, encoder=encoder, **settings)
    two = NPVI(
        x[shuffle] + 3, y[shuffle], ordering=torch.argsort(shuffle)[order], encoder=copy.deepcopy(encoder), **settings
    )
    torch.testing.assert_close(dense(two), dense(one)[shuffle][:, shuffle], rtol=1e-6, atol=1e-9)
    assert loss(two) == pytest.approx(loss(one), rel=1e-6)


@pytest.mark.parametrize("make", ENCODERS)
def test_some_rows_in_chunks_are_those_of_all(make):
    x, y = data()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=6, encoder=shaken(make()))
    whole, rows = gp.local.distribution(), torch.tensor([4, 9, 17, 30, 31])
    with block_limit(2 * 13**2):
        part = gp.local.distribution(rows)
    for got, want in ((part.loc, whole.loc), (part.scale, whole.scale), (part.weights, whole.weights)):
        torch.testing.assert_close(got, want[rows])
    assert torch.equal(part.pattern, whole.pattern[rows])


@pytest.mark.parametrize("make", ENCODERS)
def test_predictions_use_the_covariance_between_neighbors(make):
    x, y = data()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=N - 1, encoder=shaken(make()), mean=ConstantMean(0.0))
    new, _ = data(5)
    loc, var = gp(new, num_neighbors=N)
    q, root, cov = gp.local.distribution(), dense(gp), dense_covariance(gp.kernel, x).detach()
    cross = gp.kernel(x, new).detach()
    weights = torch.cholesky_solve(cross, torch.linalg.cholesky(cov))
    own = gp.kernel(new, diag=True).detach() * (1 + 1e-6)
    want = own - (weights * cross).sum(0) + (weights.mT @ root).square().sum(-1)
    torch.testing.assert_close(loc.detach(), q.loc.detach() @ weights, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(var.detach(), want, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("make", ENCODERS)
def test_gradients_flow_through_the_kernel_values_that_the_guide_reads(make):
    x, y = data()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=5, encoder=shaken(make(), 0.1))
    IntegratedELBO().differentiable_loss(gp.model, gp.guide).backward()
    (parameter,) = [p for name, p in gp.kernel.named_parameters() if "lengthscale" in name]
    values = []
    for step in (1e-5, -1e-5):
        parameter.data[0] += step
        values.append(loss(gp))
        parameter.data[0] -= step
    assert float(parameter.grad[0]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4)


@pytest.mark.parametrize("make", ENCODERS)
def test_training_amortizing_and_what_is_shared(make):
    x, y = data(200)
    k = Matern32(2, lengthscale=torch.tensor(0.1, dtype=F64))
    k.requires_grad_(False)
    gp = NPVI(x, y, k, Gaussian(0.05), num_neighbors=6, encoder=make())
    before = loss(gp)
    assert not gp.can_solve
    fit(gp, 30, batch_size=50, lr=0.03, refresh_every=20, progress=False)
    assert loss(gp) < before

    other_x, other_y = data(90)
    other = gp.amortize(other_x, other_y)
    untrained = NPVI(other_x, other_y, copy.deepcopy(k), Gaussian(0.05), num_neighbors=6, encoder=make())
    assert loss(other) < loss(untrained)
    sizes = [sum(p.numel() for p in model.local.parameters()) for model in (gp, other)]
    assert sizes[0] == sizes[1] < 2 * 1000

    kept = loss(gp)
    svi = SVI(other.model, other.guide, Adam({"lr": 0.1}), IntegratedELBO())
    svi.step()
    assert loss(gp) == kept


@pytest.mark.parametrize(("make", "left"), [(lambda: SiteEncoder(2), 0.15), (ConditionalEncoder, 0.25)])
def test_a_trained_encoder_is_near_the_optimum(make, left):
    x, y = data(200)
    k = Matern32(2, variance=torch.tensor(0.5), lengthscale=torch.tensor(0.05)).requires_grad_(False)
    likelihood = Gaussian(0.05).requires_grad_(False)
    start, best = (NPVI(x, y, k, likelihood, num_neighbors=8, encoder=e) for e in (make(), None))
    begun = loss(start)
    best.solve()
    fit(start, 40, batch_size=50, lr=0.05, progress=False)
    assert loss(start) - loss(best) < left * (begun - loss(best))


def test_hyperparameters_with_priors_reach_encoder_and_amortized_model():
    x, y = data()
    k = kernel()
    k.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    metric = torch.ones(2, dtype=F64)  # one graph, whatever the lengthscale
    gp = NPVI(x, y, k, Gaussian(0.1), num_neighbors=5, encoder=shaken(SiteEncoder(2)), metric=metric)
    svi = SVI(gp.model, gp.guide, Adam({"lr": 0.05}), IntegratedELBO())
    for _ in range(5):
        svi.step()
    trace = pyro.poutine.trace(gp.guide).get_trace()
    drawn, value = trace.nodes["kernel.lengthscale"]["value"].detach(), trace.nodes["u"]["fn"].mean.detach()
    fixed = copy.deepcopy(gp.kernel)
    fixed.lengthscale = drawn
    same = NPVI(
        x,
        y,
        fixed,
        Gaussian(0.1),
        num_neighbors=5,
        encoder=copy.deepcopy(gp.local.encoder),
        mean=copy.deepcopy(gp.mean),
        metric=metric,
    )
    torch.testing.assert_close(same.local.distribution().loc.detach(), value)
    other = gp.amortize(x, y)
    torch.testing.assert_close(other(x[:4]), gp(x[:4]))


@pytest.mark.parametrize("make", ENCODERS)
def test_saving_copying_and_pickling_keep_predictions(make):
    x, y = data()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=5, encoder=shaken(make()))
    gp.refresh_neighbors()
    fresh = NPVI(x, y, kernel(), Gaussian(), num_neighbors=5, encoder=make(), seed=3)
    fresh.load_state_dict(gp.state_dict())
    for other in (fresh, copy.deepcopy(gp), pickle.loads(pickle.dumps(gp))):
        torch.testing.assert_close(other(x[:5]), gp(x[:5]), rtol=0, atol=0)
        other.kernel.lengthscale = torch.tensor([0.1, 0.1], dtype=F64)
        assert not torch.equal(other.local.distribution().loc, gp.local.distribution().loc)  # it reads its own kernel


@pytest.mark.parametrize("columns", [0, 3])
def test_vnngp_with_an_encoder(columns):
    x, y = data()
    encoder = shaken(SiteEncoder(2))
    gp = VNNGP(x, y, kernel(), Gaussian(0.1), num_neighbors=6, guide_neighbors=columns, encoder=encoder)
    assert gp.local.distribution().weights.shape == (N, columns)
    parts = [loss(gp, idx) for idx in torch.randperm(N).split(16)]
    assert sum(parts) / len(parts) == pytest.approx(loss(gp), rel=1e-10)
    values = torch.tensor([loss(gp, elbo=TraceMeanField_ELBO()) for _ in range(30)])
    assert abs(values.mean() - loss(gp)) < 6 * values.std() / 30**0.5


@pytest.mark.parametrize(
    ("likelihood", "y", "f"),
    [
        (Gaussian(), [-1.5], [-1.5]),
        (LogNormal(), [math.exp(0.7)], [0.7]),
        (Poisson(), [0, 7], [math.log(0.5), math.log(7.5)]),
        (Poisson("softplus"), [0, 50], [math.log(math.expm1(0.5)), 50.5]),
        (NegativeBinomial(), [3], [math.log(3.5)]),
        (Bernoulli(), [0, 1], [-1, 1]),
        (Binomial(4), [0, 4], [math.log(0.1 / 0.9), math.log(0.9 / 0.1)]),
        (Categorical(3), [2], [[-1], [-1], [1]]),
    ],
)
@pytest.mark.parametrize("dtype", [F64, torch.int64])
def test_rough_latent_values(likelihood, y, f, dtype):
    if dtype is F64 or all(float(v).is_integer() for v in y):
        got = rough_latent(likelihood, torch.tensor(y, dtype=dtype))
        torch.testing.assert_close(got.double(), torch.tensor(f, dtype=F64), rtol=1e-6, atol=1e-6)


def test_several_latent_functions_are_encoded_side_by_side():
    x, f = data()
    y = torch.bucketize(f, torch.tensor([-0.4, 0.4], dtype=F64))
    gp = NPVI(x, y, kernel(), Categorical(3), num_neighbors=5, encoder=shaken(SiteEncoder(2)))
    assert len(set(gp.mean.value.tolist())) > 1
    encoder, mean = copy.deepcopy(gp.local.encoder), ConstantMean(gp.mean.value[1].item())
    single = NPVI(x, (y == 1).double(), kernel(), Bernoulli(), num_neighbors=5, encoder=encoder, mean=mean)
    both, one = gp.local.distribution(), single.local.distribution()
    assert both.batch_shape == (3,)
    torch.testing.assert_close(both.loc[1], one.loc)
    torch.testing.assert_close(both.weights[1], one.weights)
    assert observed(gp.likelihood, y).shape == (3, N)
    assert gp.predict(x[:3]).log_prob(y[:3]).shape == (3,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, y: NPVI(x, None, kernel(), encoder=SiteEncoder(2), num_neighbors=5),
            r"expected encoder with a likeli",
        ),
        (
            lambda x, y: VNNGP(x, y, kernel(), Gaussian(), inducing=9, num_neighbors=5, encoder=SiteEncoder(2)),
            r"expected encoder with a likelihood, inducing points at the data and no `loc`",
        ),
        (
            lambda x, y: NPVI(x, y, kernel(), Gaussian(), num_neighbors=5).amortize(x, y),
            r"expected encoder in the model",
        ),
        (
            lambda x, y: NPVI(x, y, kernel(), Gaussian(), num_neighbors=5, encoder=SiteEncoder(2)).solve(),
            r"got an encoder",
        ),
        (
            lambda x, y: NPVI(x, y, kernel(), HeteroskedasticGaussian(), num_neighbors=5, encoder=SiteEncoder(2)),
            r"expected likelihood with one latent function per output",
        ),
        (
            lambda x, y: NPVI(
                x,
                y,
                kernel(),
                Gaussian(),
                num_neighbors=5,
                encoder=SiteEncoder(2, response=lambda likelihood, y: y[:, None]),
            ),
            r"expected encoder.response finite and of shape \(48,\), got \(48, 1\)",
        ),
        (
            lambda x, y: NPVI(x, y, kernel(), Gaussian(), num_neighbors=5, encoder=SiteEncoder(2), loc=y),
            r"NPVI: expected encoder with a likelihood, inducing points at the data and no `loc`",
        ),
        (lambda x, y: ConditionalEncoder(num_context=-1), r"ConditionalEncoder: expected num_context >= 0, got -1"),
        (lambda x, y: SiteEncoder(0), r"expected input_dim >= 1 and num_context >= 0, got 0 and 10"),
        (lambda x, y: NPVI(x, y, kernel(), Gaussian(), num_neighbors=N), r"expected num_neighbors"),
        (lambda x, y: NPVI(x, y, kernel(), Gaussian(), amortized=True), r"unexpected keyword argument 'amortized'"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(*data())


def test_an_amortized_model_has_the_nugget_that_its_encoder_was_trained_with():
    x, y = data()
    gp = NPVI(x, y, kernel(), Gaussian(0.1), num_neighbors=5, encoder=SiteEncoder(2).double(), jitter=0.02)
    other = gp.amortize(x, y)
    assert other.jitter == gp.jitter == 0.02
    torch.testing.assert_close(other.local.distribution().scale, gp.local.distribution().scale)
    torch.testing.assert_close(other(x[:5] + 0.01), gp(x[:5] + 0.01))
