"""Loadings with a shrinkage prior: its gradient, free scales, intervals of correlations, and rotations."""

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


@pytest.mark.parametrize(("variance", "share"), [(1e-9, 0.0), (1e9, 1.0)])
def test_the_prior_shrinks_a_factor_as_a_whole_only_where_its_loadings_are_unknown(variance, share):
    built = loadings()
    built.set_mode(built.mode, torch.full((4, 2), variance, dtype=F64))
    weights, free = built.precision(built.mode), built.radial_precision(built.mode)
    pull = weights * built.mode - torch.einsum("fpq,qf->pf", free, built.mode)
    torch.testing.assert_close(pull, share * weights * built.mode, rtol=1e-6, atol=1e-6)
    left = torch.diag_embed(weights.mT) - free
    assert float(torch.linalg.eigvalsh(left).min()) > -1e-9


def test_intervals_of_small_variances_are_those_of_the_first_order():
    built = loadings()
    root = normal(8, 8)
    information = torch.linalg.inv(1e-5 * (root @ root.mT + torch.eye(8, dtype=F64)))
    built.set_information(information, shares_kernel=False)
    found = built.correlations(0.9)

    def z(mode):
        gram = mode.view(4, 2) @ mode.view(4, 2).mT
        return (gram / gram.diagonal().sqrt() / gram.diagonal().sqrt()[:, None])[0, 2].atanh()

    slope = torch.autograd.functional.jacobian(z, built.mode.flatten())
    width = 1.6448536 * (slope @ torch.linalg.inv(information) @ slope).sqrt()
    for end, want in zip(found, (0.0, -1.0, 1.0), strict=True):
        shift = float((end[0, 2].atanh() - z(built.mode.flatten())) / width)
        assert shift == pytest.approx(want, abs=0.1)  # of 2,000 draws
        torch.testing.assert_close(end.diagonal(), torch.ones(4, dtype=F64))


def test_with_one_kernel_no_deviation_is_a_rotation_and_correlations_stay():
    one, other = loadings(), loadings()
    along = (one.mode @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=F64)).flatten()
    root = normal(8, 8)
    unit = along / along.norm()
    across = torch.eye(8, dtype=F64) - torch.outer(unit, unit)
    known = across @ (3e4 * torch.eye(8, dtype=F64) + root @ root.mT) @ across
    for built, shares in ((one, True), (other, False)):
        built.set_information(known + 300 * torch.outer(unit, unit), shares_kernel=shares)
    assert (unit @ one.tril).norm() < 0.2 * (unit @ other.tril).norm()
    first, second = one.correlations(), other.correlations()
    assert ((first.upper - second.upper).abs() <= 0.2 * (first.upper - first.lower)).all()  # of 2,000 draws


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
