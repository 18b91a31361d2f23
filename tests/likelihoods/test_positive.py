"""Likelihoods of positive data: closed forms, limits, starts from data."""

import pytest
import torch
from builders import tensor

from pyro_nngp.likelihoods import Gamma, GeneralizedPareto, InverseGaussian, Likelihood, Tweedie


def test_light_tails_are_exponential() -> None:
    f, y = tensor(-1.0, 0.5, 2.0), tensor(0.1, 1.0, 4.0)
    torch.testing.assert_close(GeneralizedPareto(1e-6)(f).log_prob(y), Gamma(1.0)(f).log_prob(y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("true", "fresh", "name"),
    [
        (InverseGaussian(300.0), InverseGaussian(), "concentration"),
        (Tweedie(2.0, 1.5), Tweedie(), "dispersion"),
        (Gamma(30.0), Gamma(), "concentration"),
    ],
    ids=["InverseGaussian", "Tweedie", "Gamma"],
)
def test_starts_are_near_the_truth(true: Likelihood, fresh: Likelihood, name: str) -> None:
    draws = true(torch.full((500, 9), 3.0, dtype=torch.float64)).sample()
    start = fresh.start(name, draws[:, 0], draws[:, 1:])
    assert start is not None
    assert 0.5 < start.item() / getattr(true, name).item() < 2
    assert Tweedie().start("power", draws[:, 0], draws[:, 1:]) is None


def test_quadrature_of_zeros_looks_where_their_probability_is_1_in_e():
    likelihood, zero = Tweedie(0.8, 1.4).double().bind(), tensor(0.0)
    center, _ = likelihood.focus(zero)
    torch.testing.assert_close(likelihood(center).log_prob(zero), tensor(-1.0))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: InverseGaussian(0.0), "InverseGaussian: expected concentration to be positive"),
        (lambda: GeneralizedPareto(-0.1), "GeneralizedPareto: expected concentration to be positive"),
        (lambda: Tweedie(-1.0), "Tweedie: expected dispersion to be positive"),
        (lambda: Tweedie(1.0, 2.0), "Tweedie: expected power to lie between 1 and 2, in floating point, got 2.0"),
        (lambda: Tweedie().check(tensor(-1.0)), "Tweedie: expected y to be zero or positive, got 1 of 1"),
        (lambda: InverseGaussian().check(tensor(0.0)), "InverseGaussian: expected y to be positive.*Tweedie"),
        (lambda: GeneralizedPareto().check(tensor(0.0)), "GeneralizedPareto: expected y to be positive.*threshold"),
    ],
)
def test_errors(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]


def test_the_start_of_a_dispersion_has_units() -> None:
    """Means of neighbors that are all zero are kept above a thousandth of the mean of all."""
    y = torch.tensor([0.0, 2.0, 3.0, 0.5], dtype=torch.float64)
    near = torch.tensor([[1.0, 2.0], [0.0, 0.0], [2.0, 4.0], [1.0, 1.0]], dtype=torch.float64)
    plain, scaled = (Tweedie(power=1.5).start("dispersion", unit * y, unit * near) for unit in (1.0, 100.0))
    assert plain is not None
    assert scaled is not None
    torch.testing.assert_close(scaled, 10 * plain)
