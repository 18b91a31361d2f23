"""The distance of q(u) from the posterior, against dense linear algebra, and the warning that it is far."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_nngp.inference import ConvergenceWarning, FitResult, fit
from pyro_nngp.inference.svi.family_check import check_family, family_gap
from pyro_nngp.kernels import Matern52, bind
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import NPVI, SVGP, SWSGP, VNNGP
from pyro_nngp.models.base.evidence import correlated_predecessors
from pyro_nngp.variational import Amortized, MeanField
from pyro_nngp.variational.encoders import ConditionalEncoder

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(60, 2, generator=GENERATOR, dtype=F64)
Y = torch.sin(6 * X[:, 0]) + 0.1 * torch.randn(60, generator=GENERATOR, dtype=F64)


def vnngp(lengthscale, method=VNNGP, y=Y, likelihood=None, **settings):
    kernel = Matern52(2, 1.3, lengthscale).double().requires_grad_(False)
    noise = Gaussian(0.05).requires_grad_(False) if likelihood is None else likelihood
    return method(X, y, kernel, noise, mean=lambda x: 0.1 + 0 * x[:, 0], **settings)


@pytest.mark.parametrize("solved", [False, True])
def test_the_gap_is_the_divergence_from_the_exact_posterior(solved):
    gp = vnngp(0.5, guide=MeanField(), num_neighbors=59)
    if solved:
        gp.solve()
    cov = gp.kernel(X, X) + gp.jitter * 1.3 * torch.eye(60, dtype=F64)
    precision = cov.inverse() + torch.eye(60, dtype=F64) / 0.05
    exact = MultivariateNormal(precision.inverse() @ (Y - 0.1) / 0.05, precision_matrix=precision)
    q = gp.q.distribution()
    q = MultivariateNormal(q.loc.detach(), torch.diag(q.scale.detach().square()))
    assert family_gap(gp) == pytest.approx(float(kl_divergence(q, exact)) / 60, rel=1e-4)


def test_the_evidence_of_some_rows_is_their_density_given_predecessors():
    gp = vnngp(0.5, guide=MeanField(), num_neighbors=5)
    rows, dense = torch.tensor([3, 17, 40]), 0.0
    for i in rows.tolist():
        near = gp.graph.neighbors[i][gp.graph.neighbors[i] >= 0]
        joint = torch.cat([near, torch.tensor([i])])
        cov = gp.kernel(X[joint], X[joint]) + (0.05 + gp.jitter * 1.3) * torch.eye(len(joint), dtype=F64)
        densities = [
            MultivariateNormal(torch.full((n,), 0.1, dtype=F64), cov[:n, :n]).log_prob(Y[joint[:n]]) if n else 0.0
            for n in (len(joint), len(near))
        ]
        dense += float(densities[0] - densities[1]) / 3
    assert float(gp.log_evidence(rows)) == pytest.approx(dense, rel=1e-4)


@pytest.mark.slow
def test_a_q_that_cannot_follow_is_reported():
    gp = vnngp(2.0, guide=MeanField(), num_neighbors=10)
    with pytest.warns(ConvergenceWarning, match=r"nats per data point below .* solve_every=1"):
        fit(gp, tolerance=1.0, progress=False)


def test_a_q_that_follows_is_not_reported(recwarn):
    gp = vnngp(0.03, guide=MeanField(), num_neighbors=10)
    gp.solve()
    check_family(gp, FitResult(torch.zeros(1), [], 0.0, True, None, "adam", 60, 0, 0))
    assert not recwarn


@pytest.mark.parametrize(
    "gp",
    [
        vnngp(0.5, num_neighbors=5),
        vnngp(0.5, y=torch.stack([Y, Y], 1), guide=MeanField(), num_neighbors=5),
        vnngp(0.5, y=(Y > 0).to(F64), likelihood=Bernoulli(), guide=MeanField(), num_neighbors=5),
        vnngp(0.5, weights=torch.ones(60, dtype=F64), guide=MeanField(), num_neighbors=5),
        vnngp(0.5, inducing=10, num_neighbors=5),
        vnngp(0.5, SVGP, inducing=10),
        vnngp(0.5, SWSGP, y=(Y > 0).to(F64), likelihood=Bernoulli(), inducing=10, num_neighbors=5),
    ],
    ids=["sites", "outputs", "labels", "weights", "inducing points", "another method", "labels of SWSGP"],
)
def test_without_the_evidence_there_is_no_gap(gp):
    assert family_gap(gp) is None


def test_an_encoder_has_a_gap_too():
    gp = vnngp(0.5, NPVI, num_neighbors=5, guide=Amortized(ConditionalEncoder()))
    assert family_gap(gp) > 0


def test_the_evidence_of_swsgp_is_the_exact_one_where_all_predecessors_are_neighbors():
    x, y = X[:32], Y[:32]
    kernel, noise = Matern52(2, 1.3, 0.5).double(), Gaussian(0.05)
    gp = SWSGP(x, y, kernel, noise, inducing=8, num_neighbors=4, mean=lambda x: 0.1 + 0 * x[:, 0], jitter=1e-9)
    cov = kernel(x).detach() + 0.05 * torch.eye(32, dtype=F64)
    dense = MultivariateNormal(torch.full((32,), 0.1, dtype=F64), cov).log_prob(y) / 32
    assert float(gp.log_density(torch.arange(32))) == pytest.approx(float(dense), rel=1e-5)


def test_predecessors_are_the_nearest_rows_of_lower_rank():
    kernel = bind(Matern52(2, 1.0, torch.tensor([0.1, 2.0])).double().requires_grad_(False))
    rank = torch.randperm(60, generator=torch.Generator().manual_seed(5))
    rows = torch.cat([torch.tensor([7, 0, 31]), rank.argsort()[[0, 2]]])  # the first of all, and one with two before it
    scaled = X / torch.tensor([0.1, 2.0])
    for row, found in zip(rows.tolist(), correlated_predecessors(kernel, X, rows, 4, seed=5).tolist(), strict=True):
        before = [i for i in range(60) if rank[i] < rank[row]]
        want = sorted(before, key=lambda i: float((scaled[i] - scaled[row]).norm()))[:4]
        assert found == want + [-1] * (4 - len(want))


@pytest.mark.slow
def test_a_loss_above_the_evidence_is_reported():
    gp = SWSGP(X, Y, inducing=X, learn_inducing=False, num_neighbors=10)
    with pytest.warns(ConvergenceWarning, match=r"nats per data point above it .* SWSGP\(x, y, start=vecchia\)"):
        fit(gp, 100, lr=0.1, progress=False)


def test_a_loss_of_few_inducing_points_is_not_reported(recwarn):
    gp = SWSGP(X, Y, inducing=3, num_neighbors=3)
    check_family(gp, FitResult(torch.zeros(1), [], 0.0, True, None, "adam", 60, 0, 0))
    assert not recwarn
