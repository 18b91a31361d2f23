"""The check of residuals after training."""

import math

import pytest
import torch
from torch.distributions import Normal

from pyro_nngp import LOO, MLLk, Vecchia
from pyro_nngp.inference.svi.exact_rows import exact_rows
from pyro_nngp.inference.svi.residual_check import (
    check_errors,
    check_tails,
    excess_of_errors,
    gain_of_heavy_tails,
    is_overconfident,
)
from pyro_nngp.kernels import RBF, Matern32, Matern52
from pyro_nngp.likelihoods import Gaussian, StudentT
from pyro_nngp.models.base.trend import bound_for_predictions

generator = torch.Generator().manual_seed(0)
N = 150
X = torch.rand(N, 2, dtype=torch.float64, generator=generator)
NOISE = torch.randn(N, dtype=torch.float64, generator=generator)
CHI2 = torch.randn(N, 3, dtype=torch.float64, generator=generator).square().mean(1)
LIGHT = torch.sin(6 * X[:, 0]) + 0.2 * NOISE
HEAVY = torch.sin(6 * X[:, 0]) + 0.2 * NOISE / CHI2


def build(method, y, **settings):
    return method(X, y, Matern32(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=6, **settings)


@pytest.mark.parametrize("method", [Vecchia, LOO, MLLk])
def test_heavy_tails_under_gaussian_noise_are_reported(method):
    check_tails(build(method, LIGHT))
    with pytest.warns(UserWarning, match=r"tails of a normal distribution.* by 0\.\d+ nats .* VNNGP.*StudentT\(\)"):
        check_tails(build(method, HEAVY))


@pytest.mark.parametrize(("method", "cure"), [(LOO, "Take Vecchia"), (Vecchia, "Keep noise")])
def test_errors_far_beyond_their_size_are_reported(method, cure):
    """A smooth function without noise, and with noise that the model denies; the bound is 1e-4 of the variance of y."""

    def exact(y):
        return method(X, y, Matern52(2, 1.0, 0.5), Gaussian(1e-9), num_neighbors=12)

    smooth, wrong = exact(torch.sin(6 * X[:, 0])), exact(LIGHT)
    check_errors(smooth, exact_rows(smooth))
    assert not is_overconfident(smooth)
    assert is_overconfident(wrong)
    least = f"{1e-4 * float(LIGHT.var()):.2g}"
    with pytest.warns(UserWarning, match=rf"errors of the size .* times as large .* {cure}.*greater_than\({least}"):
        check_errors(wrong, exact_rows(wrong))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_excess_is_that_of_the_exact_process(dtype):
    """Of smooth functions in float32 too, whose covariances have no factor in it."""
    gp = LOO(X.to(dtype), LIGHT.to(dtype), RBF(2, 1.0, 0.5), Gaussian(0.01), num_neighbors=12)
    gp.mean.value = 0.25
    noise = gp.likelihood.variance.detach().double()
    cov = RBF(2, 1.0, 0.5).double()(X, X).detach() + (noise + 1e-6) * torch.eye(N, dtype=X.dtype)
    residual = LIGHT - 0.25
    expected = float(residual @ torch.linalg.solve(cov, residual)) / N
    assert excess_of_errors(exact_rows(gp)) == pytest.approx(expected, rel=1e-4 if dtype == torch.float32 else 1e-9)


def test_few_rows_several_outputs_and_other_likelihoods_are_not_judged():
    check_tails(Vecchia(X[:90], HEAVY[:90], Matern32(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=6))
    check_tails(Vecchia(X, HEAVY, Matern32(2, 1.0, 0.05), Gaussian(0.1), num_neighbors=6))  # little of it is noise
    check_tails(build(Vecchia, torch.stack([HEAVY, HEAVY], 1)))
    check_tails(LOO(X, HEAVY, Matern32(2, 1.0, 0.5), StudentT(), num_neighbors=6))


def test_residuals_are_those_of_the_exact_process():
    """All others are neighbors: z_i = [C^-1 (y - m)]_i / sqrt([C^-1]_ii), with an uncertain level (GLS)."""
    n = 12
    gp = Vecchia(X[:n], LIGHT[:n], Matern32(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=n - 1)
    gp.solve()
    bound = gp.bound()
    cov = bound.covariance(X[:n], X[:n])
    cov = cov + torch.diag(cov.diagonal() * bound.jitter + 0.1)
    precision, ones = torch.linalg.inv(cov), cov.new_ones(n)
    precision = precision - torch.outer(precision @ ones, precision @ ones) / (ones @ precision @ ones)
    expected = (precision @ LIGHT[:n]) / precision.diagonal().sqrt()
    found, share = gp.posterior(bound_for_predictions(gp)).standardized_residuals(torch.arange(n))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(share, 0.1 * precision.diagonal(), rtol=1e-6, atol=1e-8)


def test_the_gain_is_that_of_densities():
    """Quantiles of a scaled t distribution with 4 degrees of freedom gain its divergence from the best normal."""
    p = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    normal = Normal(0.0, 1.0).icdf(p)
    assert -0.01 < gain_of_heavy_tails(normal) < 0.0  # 10 degrees of freedom, at most
    angle = (4 * p * (1 - p)).sqrt().acos() / 3  # t with 4 degrees of freedom: closed quantiles (Shaw 2006)
    t4 = torch.sign(p - 0.5) * 2 * (angle.cos() / (4 * p * (1 - p)).sqrt() - 1).clamp(min=0).sqrt()
    log_density = torch.distributions.StudentT(4.0).log_prob(t4).mean()
    expected = log_density - (-0.5 * math.log(2 * math.pi * float(t4.square().mean())) - 0.5)
    assert math.isclose(gain_of_heavy_tails(3 * t4), float(expected), abs_tol=3e-3)
