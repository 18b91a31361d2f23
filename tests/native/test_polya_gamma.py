"""Compiled Polya-Gamma draws: what makes them exact, their streams of random numbers, what they refuse."""

import math

import numpy as np
import pytest
import torch
from oracles.compiled import needs_library

from pyro_nngp.distributions import PolyaGamma
from pyro_nngp.distributions.polya_gamma import log_density
from pyro_nngp.inference import uniformity
from pyro_nngp.native import polya_gamma

F64 = torch.float64
GRID = torch.linspace(math.log(1e-7), math.log(100.0), 20_001, dtype=F64)  # of log omega

pytestmark = needs_library


def saddle_point(b, q):
    """omega, and the logarithm of the saddle-point approximation there, where tanh(v) / v = 4 omega / b, v^2 = q."""
    v = q.abs().sqrt()
    t = torch.where(q > 0, v.tanh(), v.tan()) / v
    cumulant = torch.where(q > 0, -v - torch.log1p(torch.exp(-2 * v)) + math.log(2), -v.cos().abs().log())
    second = (t - 1 + t.square() * q) / (16 * q)
    return b * t / 4, -0.5 * torch.log(2 * math.pi * b * second) + b * (cumulant + q * t / 2)


@pytest.mark.parametrize("b", [0.25, 0.3, 0.5, 0.9, 1.3, 3.5, 20.0, 300.0])
def test_the_saddle_point_approximation_encloses_the_density_and_is_log_concave(b):
    """What rejection below tangents of the approximation needs; other tilts change both by the same factor."""
    poles = 1 - torch.logspace(-3, -0.01, 1500, dtype=F64)
    q = torch.cat([-(math.pi**2) / 4 * poles, torch.logspace(-2, 4, 1500, dtype=F64)])
    q = q[q.abs() > 3e-3].sort().values
    omega, approximation = saddle_point(b, q)
    inside = approximation > approximation.max() - 40
    ratio = (log_density(omega, torch.tensor(b, dtype=F64)) - approximation)[inside]
    assert ratio.max() < 1e-9
    assert ratio.min() > -1 / (12 * b)
    assert (ratio.diff() > -1e-9).all()  # q falls with omega
    y = omega.log()
    slopes = (approximation + y).diff() / y.diff()
    assert (slopes.diff() > 0).all()


@pytest.mark.parametrize("h", [0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75])
def test_the_tail_of_a_fraction_falls_toward_that_of_a_gamma_density(h):
    """What rejection of x = 4 omega below two densities needs, for h up to 3/4, where the parts join at 1.3."""
    x = torch.linspace(1.3, 40, 4_000, dtype=F64)
    log_density_of_x = log_density(x / 4, torch.tensor(h, dtype=F64)) - math.log(4)
    tail = log_density_of_x + math.pi**2 / 8 * x
    assert (tail.diff() < 0).all()
    limit = h * math.log(math.pi / 2) - math.lgamma(h) + (h - 1) * x.log()
    assert ((tail - limit) > -1e-9).all()
    x = torch.linspace(0.01, 1.3, 2_000, dtype=F64)
    first = h * math.log(2) + math.log(h) - 0.5 * (2 * math.pi * x**3).log() - h**2 / (2 * x)
    assert (log_density(x / 4, torch.tensor(h, dtype=F64)) - math.log(4) < first + 1e-9).all()


FRACTIONS = [(0.5, 0.0), (0.5, 4.0), (0.5, 600.0), (0.75, 1.0), (0.8, 2.0), (1.1, 20.0), (2.6, 0.3)]


@pytest.mark.parametrize(
    ("b", "c"), [(0.25, 0.0), (2.0, 1.0), (4.0, 30.0), (5.0, 0.1), (1.0, 700.0), (3.5, -3.0), *FRACTIONS]
)
def test_draws_have_the_distribution(b, c):
    pg = PolyaGamma(torch.tensor(b, dtype=F64), torch.tensor(c, dtype=F64))
    draws = polya_gamma.draw(pg.concentration.expand(20_000), pg.tilt.expand(20_000), 1, 5)[0]
    mass = (pg.log_prob(GRID.exp()) + GRID).exp() * (GRID[1] - GRID[0])
    cdf = mass.cumsum(0) - mass / 2
    assert uniformity(torch.as_tensor(np.interp(draws.log(), GRID, cdf))) > 1e-4
    assert (draws.mean() - pg.mean).abs() < 6 * (pg.variance / 20_000).sqrt()


