import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from builders import scalar, tensor
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_mean
from pyro.optim import Adam
from torch.distributions import kl_divergence

from pyro_nngp._memory import block_limit
from pyro_nngp.distributions import PolyaGamma
from pyro_nngp.distributions.polya_gamma import Tangents, log_density, log_density_of_one
from pyro_nngp.inference import uniformity

F64 = torch.float64
CASES = [(b, c) for b in (0.3, 0.5, 1.0, 2.0, 3.7, 30.0) for c in (0.0, 1.5, -12.0)]
GRID = torch.linspace(math.log(1e-7), math.log(200.0), 20_001, dtype=F64)  # of log omega


def polya_gamma(b, c, dtype=F64):
    return PolyaGamma(torch.as_tensor(b, dtype=dtype), torch.as_tensor(c, dtype=dtype))


def weights(pg):
    """Density of log omega times the spacing of the grid: the trapezoidal rule, whose error is far below 1e-10."""
    return (pg.log_prob(GRID.exp()) + GRID).exp() * (GRID[1] - GRID[0])


def log_laplace(b, c, t):
    """log E exp(-t omega) = b log cosh(c / 2) - b log cosh(sqrt(c^2 / 4 + t / 2))."""
    return b * (math.log(math.cosh(c / 2)) - math.log(math.cosh(math.sqrt(c * c / 4 + t / 2))))


def left_series(omega, b, terms=60):
    """Polson, Scott and Windle (2013), eq. 5: alternating, so good for small omega only."""
    n = torch.arange(terms, dtype=F64)[:, None]
    size = torch.lgamma(n + b) - torch.lgamma(n + 1) + torch.log(2 * n + b) - (2 * n + b) ** 2 / (8 * omega)
    peak = size.amax(0)
    total = ((-1) ** n * torch.exp(size - peak)).sum(0)
    return (b - 1) * math.log(2) - math.lgamma(b) - 0.5 * torch.log(2 * math.pi * omega**3) + peak + total.log()


@pytest.mark.parametrize(("b", "c"), CASES)
def test_density_has_the_moments_and_the_laplace_transform(b, c):
    pg, omega = polya_gamma(b, c), GRID.exp()
    w = weights(pg)
    assert w.sum() == pytest.approx(1, rel=1e-9)
    assert (w * omega).sum() == pytest.approx(float(pg.mean), rel=1e-9)
    assert (w * (omega - pg.mean).square()).sum() == pytest.approx(float(pg.variance), rel=1e-8)
    for t in (0.1, 2.0, 40.0):
        assert (w * torch.exp(-t * omega)).sum().log() == pytest.approx(log_laplace(b, c, t), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("b", [0.05, 0.5, 1.0, 2.0, 7.3, 30.0])
def test_density_is_the_alternating_series_where_that_converges_fast(b):
    omega = torch.logspace(-4, math.log10(max(b, 0.3) / 8), 200, dtype=F64)
    want = left_series(omega, b)
    torch.testing.assert_close(log_density(omega, omega.new_tensor(b)), want, rtol=1e-10, atol=1e-9)
    if b == 1:
        torch.testing.assert_close(log_density_of_one(omega), want, rtol=1e-13, atol=1e-13)


def test_both_densities_of_one_agree_over_the_whole_range():
    switch = 1 / (2 * math.pi)
    near = switch + torch.linspace(-1e-6, 1e-6, 21, dtype=F64)
    omega = torch.cat([torch.logspace(-4, math.log10(50), 500, dtype=F64), near])
    torch.testing.assert_close(log_density_of_one(omega), log_density(omega, omega.new_tensor(1.0)), rtol=0, atol=1e-9)
    step = log_density_of_one(near).diff()
    torch.testing.assert_close(step, step.mean().expand_as(step), rtol=1e-3, atol=0)  # no jump at the switch


def test_density_of_two_is_the_convolution_of_two_densities_of_one():
    """Gauss-Legendre in the share of the first, far into the right tail, where the alternating series fails."""
    nodes, node_weights = (torch.as_tensor(v, dtype=F64) for v in np.polynomial.legendre.leggauss(400))
    share = (nodes + 1) / 2
    for omega in (0.05, 0.5, 3.0, 20.0, 50.0):
        pair = log_density_of_one(share * omega) + log_density_of_one((1 - share) * omega)
        want = torch.logsumexp(pair + (node_weights / 2 * omega).log(), 0)
        got = log_density(torch.tensor(omega, dtype=F64), scalar(2.0))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-8)


