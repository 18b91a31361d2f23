"""The Polya-Gamma bound is the augmented bound at its best."""

import math

import pytest
import torch
from builders import labels
from torch.distributions import kl_divergence

from pyro_nngp.distributions.polya_gamma import PolyaGamma
from pyro_nngp.likelihoods import (
    Bernoulli,
    Binomial,
    NegativeBinomial,
    PolyaGammaBound,
)

F64 = torch.float64


@pytest.mark.parametrize(
    ("likelihood", "make", "trials", "even"),
    [
        (Bernoulli(), labels, lambda y: torch.ones_like(y), 0.0),
        (Binomial(5), lambda f: (2 + 2 * f).round().clamp(0, 5), lambda y: torch.full_like(y, 5.0), 0.0),
        (NegativeBinomial(2.5), lambda f: f.exp().round(), lambda y: y + 2.5, math.log(2.5)),
    ],
)
def test_polya_gamma_bound_is_the_augmented_one_at_its_best(likelihood, make, trials, even):
    """E log p(y | f, omega) minus the divergence of omega, at several tilts; the bound is the largest of them."""
    loc, var = torch.randn(20, dtype=F64), torch.rand(20, dtype=F64) + 0.1
    y = make(loc)
    b = trials(y)
    found = PolyaGammaBound(likelihood).expected_log_prob(y, loc, var).detach()
    constant = likelihood(torch.full_like(loc, even)).log_prob(y).detach()
    exact = likelihood.expected_log_prob(y, loc, var).detach()
    loc, values = loc - even, []  # of the logit
    for factor_of_c in (1.0, 0.8, 1.25):
        q = PolyaGamma(b, factor_of_c * (loc.square() + var).sqrt())
        quadratic = (y - b / 2) * loc - q.mean * (loc.square() + var) / 2
        values.append(constant + quadratic - kl_divergence(q, PolyaGamma(b, 0.0)))
    torch.testing.assert_close(found, values[0], rtol=1e-9, atol=1e-9)
    assert (found > torch.stack(values[1:]).amax(0)).all()
    assert (found < exact).all()
    assert (found > exact - 0.3 * b).all()


def test_trials_of_the_rows_limit_the_successes():
    likelihood, trials = PolyaGammaBound(Binomial()).bind(), torch.tensor([3.0, 7.0])
    likelihood.for_rows(trials=trials).check(torch.tensor([3.0, 5.0]))
    with pytest.raises(ValueError, match="expected y to be"):
        likelihood.for_rows(trials=trials).check(torch.tensor([5.0, 5.0]))
