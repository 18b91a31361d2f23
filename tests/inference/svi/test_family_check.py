"""The distance of q(u) from the posterior, against dense linear algebra, and the warning that it is far."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_nngp.inference import ConvergenceWarning, FitResult, fit
from pyro_nngp.inference.svi.family_check import check_family, family_gap
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import NPVI, SVGP, VNNGP
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
    gp = vnngp(0.5, posterior="mean-field", num_neighbors=59)
    if solved:
        gp.solve()
    cov = gp.kernel(X, X) + gp.jitter * 1.3 * torch.eye(60, dtype=F64)
    precision = cov.inverse() + torch.eye(60, dtype=F64) / 0.05
    exact = MultivariateNormal(precision.inverse() @ (Y - 0.1) / 0.05, precision_matrix=precision)
    q = gp.local.distribution()
    q = MultivariateNormal(q.loc.detach(), torch.diag(q.scale.detach().square()))
    assert family_gap(gp) == pytest.approx(float(kl_divergence(q, exact)) / 60, rel=1e-4)


def test_the_evidence_of_some_rows_is_their_density_given_predecessors():
    gp = vnngp(0.5, posterior="mean-field", num_neighbors=5)
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


def test_a_q_that_cannot_follow_is_reported():
    gp = vnngp(2.0, posterior="mean-field", num_neighbors=10)
    with pytest.warns(ConvergenceWarning, match=r"nats per data point below .* solve_every=1"):
        fit(gp, tolerance=1.0, progress=False)


def test_a_q_that_follows_is_not_reported(recwarn):
    gp = vnngp(0.03, posterior="mean-field", num_neighbors=10)
    gp.solve()
    check_family(gp, FitResult(torch.zeros(1), [], 0.0, True, False, "adam", 60, 0, 0), stacklevel=1)
    assert not recwarn


@pytest.mark.parametrize(
    "gp",
    [
        vnngp(0.5, num_neighbors=5),
        vnngp(0.5, y=torch.stack([Y, Y], 1), posterior="mean-field", num_neighbors=5),
        vnngp(0.5, y=(Y > 0).to(F64), likelihood=Bernoulli(), posterior="mean-field", num_neighbors=5),
        vnngp(0.5, weights=torch.ones(60, dtype=F64), posterior="mean-field", num_neighbors=5),
        vnngp(0.5, inducing=10, num_neighbors=5),
        vnngp(0.5, SVGP, inducing=10),
    ],
    ids=["sites", "outputs", "labels", "weights", "inducing points", "another method"],
)
def test_without_the_evidence_there_is_no_gap(gp):
    assert family_gap(gp) is None


def test_an_encoder_has_a_gap_too():
    gp = vnngp(0.5, NPVI, num_neighbors=5, encoder=ConditionalEncoder())
    assert family_gap(gp) > 0
