import pyro.distributions as dist
import pytest
import torch
from builders import matern, q_of, waves
from oracles.dense import dense_covariance, dense_precision
from oracles.waves import N, factor, loss, shaken
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import Adagrad

from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import (
    Gaussian,
    HeteroskedasticGaussian,
    Poisson,
)
from pyro_nngp.means import ConstantMean
from pyro_nngp.models import NPVI, VNNGP
from pyro_nngp.variational import Amortized, MeanField, SparseCholesky
from pyro_nngp.variational.encoders import (
    ConditionalEncoder,
    SiteEncoder,
)

F64 = torch.float64


def test_full_pattern_and_gaussian_noise_give_the_exact_posterior():
    x, y = waves()
    gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=N - 1, mean=ConstantMean(0.0))
    gp.solve()
    cov = dense_covariance(gp.kernel, x).detach()
    tril = torch.linalg.cholesky(cov + gp.likelihood.variance.detach() * torch.eye(N, dtype=F64))
    half = torch.linalg.solve_triangular(tril, cov, upper=False)
    want_mean, want = half.mT @ torch.linalg.solve_triangular(tril, y[:, None], upper=False)[:, 0], cov - half.mT @ half
    root = factor(gp)
    torch.testing.assert_close(q_of(gp).loc.detach(), want_mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(root @ root.mT, want, rtol=1e-7, atol=1e-10)
    evidence = dist.MultivariateNormal(torch.zeros(N, dtype=F64), scale_tril=tril).log_prob(y)
    assert loss(gp) == pytest.approx(-float(evidence), rel=1e-9)


def test_theorem_of_the_paper_covariances_on_edges_can_be_matched():
    """Rows set one after the other so that Cov(u_i, u_j) under q is the posterior's for every edge (i, j), i = j too.

    The lengthscale is short: with 0.3, what is left for the diagonal of some row is negative.
    """
    x, y = waves()
    k = Matern32(2, lengthscale=torch.tensor(0.1))
    gp = NPVI(x, y, k, Gaussian(0.3), num_neighbors=5)
    sites = torch.eye(N, dtype=F64) / gp.likelihood.variance.detach()
    posterior = torch.cholesky_inverse(torch.linalg.cholesky(dense_precision(k, gp.graph).detach() + sites))
    root, q = torch.zeros(N, N, dtype=F64), q_of(gp)
    for i in gp.graph.order.tolist():
        near = gp.graph.neighbors[i][gp.graph.neighbors[i] >= 0]
        near = near[torch.argsort(torch.argsort(gp.graph.order)[near])]  # so that the block is a lower triangle
        block = root[near][:, near]
        torch.testing.assert_close(block, block.tril())
        row = torch.linalg.solve_triangular(block, posterior[near, i, None], upper=False)[:, 0]
        root[i, near], root[i, i] = row, (posterior[i, i] - row.square().sum()).sqrt()
    weights = torch.where(q.pattern >= 0, root.gather(1, q.pattern.clamp(min=0)), 0.0)
    gp.q.assign(type(q)(q.loc, root.diagonal(), weights, q.pattern))
    q = q_of(gp)
    torch.testing.assert_close(q.variance.detach(), posterior.diagonal(), rtol=1e-9, atol=0)
    for i, row in enumerate(gp.graph.neighbors):
        for j in row[row >= 0].tolist():
            both = q.combined_rows(torch.ones(1, 2, dtype=F64), torch.tensor([[i, j]]))
            covariance = (both - q.variance[i] - q.variance[j]) / 2
            torch.testing.assert_close(covariance.detach()[0], posterior[i, j], rtol=1e-8, atol=1e-12)


def test_an_encoder_gives_as_many_columns_as_asked_for():
    x, y = waves()
    for asked, columns in ((None, 6), (3, 3)):
        gp = NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=6, guide=Amortized(SiteEncoder(x.shape[1]), asked))
        assert q_of(gp).weights.shape[-1] == columns


