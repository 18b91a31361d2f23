"""Rounds of the solution for Gaussian sites: what they restore, and variances that would alternate."""

import pytest
import torch
from training import Stuck

from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Poisson
from pyro_nngp.models import VNNGP
from pyro_nngp.variational import factored_posterior

F64 = torch.float64


@pytest.mark.parametrize("factored", [True, False])
def test_a_round_without_gain_leaves_means_and_sites_as_it_found_them(factored, monkeypatch):
    if not factored:
        monkeypatch.setattr(factored_posterior, "MOST_OPERATIONS", 0.0)
    x = torch.rand(30, 2, dtype=F64)
    labels, zero = (x.sum(-1) > 1).double(), lambda x: torch.zeros_like(x[:, 0])
    solved = VNNGP(x, labels, Matern52(2, 1.0, 0.5), Bernoulli(), num_neighbors=5, mean=zero)
    solved.solve()
    found = []
    for likelihood, max_steps in ((Bernoulli(), 0), (Stuck(), 40)):
        gp = VNNGP(x, labels, Matern52(2, 9.0, 0.5), likelihood, num_neighbors=5, mean=zero)
        gp.q.load_state_dict(solved.q.state_dict())
        gp.solve(max_steps)
        found.append((gp.q.loc, gp.q.precision * (gp.q.target - gp.q.loc)))  # the gradient that the sites stand for
    assert (found[0][0] - solved.q.loc).abs().max() > 0.1
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


def test_variances_that_would_alternate_settle():
    """Rates of counts hang on the variance of f, which would be too large and too small in turn."""
    x = torch.rand(200, 2, dtype=F64)
    y = torch.poisson((3 * torch.sin(6 * x[:, 0])).exp())
    gp = VNNGP(x, y, Matern52(2, 30.0, 0.05), Poisson(), num_neighbors=10)
    gp.solve()  # a solution that still moves would warn
    variance = gp.q.variance.clone()
    gp.solve()
    assert (gp.q.variance / variance).log().abs().max() < 0.2
