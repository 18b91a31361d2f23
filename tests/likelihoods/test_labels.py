"""Likelihoods of labels, classes and ratings: relations, values by hand, tails, data off the support."""

import math
from collections.abc import Callable

import pyro
import pytest
import torch
from builders import tensor

from pyro_nngp.likelihoods import (
    Bernoulli,
    Binomial,
    Categorical,
    HeteroskedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
)

CUTS = torch.tensor([-1.0, 0.2, 1.5])


def test_two_classes_are_a_logistic_regression_on_the_difference() -> None:
    loc, var = torch.randn(2, 6, dtype=torch.float64), torch.rand(2, 6, dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    two, one = Categorical(2), Bernoulli()
    one.num_quadrature = 100
    difference = (loc[1] - loc[0], var[0] + var[1])
    torch.testing.assert_close(
        two.expected_log_prob(y, loc, var), one.expected_log_prob(y, *difference), rtol=0.0, atol=1e-4
    )
    torch.testing.assert_close(two.marginal(loc, var).probs[:, 1], one.marginal(*difference).probs, rtol=0.0, atol=1e-4)
    assert two(loc).log_prob(y).shape == (6,)


def test_ordinal_probabilities_by_hand() -> None:
    f, cuts = tensor(-0.7, 2.0), CUTS.double()
    for link, cdf in (("logit", torch.sigmoid), ("probit", torch.special.ndtr)):
        below = cdf(cuts - f[:, None])
        want = torch.cat([below, torch.ones(2, 1)], 1) - torch.cat([torch.zeros(2, 1), below], 1)
        torch.testing.assert_close(Ordinal(cuts, link)(f).probs, want, rtol=1e-9, atol=1e-12)


def test_quadrature_of_ratings_looks_at_the_middle_of_their_interval() -> None:
    center, _ = Ordinal(CUTS).focus(torch.arange(4))
    torch.testing.assert_close(center, torch.tensor([-1.0, -0.4, 0.85, 1.5]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_labels_of_any_type(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 1, 1]).to(dtype)
    loc, var = torch.randn(3), torch.rand(3)
    likelihood = Bernoulli()
    likelihood.check(labels)
    for value in (
        likelihood(loc).log_prob(labels),
        likelihood.expected_log_prob(labels, loc, var),
        likelihood.marginal(loc, var).log_prob(labels),
    ):
        assert value.dtype == torch.float32
    with pyro.plate("data", 3):
        pyro.sample("y", likelihood(loc), obs=labels)


@pytest.mark.parametrize(
    ("likelihood", "y", "f", "exact"),
    [
        (Bernoulli(), 1.0, -50.0, -50.0),
        (Bernoulli("probit"), 1.0, -50.0, -1254.8313611394),
        (Bernoulli("probit"), 0.0, 50.0, -1254.8313611394),
        (Ordinal(torch.tensor([-1.0, 1.0])), 1.0, -50.0, -49 + math.log1p(-math.exp(-2))),
        (Ordinal(torch.tensor([-1.0, 1.0]), "probit"), 1.0, 50.0, -1205.3111748916656),
    ],
)
def test_tail_values(likelihood: Likelihood, y: float, f: float, exact: float) -> None:
    for dtype, rel in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        assert likelihood(torch.tensor(f, dtype=dtype)).log_prob(torch.tensor(y)).item() == pytest.approx(
            exact, rel=rel
        )


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Binomial(2.5), r"Binomial: expected total_count to be an int, got 2.5. Pass the number of trials"),
        (lambda: Categorical(2.5), r"Categorical: expected num_classes to be an int, got 2.5. Give the number"),
        (lambda: Categorical(), r"Categorical: expected num_classes to be an int, got None. .* by Categorical\(5\)"),
        (
            lambda: HeteroskedasticGaussian(num_quadrature=9.0),
            r"HeteroskedasticGaussian: expected num_quadrature to be an int, got 9.0",
        ),
    ],
)
def test_counts_are_integers(make: Callable[[], Likelihood], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        make()


def test_integer_data_pass() -> None:
    for likelihood in (Bernoulli(), Binomial(2), Poisson(), NegativeBinomial(), Categorical(2), Ordinal(CUTS)):
        likelihood.check(torch.tensor([[0, 1], [1, 0]]))


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_ratings_have_a_mean_and_a_variance(link):
    ordinal = Ordinal(tensor(-1.0, 0.5, 2.0), link)
    loc, var = tensor(0.3, -2.0, 4.0), tensor(0.4, 1.0, 0.1)
    for ratings in (ordinal(loc), ordinal.marginal(loc, var)):
        values = torch.arange(4.0, dtype=torch.float64)
        mean = ratings.probs @ values
        torch.testing.assert_close(ratings.mean, mean)
        torch.testing.assert_close(ratings.variance, ratings.probs @ values.square() - mean.square())