def test_bound_improves_on_the_mean_field_of_the_same_graph():
    x, y = waves()
    full, few, mean_field = (
        NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=N - 1),
        NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=8),
        NPVI(x, y, matern(), Gaussian(0.1), num_neighbors=8, guide=MeanField()),
    )
    for gp in (full, few, mean_field):
        gp.solve()
    assert torch.equal(few.graph.neighbors, mean_field.graph.neighbors)
    assert loss(mean_field) > loss(few) + 1 > loss(full)


@pytest.mark.slow
def test_monte_carlo_elbos_estimate_the_integrating_one():
    x, f = waves(24)
    gp = NPVI(x, f.exp().round(), matern(), Poisson(), num_neighbors=4)
    gp.solve()
    exact = loss(gp)
    for elbo in (TraceMeanField_ELBO(), Trace_ELBO()):
        values = torch.tensor([loss(gp, elbo=elbo) for _ in range(60)])
        assert abs(values.mean() - exact) < 6 * values.std() / 60**0.5


@pytest.mark.slow
def test_recipe_of_the_paper():
    """AdaGrad with minibatches of 50, in plain Pyro, comes near the optimum that solve() finds."""
    x, f = waves(100)
    gp = NPVI(
        x,
        (1 + f).exp().round(),
        Matern32(2, lengthscale=torch.tensor(0.2)),
        Poisson("softplus"),
        num_neighbors=6,
        guide=SparseCholesky(scale=0.1),
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


@pytest.mark.parametrize("columns", [0, 3])
def test_vnngp_with_an_encoder(columns):
    x, y = waves()
    encoder = shaken(SiteEncoder(2))
    gp = VNNGP(x, y, matern(), Gaussian(0.1), num_neighbors=6, guide=Amortized(encoder, columns))
    assert q_of(gp).weights.shape == (N, columns)
    parts = [loss(gp, idx) for idx in torch.randperm(N).split(16)]
    assert sum(parts) / len(parts) == pytest.approx(loss(gp), rel=1e-10)
    values = torch.tensor([loss(gp, elbo=TraceMeanField_ELBO()) for _ in range(30)])
    assert abs(values.mean() - loss(gp)) < 6 * values.std() / 30**0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, y: NPVI(x, None, matern(), guide=Amortized(SiteEncoder(2)), num_neighbors=5),
            r"expected guide=Amortized\(...\) with a likelihood",
        ),
        (
            lambda x, y: VNNGP(
                x, y, matern(), Gaussian(), inducing=9, num_neighbors=5, guide=Amortized(SiteEncoder(2))
            ),
            r"expected guide=Amortized\(...\) with a likelihood and inducing points at the data",
        ),
        (
            lambda x, y: NPVI(x, y, matern(), Gaussian(), num_neighbors=5).amortize(x, y),
            r"expected encoder in the model",
        ),
        (
            lambda x, y: NPVI(x, y, matern(), Gaussian(), num_neighbors=5, guide=Amortized(SiteEncoder(2))).amortize(
                x * torch.nan, y
            ),
            r"NPVI\.amortize: expected x to be finite",
        ),
        (
            lambda x, y: NPVI(x, y, matern(), Gaussian(), num_neighbors=5, guide=Amortized(SiteEncoder(2))).solve(),
            r"got an encoder",
        ),
        (
            lambda x, y: NPVI(
                x, y, matern(), HeteroskedasticGaussian(), num_neighbors=5, guide=Amortized(SiteEncoder(2))
            ),
            r"expected likelihood with one latent function per output",
        ),
        (
            lambda x, y: NPVI(
                x,
                y,
                matern(),
                Gaussian(),
                num_neighbors=5,
                guide=Amortized(SiteEncoder(2, response=lambda likelihood, y: y[:, None])),
            ),
            r"expected encoder.response finite and of shape \(48,\), got \(48, 1\)",
        ),
        (lambda x, y: ConditionalEncoder(num_context=-1), r"ConditionalEncoder: expected num_context >= 0, got -1"),
        (lambda x, y: SiteEncoder(0), r"expected input_dim >= 1 and num_context >= 0, got 0 and 10"),
        (lambda x, y: NPVI(x, y, matern(), Gaussian(), num_neighbors=N), r"expected num_neighbors"),
        (lambda x, y: NPVI(x, y, matern(), Gaussian(), amortized=True), r"NPVI: expected keyword .*, got 'amortized'"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(*waves())