@pytest.mark.parametrize("omega", [1e-3, 0.1, 0.7, 20.0])
def test_gradients(omega):
    value = torch.tensor([omega, 1.3 * omega], dtype=F64, requires_grad=True)
    b, c = (torch.tensor(v, dtype=F64, requires_grad=True) for v in ([1.0, 4.6], [0.0, 2.5]))
    torch.autograd.gradcheck(lambda v, b, c: PolyaGamma(b, c).log_prob(v), (value, b, c), rtol=1e-4)
    torch.autograd.gradcheck(lambda v, c: PolyaGamma(1.0, c).log_prob(v), (value, c), rtol=1e-4)
    torch.autograd.gradgradcheck(lambda v, c: PolyaGamma(1.0, c).log_prob(v), (value, c), rtol=1e-3)
    torch.autograd.gradcheck(lambda b, c: (PolyaGamma(b, c).mean, PolyaGamma(b, c).variance), (b, c))


@pytest.mark.parametrize("b", [1.0, 0.5, 30.0, 1000.0])
def test_single_precision_is_finite_and_close(b):
    omega = torch.logspace(-5, 3, 300)
    for c in (0.0, 1e-4, 3.0, 60.0):
        value = omega.clone().requires_grad_()
        got = polya_gamma(b, c, torch.float32).log_prob(value)
        (slope,) = torch.autograd.grad(got.sum(), value)
        assert got.dtype == torch.float32
        assert got.isfinite().all()
        assert slope.isfinite().all()
        torch.testing.assert_close(
            got.double(), polya_gamma(b, c).log_prob(omega.double()), rtol=1e-5, atol=1e-4 * (1 + b)
        )


def test_moments_are_those_of_the_formulas_and_smooth_at_zero():
    c = tensor(0.3, 0.49, 0.51, 2.0, 30.0)
    mean = 2.5 / (2 * c) * (c / 2).tanh()
    variance = 2.5 / (4 * c**3) * (c.sinh() - c) / (c / 2).cosh().square()
    torch.testing.assert_close(polya_gamma(2.5, c).mean, mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(polya_gamma(2.5, c).variance, variance, rtol=1e-10, atol=0)
    zero = polya_gamma(2.5, [0.0, 1e-20, -1e-3], torch.float32)
    torch.testing.assert_close(zero.mean, torch.full((3,), 2.5 / 4), rtol=1e-6, atol=0)
    torch.testing.assert_close(zero.variance, torch.full((3,), 2.5 / 24), rtol=1e-6, atol=0)
    assert polya_gamma(1.0, 1e30, torch.float32).mean > 0


@pytest.mark.parametrize(("b", "c"), [(1.0, 0.7), (0.5, 3.0), pytest.param(7.3, -12.0, marks=pytest.mark.slow)])
def test_divergence_is_the_integral(b, c):
    q = polya_gamma(b, c)
    for other in (0.0, 1.1):
        p, omega = polya_gamma(b, other), GRID.exp()
        want = (weights(q) * (q.log_prob(omega) - p.log_prob(omega))).sum()
        torch.testing.assert_close(kl_divergence(q, p), want, rtol=1e-8, atol=0)
    half = torch.tensor(c / 2, dtype=F64)
    want = b * half.cosh().log() - b * c / 4 * half.tanh()
    torch.testing.assert_close(kl_divergence(q, polya_gamma(b, 0.0)), want, rtol=1e-12, atol=0)


def test_divergence_in_single_precision_and_of_other_concentrations():
    tilt = torch.tensor([0.0, 1e-3, 0.5, 30.0, 1e4, 1e8])
    got = kl_divergence(PolyaGamma(2.0, tilt), PolyaGamma(2.0, 0.0))
    want = kl_divergence(polya_gamma(2.0, tilt.double()), polya_gamma(2.0, 0.0))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-12)
    assert got[0] == 0
    with pytest.raises(NotImplementedError, match=r"known for one concentration only"):
        kl_divergence(PolyaGamma(2.0, tilt), PolyaGamma(3.0, tilt))


