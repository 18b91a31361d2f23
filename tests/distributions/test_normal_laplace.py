"""The sum of a normal and an asymmetric Laplace variable: against a sum on a grid, in both extremes, and its draws."""

import math

import pyro.distributions as dist
import pytest
import torch
from builders import scalar, tensor
from oracles.likelihoods import grid

from pyro_nngp.distributions import NormalLaplace
from pyro_nngp.distributions.normal_laplace import asymmetric_laplace


def test_the_quantile_is_at_loc() -> None:
    for level in (0.05, 0.5, 0.9):
        noise = asymmetric_laplace(scalar(1.0), scalar(level), scalar(0.3))
        assert (noise.sample((40_000,)) < 1).double().mean().item() == pytest.approx(level, abs=0.01)
        y = tensor(-1.0, 1.0, 3.0)
        slope = torch.where(y < 1, level - 1, level)
        want = math.log(level * (1 - level) / 0.3) - (y - 1) * slope / 0.3
        torch.testing.assert_close(noise.log_prob(y), want)


@pytest.mark.parametrize(("var", "scale"), [(0.7, 0.4), (1e-4, 1.0), (9.0, 0.05)])
@pytest.mark.parametrize("level", [0.1, 0.5, 0.95])
def test_density_against_a_grid(var: float, scale: float, level: float) -> None:
    ours = NormalLaplace(scalar(0.3), scalar(var), scalar(level), scalar(scale))
    f, log_weights = grid(0.3, var, num=200_001)
    noise = asymmetric_laplace(f, scalar(level), scalar(scale))
    for y in (-2.0, 0.3, 0.9, 8.0):
        want = (log_weights + noise.log_prob(scalar(y))).logsumexp(0)
        assert ours.log_prob(scalar(y)).item() == pytest.approx(want.item(), abs=4e-6)  # of the grid, at the kink


def test_float32_where_the_normal_part_is_far_wider() -> None:
    y = torch.tensor([-3.0, 0.0, 2.0], requires_grad=True)
    ours = NormalLaplace(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(0.3), torch.tensor(1e-5)).log_prob(y)
    torch.testing.assert_close(ours, dist.Normal(0.0, 1.0).log_prob(y), rtol=1e-4, atol=1e-4)
    (slope,) = torch.autograd.grad(ours.sum(), y)
    torch.testing.assert_close(slope, -y.detach(), rtol=1e-3, atol=1e-3)


def test_draws_and_expand() -> None:
    ours = NormalLaplace(tensor(0.3, -1.0), scalar(0.5), scalar(0.8), scalar(0.4))
    draws = ours.sample((40_000,))
    error = (ours.variance / len(draws)).sqrt()
    assert ((draws.mean(0) - ours.mean).abs() < 5 * error).all()
    torch.testing.assert_close(draws.var(0), ours.variance, rtol=0.05, atol=0.0)
    wide = ours.expand((3, 2))
    assert wide.sample((4,)).shape == (4, 3, 2)
    torch.testing.assert_close(wide.log_prob(draws[:3]), ours.log_prob(draws[:3]))
