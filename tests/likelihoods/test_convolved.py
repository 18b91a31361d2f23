"""Likelihoods convolved with normal noise against numerical integrals."""

import pyro.distributions as dist
import pytest
import torch

from pyro_nngp.likelihoods import Bernoulli, Gaussian, LogNormal, StudentT
from pyro_nngp.likelihoods.convolved import Convolved, convolved

F64 = torch.float64


@pytest.mark.parametrize(
    ("likelihood", "y"), [(Gaussian(0.2), 0.4), (LogNormal(0.2), 0.4), (StudentT(4.0, 0.3), 0.4), (Bernoulli(), 1.0)]
)
def test_convolved_likelihood_is_the_integral(likelihood, y):
    y, g = torch.tensor([y], dtype=F64), torch.linspace(-1, 1, 5, dtype=F64)
    f = torch.linspace(-12, 12, 4_001, dtype=F64)[:, None]

    def integral(loc, var, values):
        return torch.trapezoid(dist.Normal(loc, var.sqrt()).log_prob(f).exp() * values, f, dim=0)

    v, spread = torch.full_like(g, 0.7), torch.full_like(g, 0.3)
    both = convolved(likelihood.bind(), v)
    want = torch.stack([integral(a, v[:1], likelihood(f).log_prob(y).exp()) for a in g])[:, 0].log()
    torch.testing.assert_close(both(g).log_prob(y).detach(), want.detach(), rtol=1e-6, atol=1e-7)
    log_density = convolved(likelihood.bind(), v[:1])(f).log_prob(y).detach()
    want = torch.stack([integral(a, spread[:1], log_density) for a in g])[:, 0]
    tolerance = 1e-9 if isinstance(likelihood, Gaussian | LogNormal) else 1e-4
    torch.testing.assert_close(both.expected_log_prob(y, g, spread).detach(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        both.marginal(g, spread).log_prob(y), likelihood.marginal(g, v + spread).log_prob(y), rtol=1e-9, atol=0
    )


def test_closed_forms_of_the_convolution_agree_with_quadrature():
    likelihood, g = Gaussian(0.2).bind(), torch.linspace(-1, 1, 5, dtype=F64)
    closed, numeric = convolved(likelihood, g.square()), Convolved(likelihood, g.square())
    one, two = (which.expected_log_prob(g, g + 0.1, g.square() + 0.1) for which in (closed, numeric))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
