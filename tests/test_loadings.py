"""Loadings with a shrinkage prior: its gradient, intervals of correlations, and rotations."""

import pyro
import pytest
import torch
from builders import F64, normal

from pyro_nngp.loadings import FactorLoadings


def loadings(outputs=4, factors=2, seed=0):
    torch.manual_seed(seed)
    built = FactorLoadings(outputs, factors)
    built.start(normal(outputs, factors), torch.rand(outputs, dtype=F64) + 0.5)
    return built


def test_the_precision_is_the_slope_of_the_prior_at_the_mean_shrinkage():
    built = loadings()
    data = {"shrinkage": built.shrinkage_mean, "weights": built.mode.clone().requires_grad_()}
    with pyro.condition(data=data):
        trace = pyro.poutine.trace(lambda: built(torch.zeros(3, 1, dtype=F64))).get_trace()
    assert trace.nodes["weights"]["fn"].event_shape == (4, 2)
    (slope,) = torch.autograd.grad(trace.log_prob_sum(), data["weights"])
    torch.testing.assert_close(slope, -built.precision(built.mode) * built.mode)


def test_the_shrinkage_is_at_its_coordinate_optimum():
    """E[delta_h] of Gamma(a_h + T (F - h + 1) / 2, 1 + sum over later factors of the other ratios' sums of squares)."""
    built = loadings(6, 3)
    mean, shapes = built.shrinkage_mean, [1.0, 2.0, 2.0]
    local = built.precision(built.mode) / mean.cumprod(0)
    squares = (local * built.mode.square()).sum(0)
    for h in range(3):
        others = torch.tensor([float(mean[: f + 1].prod() / mean[h]) for f in range(h, 3)], dtype=F64)
        want = (shapes[h] + 6 * (3 - h) / 2) / (1 + (others * squares[h:]).sum() / 2)
        assert float(mean[h]) == pytest.approx(float(want), rel=1e-3)


def test_intervals_of_correlations_are_those_of_the_first_order():
    built = loadings()
    root = normal(8, 8)
    information = torch.linalg.inv(1e-3 * (root @ root.mT + torch.eye(8, dtype=F64)))
    built.set_information(information, shares_kernel=False)
    found = built.correlations(0.9)

    def z(mode):
        gram = mode.view(4, 2) @ mode.view(4, 2).mT
        return (gram / gram.diagonal().sqrt() / gram.diagonal().sqrt()[:, None])[0, 2].atanh()

    slope = torch.autograd.functional.jacobian(z, built.mode.flatten())
    width = 1.6448536 * (slope @ torch.linalg.inv(information) @ slope).sqrt()
    for end, want in zip(found, (0.0, -width, width), strict=True):
        assert float(end[0, 2]) == pytest.approx(float((z(built.mode.flatten()) + want).tanh()), rel=1e-5)
        torch.testing.assert_close(end.diagonal(), torch.ones(4, dtype=F64))


def test_with_one_kernel_no_deviation_is_a_rotation_and_correlations_stay():
    one, other = loadings(), loadings()
    along = (one.mode @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=F64)).flatten()
    root = normal(8, 8)
    across = torch.eye(8, dtype=F64) - torch.outer(along, along) / along.square().sum()
    known = across @ (root @ root.mT) @ across  # nothing is known of the rotation
    one.set_information(known + 1e-3 * torch.eye(8, dtype=F64), shares_kernel=True)
    other.set_information(known + 1e-3 * torch.eye(8, dtype=F64), shares_kernel=False)
    unit = along / along.norm()
    assert (unit @ one.tril).norm() < 0.1 * (unit @ other.tril).norm()
    torch.testing.assert_close(one.correlations().upper, other.correlations().upper, rtol=1e-4, atol=1e-4)


def test_the_guide_is_a_point_until_there_are_intervals():
    built = loadings()
    assert bool((built.own_guide("weights", {}).sample() == built.mode).all())
    assert bool((built.own_quantiles("weights", torch.tensor(1.0)) == built.mode).all())
    built.set_information(4 * torch.eye(8, dtype=F64), shares_kernel=False)
    draws = torch.stack([built.own_guide("weights", {}).sample() for _ in range(500)])
    assert (draws.std(0) - 0.5).abs().max() < 6 * 0.5 / 1000**0.5
    upper = built.own_quantiles("weights", torch.tensor(2.0))
    torch.testing.assert_close(upper, built.mode + 1.0, rtol=1e-5, atol=1e-5)
    assert built.own_guide("shrinkage", {}).sample().shape == (2,)
    built.set_mode(2 * built.mode)
    assert not bool(built.has_intervals)


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match=r"FactorLoadings: expected num_factors >= 1.*, got 0"):
        FactorLoadings(4, 0)
    with pytest.raises(ValueError, match=r"FactorLoadings: expected degrees"):
        FactorLoadings(4, 2, degrees=0.0)
