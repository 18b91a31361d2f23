"""Guides of auxiliary variables against Bayes' rule, which needs nothing of the code under test."""

import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO

from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Binomial, NegativeBinomial, StudentT
from pyro_nngp.models import LOO
from pyro_nngp.variational.auxiliary import Conjugate, LocalConjugate, LogNormal

F64 = torch.float64


@pytest.mark.parametrize("df", [1.0, 4.0])
def test_conjugate_guide_of_student_t_data_is_their_posterior(df):
    """With f known, q(omega) is proportional to p(y | f, omega) p(omega)."""
    residual, scale, omega = 0.7, 0.5, torch.linspace(0.05, 5.0, 50, dtype=F64)
    guide = LocalConjugate(dist.Gamma(torch.ones(1, dtype=F64), 1.0))
    guide.log_square.data.fill_(2 * torch.tensor(residual / scale, dtype=F64).log())
    y = torch.tensor([residual], dtype=F64)
    q = guide.distribution(StudentT(df, scale).double().bind(), y, torch.tensor([0]))
    joint = dist.Gamma(df / 2, df / 2).log_prob(omega) + dist.Normal(0.0, scale / omega.sqrt()).log_prob(y)
    constant = q.log_prob(omega) - joint
    torch.testing.assert_close(constant, constant[:1].expand(50), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("likelihood", "mean", "variance"),
    [(Bernoulli(), 1 / 4, 1 / 24), (Binomial(5), 5 / 4, 5 / 24), (StudentT(4.0, 0.5), 1.0, 1 / 2)],  # PG(b, 0), Gamma
)
def test_log_normal_variables_start_at_the_moments_of_their_prior(likelihood, mean, variance):
    y, likelihood = torch.tensor([1.0, 0.0, 1.0], dtype=F64), likelihood.double().bind()
    q = LogNormal().build(likelihood, y, F64).distribution(likelihood, y, torch.arange(3))
    torch.testing.assert_close(q.mean, torch.full_like(y, mean))
    torch.testing.assert_close(q.variance, torch.full_like(y, variance))


@pytest.mark.parametrize(
    ("likelihood", "y", "default", "other"),
    [
        (lambda: StudentT(4.0, 0.5), torch.randn(30, dtype=F64), "posterior", "prior"),
        (lambda: NegativeBinomial(2.0), torch.arange(30, dtype=F64) % 4, "posterior", "prior"),
        (Bernoulli, torch.arange(30, dtype=F64) % 2, "prior", "posterior"),
    ],
    ids=["StudentT", "NegativeBinomial", "Bernoulli"],
)
def test_the_default_divergence_is_the_documented_one(likelihood, y, default, other):
    x = torch.linspace(0, 1, 30, dtype=F64)[:, None]

    def loss(**settings):
        gp = LOO(x, y, Matern52(1).double(), likelihood(), num_neighbors=8, guide=Conjugate(), **settings)
        torch.manual_seed(0)
        return TraceMeanField_ELBO().loss(gp.model, gp.guide)

    assert loss() == loss(divergence=default)
    assert loss() != loss(divergence=other)