@pytest.mark.parametrize(("b", "c"), [(1.0, 0.7), (0.5, 3.0), (30.0, 1.0)])
def test_without_compiled_code_draws_have_the_same_distribution(b, c, monkeypatch):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", "0")
    pg = PolyaGamma(torch.tensor(b, dtype=F64), torch.tensor(c, dtype=F64))
    draws = pg.sample((5_000,))
    mass = (pg.log_prob(GRID.exp()) + GRID).exp() * (GRID[1] - GRID[0])
    assert uniformity(torch.as_tensor(np.interp(draws.log(), GRID, mass.cumsum(0) - mass / 2))) > 1e-4


def test_draws_follow_the_seed_of_torch_and_not_threads_or_other_entries():
    b, c = torch.full((3_000,), 2.5), torch.linspace(-4, 4, 3_000)
    torch.manual_seed(1)
    first = PolyaGamma(b, c).sample()
    second = PolyaGamma(b, c).sample()
    torch.manual_seed(1)
    assert torch.equal(PolyaGamma(b, c).sample(), first)
    assert not torch.equal(first, second)
    threads = torch.get_num_threads()
    draws = polya_gamma.draw(b.double(), c.double(), 2, 7)
    assert len(draws.unique()) == draws.numel()
    try:
        torch.set_num_threads(3)
        assert torch.equal(polya_gamma.draw(b.double(), c.double(), 2, 7), draws)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(polya_gamma.draw(b[:10].double(), c[:10].double(), 2, 7), draws[:, :10])


@pytest.mark.parametrize("c", [0.0, 1e-8, 5.0, 1e4, 1e8, 1e12])
@pytest.mark.parametrize("b", [0.26, 3.0, 1e4, 1e9, 1e12])
def test_extreme_parameters_keep_the_moments(b, c):
    pg = PolyaGamma(torch.tensor(b, dtype=F64), torch.tensor(c, dtype=F64))
    draws = polya_gamma.draw(pg.concentration[None], pg.tilt[None], 2_000, 3)
    assert ((draws.mean() - pg.mean) / (pg.variance / 2_000).sqrt()).abs() < 6
    assert draws.var() / pg.variance == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("b", [0.9774, 2.0, 50.0])
def test_tilts_whose_square_overflows_leave_the_mean(b):
    """Draws were zero, or half of the mean."""
    tilt = torch.tensor([1e160, -1e300], dtype=F64)
    draws = polya_gamma.draw(torch.full((2,), b, dtype=F64), tilt, 5, 3)
    torch.testing.assert_close(draws, (b / 2 / tilt.abs()).expand(5, 2), rtol=1e-12, atol=0)


def test_parameters_without_a_distribution_give_nan():
    nan, inf = math.nan, math.inf
    b = torch.tensor([nan, 1.0, 0.1, inf, 1.0, 2.5, -1.0], dtype=F64)
    c = torch.tensor([0.0, nan, 0.0, 0.0, inf, nan, 1.0], dtype=F64)
    assert polya_gamma.draw(b, c, 2, 0).isnan().all()
    assert polya_gamma.draw(b[:0], c[:0], 2, 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("b", "c", "message"),
    [
        (torch.ones(2), torch.ones(2).double(), r"polya_gamma: expected concentration of dtype torch.float64"),
        (torch.ones(3).double(), torch.ones(2).double(), r"expected concentration of shape \(2,\), got \(3,\)"),
        (torch.ones(2).double(), torch.ones(2), r"expected tilt of dtype torch.float64"),
    ],
)
def test_memory_that_does_not_fit_is_refused(b, c, message):
    with pytest.raises((ValueError, TypeError), match=message):
        polya_gamma.draw(b, c, 1, 0)
