"""Likelihoods of real and positive data: closed forms, tails, noise per output."""

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from builders import scalar, tensor
from oracles.likelihoods import grid

from pyro_nngp.kernels import RBF
from pyro_nngp.likelihoods import (
    AsymmetricLaplace,
    Gaussian,
    HeteroskedasticGaussian,
    Likelihood,
    StudentT,
)
from pyro_nngp.models import SVGP


def test_heteroskedastic_closed_form_equals_product_quadrature() -> None:
    likelihood = HeteroskedasticGaussian()
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    t, w = torch.as_tensor(nodes), torch.as_tensor(weights / weights.sum())
    loc, var, y = tensor(0.4, -0.8), tensor(0.6, 0.9), scalar(1.3)
    f = torch.stack(torch.meshgrid(loc[0] + var[0].sqrt() * t, loc[1] + var[1].sqrt() * t, indexing="ij"))
    want = w @ likelihood.forward(f).log_prob(y) @ w
    got = likelihood.expected_log_prob(y[None], loc[:, None], var[:, None])
    torch.testing.assert_close(got, want[None], rtol=1e-9, atol=0.0)


@pytest.mark.parametrize(
    ("loc", "var", "y"),
    [((0.0, -2.0), (1.0, 0.3), 0.5), ((0.0, -6.0), (1e-4, 1.0), 0.2), ((0.0, 0.0), (0.01, 9.0), 2.0)],
)
def test_heteroskedastic_marginal(loc: tuple[float, float], var: tuple[float, float], y: float) -> None:
    log_noise, log_weights = grid(loc[1], var[1])
    want = (log_weights + dist.Normal(loc[0], (var[0] + log_noise.exp()).sqrt()).log_prob(scalar(y))).logsumexp(0)
    marginal = HeteroskedasticGaussian().marginal(tensor(*loc)[:, None], tensor(*var)[:, None])
    assert marginal.batch_shape == (1,)
    assert marginal.log_prob(scalar(y)).item() == pytest.approx(want.item(), abs=1e-5)
    assert marginal.mean.item() == pytest.approx(loc[0])


def test_one_noise_variance_per_output() -> None:
    noise = tensor(0.1, 3.0)[:, None]
    likelihood = Gaussian(noise)
    y, loc, var = torch.randn(3, 2, 5, dtype=torch.float64).unbind()
    var = var.square()
    torch.testing.assert_close(likelihood.marginal(loc, var).variance, var + noise)
    alone = Gaussian(scalar(3.0)).expected_log_prob(y[1], loc[1], var[1])
    torch.testing.assert_close(likelihood.expected_log_prob(y, loc, var)[1], alone)


def test_heavy_tails_in_float32() -> None:
    """Half a degree of freedom: mixture components of noise variance beyond the range of float32."""
    likelihood = StudentT(0.5)
    log_prob = likelihood.marginal(torch.zeros(3), torch.ones(3)).log_prob(torch.tensor([0.0, 1e3, 1e6]))
    assert log_prob.isfinite().all()
    assert all(g.isfinite() for g in torch.autograd.grad(log_prob.sum(), list(likelihood.parameters())))


@pytest.mark.parametrize(("scale", "var"), [(0.1, 0.001), (1.0, 1.0), (1.0, 100.0)])
def test_marginal_of_very_heavy_tails(scale: float, var: float) -> None:
    """.3 degrees of freedom, against Gauss-Legendre quadrature over f on pieces that resolve prior and noise."""
    sd, y = var**0.5, tensor(0.0, 0.3, 3.0, 50.0)
    nodes, weights = map(torch.as_tensor, np.polynomial.legendre.leggauss(8))
    unit = torch.linspace(-1, 1, 201, dtype=torch.float64)
    edges = torch.cat([12 * sd * unit, (y[:, None] + 20 * scale * unit).flatten()]).clamp(-12 * sd, 12 * sd).unique()
    middle, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    f = middle[:, None] + half[:, None] * nodes
    density = dist.StudentT(scalar(0.3), y[:, None, None], scale).log_prob(f) + dist.Normal(0.0, sd).log_prob(f)
    want = (density.exp() * half[:, None] * weights).sum((1, 2)).log()
    marginal = StudentT(scalar(0.3), scalar(scale)).marginal(torch.zeros(4).double(), torch.full((4,), var).double())
    torch.testing.assert_close(marginal.log_prob(y), want, rtol=0, atol=1e-4)


def test_integer_targets_are_numbers_to_a_gaussian() -> None:
    x, y = torch.rand(30, 2), torch.arange(30)
    fits = [SVGP(x, targets, RBF(2), Gaussian(0.3), inducing=5) for targets in (y, y.float())]
    for gp in fits:
        gp.solve()
    torch.testing.assert_close(fits[0](x[:4]), fits[1](x[:4]))


def test_quantile_regression() -> None:
    """The expectation has a closed form; the mode of f is the quantile; errors."""
    likelihood = AsymmetricLaplace(0.9, 0.4).double()
    loc, var = torch.meshgrid(tensor(-1.5, 0.0, 2.0), tensor(1e-2, 0.3, 2.0), indexing="ij")
    numerical = Likelihood.expected_log_prob(likelihood, scalar(0.4), loc, var)
    torch.testing.assert_close(likelihood.expected_log_prob(scalar(0.4), loc, var), numerical, rtol=1e-3, atol=1e-3)
    y, trial = torch.randn(4001, dtype=torch.float64), torch.linspace(-3, 3, 601, dtype=torch.float64)
    best = trial[likelihood(trial[:, None]).log_prob(y).sum(-1).argmax()]
    assert best.item() == pytest.approx(y.quantile(0.9).item(), abs=0.01)
    sd = AsymmetricLaplace(0.9, 1.0).double()(scalar(0.0)).variance.sqrt()
    assert likelihood.sd_per_scale == pytest.approx(sd.item())
    for level in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match=f"AsymmetricLaplace: expected quantile .*, got {level}"):
            AsymmetricLaplace(level)
    with pytest.raises(TypeError, match="AsymmetricLaplace: expected quantile to be a number"):
        AsymmetricLaplace("median")  # type: ignore[arg-type]