@pytest.mark.parametrize("b", [0.01, 0.1, 0.5, 1.0, 2.5, 30.0, 5_000.0])
@pytest.mark.parametrize("c", [0.0, 4.0, 300.0])
def test_draws_have_the_distribution(b, c):
    """Every draw put through the cumulative function of the density, and the first two moments."""
    n, pg = 10_000, polya_gamma(b, c)
    draws = pg.sample((n,))
    assert (draws.mean() - pg.mean).abs() < 6 * (pg.variance / n).sqrt()
    center, spread = float(pg.mean.log()), float(pg.variance.sqrt() / pg.mean)
    low, high = min(center, 2 * math.log(b)) - 8 * min(spread, 1.0), center + 8 * min(spread, 1.0)
    grid = torch.linspace(low, high, 5_001, dtype=F64)
    mass = (pg.log_prob(grid.exp()) + grid).exp() * (grid[1] - grid[0])
    cdf = mass.cumsum(0) - mass / 2
    assert cdf[-1] == pytest.approx(1, abs=1e-6)
    assert uniformity(torch.as_tensor(np.interp(draws.log(), grid, cdf))) > 1e-4
    for t in (1.0, 30.0):
        share = torch.exp(-t * draws / pg.mean)
        error = share.std() / math.sqrt(n)
        assert abs(share.mean() - math.exp(stable_log_laplace(b, c, t / float(pg.mean)))) < 6 * error


def stable_log_laplace(b, c, t):
    def log_cosh(u):
        return u + math.log1p(math.exp(-2 * u)) - math.log(2)

    return b * (log_cosh(c / 2) - log_cosh(math.sqrt(c * c / 4 + t / 2)))


@pytest.mark.parametrize("b", [1e-3, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0, 1.7, 40.0])
def test_log_omega_has_a_log_concave_density_below_its_tangents(b):
    """For b < 1 this is what makes rejection below the tangents exact; c = 0 is the least concave tilt."""
    y = torch.linspace(2 * math.log(b) - 5, math.log(30 + b), 4_001, dtype=F64)
    height = polya_gamma(b, 0.0).log_prob(y.exp()) + y
    assert (height.diff().diff() < 0).all()
    for c in (0.0, 2.0, 50.0):
        tangents = Tangents(polya_gamma([b], [c]))
        assert tangents.slope[0] > 0 > tangents.slope[2]
        hat = (tangents.rise + tangents.slope * y).amin(0)
        assert (polya_gamma(b, c).log_prob(y.exp()) + y - hat).max() < 1e-9 * (1 + hat.abs().max())
        area = torch.logsumexp(hat, 0) + (y[1] - y[0]).log()
        assert area < math.log(1 / 0.6)  # three draws in five are accepted at least


def test_draws_of_many_parameters_and_shapes():
    pyro.set_rng_seed(3)
    b, c = torch.tensor([[0.5], [2.0], [9.0]]), torch.tensor([0.0, 3.0])
    pg = PolyaGamma(b, c)
    draws = pg.sample((5_000,))
    assert draws.shape == (5_000, 3, 2)
    assert draws.dtype == torch.float32
    assert ((draws.mean(0) - pg.mean).abs() < 6 * (pg.variance / 5_000).sqrt()).all()
    pyro.set_rng_seed(3)
    assert torch.equal(pg.sample((5_000,)), draws)
    assert pg.expand([4, 3, 2]).sample((5, 6)).shape == (5, 6, 4, 3, 2)
    assert PolyaGamma(1.0).sample().shape == ()
    assert PolyaGamma(1.0, torch.zeros(0)).sample((2,)).shape == (2, 0)
    one = PolyaGamma(1.0, c).expand([3, 2])
    torch.testing.assert_close(one.log_prob(draws[0]), PolyaGamma(torch.ones(3, 2), c).log_prob(draws[0]))
    assert not torch.equal(one.sample()[0], one.sample()[1])
    missing = PolyaGamma(2.0, torch.tensor([torch.nan, 1.0]), validate_args=False).sample()
    assert missing.isnan().tolist() == [True, False]


