"""Multinomial counts as binomial splits: density, shares, tails, recovery, malformed counts."""

import math

import pyro.distributions as dist
import pytest
import torch
from builders import tensor

from pyro_nngp import VNNGP
from pyro_nngp.kernels import Matern32
from pyro_nngp.likelihoods import Bernoulli, Binomial, binomial_splits, log_shares

F64 = torch.float64


def drawn(logits, trials):
    """Counts (N, C) of shares from logits (C - 1, N)."""
    shares = log_shares(logits).exp().mT
    return torch.stack(
        [dist.Multinomial(max(int(n), 1), p).sample() * (n > 0) for n, p in zip(trials, shares, strict=True)]
    )


def test_the_density_is_that_of_the_multinomial_distribution():
    f, trials = torch.randn(3, 40, dtype=F64), torch.randint(0, 9, (40,))
    counts = drawn(f, trials)
    want = [
        dist.Multinomial(int(n), logits=p).log_prob(y) for n, p, y in zip(trials, log_shares(f).mT, counts, strict=True)
    ]
    found = torch.zeros(40, dtype=F64)
    for logits, (rows, y, n) in zip(f, binomial_splits(counts), strict=True):
        assert (n > 0).all()
        found[rows] += Binomial().for_rows(trials=n)(logits[rows]).log_prob(y)
    torch.testing.assert_close(found, torch.stack(want))


def test_shares_sum_to_one_and_are_finite_in_the_tails():
    logits = torch.tensor([[300.0, -300.0, 0.0], [-1e4, 40.0, 88.0], [3.0, -3.0, -1e5]])
    found = log_shares(logits)
    assert found.isfinite().all()
    torch.testing.assert_close(found.logsumexp(0), torch.zeros(3))
    torch.testing.assert_close(found[0], torch.tensor([0.0, -300.0, -math.log(2)]))


def test_expected_shares_of_independent_splits():
    """Beside the mean over draws of f, to six standard errors."""
    loc, var = tensor(0.5, -1.0, 2.0), tensor(1.5, 0.3, 4.0)
    logits = torch.stack([Bernoulli().marginal(m, v).logits for m, v in zip(loc, var, strict=True)])
    draws = log_shares(loc[:, None] + var.sqrt()[:, None] * torch.randn(3, 40_000, dtype=F64)).exp()
    error = (log_shares(logits).exp() - draws.mean(1)).abs()
    assert (error < 6 * draws.std(1) / 200).all()


def test_shares_of_simulated_counts_are_recovered():
    x = torch.rand(300, 1)
    f = torch.stack([torch.sin(6 * x[:, 0]), 1 - 2 * x[:, 0]])
    counts = drawn(f, torch.randint(0, 12, (300,)))
    line = torch.linspace(0.02, 0.98, 30)[:, None]
    logits = []
    for rows, y, n in binomial_splits(counts):
        kernel = Matern32(1, variance=torch.tensor(1.0), lengthscale=torch.tensor([0.4]))
        gp = VNNGP(x[rows], y, kernel, Binomial(), num_neighbors=8, trials=n)
        gp.solve()
        logits.append(Bernoulli().marginal(*gp(line)).logits)
    found = log_shares(torch.stack(logits)).exp().detach()
    want = log_shares(torch.stack([torch.sin(6 * line[:, 0]), 1 - 2 * line[:, 0]])).exp()
    assert (found - want).abs().mean() < 0.04
    assert (found - want).abs().max() < 0.15


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (torch.ones(3), r"expected counts of shape \(N, C\) with C >= 2, got \(3,\)"),
        (torch.ones(3, 1), "expected counts of shape"),
        (torch.tensor([[0.5, 1.0]]), r"expected counts to be 0, 1, 2, \.\., got 1 others such as 0.5"),
        (torch.tensor([[-1, 1]]), "got 1 others such as -1"),
        (torch.tensor([[float("nan"), 1.0]]), "got 1 others such as nan"),
        (torch.tensor([[2, 0, 0], [1, 0, 0]]), "expected counts in column 1 or later ones, got zeros only"),
    ],
)
def test_other_numbers_are_errors(counts, message):
    with pytest.raises(ValueError, match=message):
        binomial_splits(counts)


def test_other_objects_are_errors():
    with pytest.raises(TypeError, match="expected counts"):
        binomial_splits([[1, 2]])