def test_chunks_of_draws_join_up():
    pg = PolyaGamma(torch.linspace(1, 400, 11, dtype=F64), 0.5)
    with block_limit(4):
        draws = pg.sample((40,))
    assert ((draws.mean(0) - pg.mean).abs() < 6 * (pg.variance / 40).sqrt()).all()


def test_cost_of_draws_does_not_grow_with_the_concentration(monkeypatch):
    evaluated = []
    density = PolyaGamma.log_prob

    def counted(pg, omega):
        evaluated.append(omega.numel())
        return density(pg, omega)

    monkeypatch.setattr(PolyaGamma, "log_prob", counted)
    for b in (3.0, 1e6):
        evaluated.clear()
        polya_gamma(b, 1.0).sample((1000,))
        assert sum(evaluated) < 1400


def test_arguments_and_values_are_checked():
    with pytest.raises(ValueError, match=r"concentration"):
        PolyaGamma(torch.tensor([1.0, 0.0]), 0.0, validate_args=True)
    with pytest.raises(ValueError, match=r"tilt"):
        PolyaGamma(1.0, torch.tensor(torch.nan), validate_args=True)
    with pytest.raises(ValueError, match=r"support"):
        PolyaGamma(1.0, 0.0, validate_args=True).log_prob(torch.tensor(-1.0))
    with pytest.raises(TypeError, match=r"PolyaGamma.log_prob: expected value in float32, .* got torch.complex64\."):
        PolyaGamma(1.0, 0.0, validate_args=True).log_prob(torch.tensor(1j))


def test_a_log_normal_guide_learns_the_distribution():
    tilt = torch.tensor([0.0, 2.0, 8.0])

    def model():
        with pyro.plate("rows", 3):
            pyro.sample("omega", PolyaGamma(1.0, tilt))

    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=0.5)  # normal in log omega
    svi = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO(num_particles=50, vectorize_particles=True))
    losses = [svi.step() for _ in range(150)]
    assert 0 < sum(losses[-50:]) / 50 < 0.1  # the divergence of three log-normals that fit


def test_the_augmentation_gives_back_the_logistic_likelihood():
    """p(y | psi) = 2^-b e^(kappa psi) E e^(-omega psi^2 / 2), by draws."""
    psi, omega = tensor(-2.0, 0.3, 1.7), polya_gamma(4.0, 0.0).sample((40_000, 1))
    successes = tensor(1.0, 4.0, 2.0)
    terms = torch.exp(-omega * psi.square() / 2)
    got = 2.0**-4 * torch.exp((successes - 2) * psi) * terms.mean(0)
    choose = tensor(4.0, 1.0, 6.0)
    want = dist.Binomial(4, logits=psi).log_prob(successes).exp() / choose
    assert ((got / want - 1).abs() < 6 * terms.std(0) / terms.mean(0) / 200).all()


@pytest.mark.compare
@pytest.mark.parametrize("b", [0.5, 1.0, 2.0, 3.7, 10.0, 30.0])
@pytest.mark.parametrize("c", [0.0, 2.5])
def test_density_and_draws_agree_with_polyagamma(b, c):
    polyagamma = pytest.importorskip("polyagamma")
    omega = torch.logspace(-3, math.log10(0.3 * b), 300, dtype=F64)  # beyond, its series cancel
    want = torch.as_tensor(polyagamma.polyagamma_pdf(omega.numpy(), b, c, return_log=True))
    got = polya_gamma(b, c).log_prob(omega)
    seen = (got > -500) & want.isfinite()  # its terms underflow
    assert seen.sum() > 100
    torch.testing.assert_close(got[seen], want[seen], rtol=1e-8, atol=1e-6)
    from scipy.stats import ks_2samp

    theirs = polyagamma.random_polyagamma(b, c, size=20_000, random_state=0)
    assert ks_2samp(polya_gamma(b, c).sample((20_000,)).numpy(), theirs).pvalue > 1e-4
