import pyro.distributions as dist
import pytest
import torch

from pyro_nngp.distributions.outputs import Outputs

PARTS = dist.Poisson(torch.tensor([1.0, 2.0, 3.0])), dist.Normal(torch.zeros(3), 2.0), dist.Gamma(torch.ones(3), 1.0)
Y = torch.tensor([[0.0, 3.0, torch.nan], [0.5, torch.nan, -1.0], [torch.nan, 2.0, 0.1]])


def test_each_output_has_its_family_and_missing_values_count_nothing():
    both = Outputs(PARTS)
    assert both.batch_shape == (3, 3)
    density = both.log_prob(Y)
    for part, values, found in zip(PARTS, Y, density, strict=True):
        seen = ~values.isnan()
        torch.testing.assert_close(found[seen], part.expand((3,)).log_prob(values.nan_to_num(1.0))[seen])
        assert (found[~seen] == 0).all()
    assert (Outputs(PARTS[:1]).log_prob(torch.full((1, 3), torch.nan)) == 0).all()
    for moment in ("mean", "variance"):
        want = torch.stack([getattr(part, moment).expand(3) for part in PARTS])
        torch.testing.assert_close(getattr(both, moment), want)
    normal = Outputs(PARTS[1:2])
    torch.testing.assert_close(normal.icdf(normal.cdf(Y[1:2, :1].expand(1, 3))), Y[1:2, :1].expand(1, 3))


def test_missing_values_leave_gradients_finite():
    scale = torch.ones(3, requires_grad=True)
    both = Outputs([dist.Gamma(2.0 * scale, scale), dist.Normal(scale, scale)])
    both.log_prob(Y[[2, 1]]).sum().backward()
    assert scale.grad.isfinite().all()


def test_draws_have_the_shape_of_the_batch_and_expand():
    torch.manual_seed(0)
    both = Outputs(PARTS)
    draws = both.expand((4, 3, 3)).sample((5000,))
    assert draws.shape == (5000, 4, 3, 3)
    error = (draws.mean((0, 1)) - both.mean) / (both.variance / 20_000).sqrt()
    assert error.abs().max() < 6
    assert (draws[..., 0, :] % 1 == 0).all()


def test_parts_of_other_shapes_are_refused():
    for parts in ([], [PARTS[0], dist.Normal(torch.zeros(2), 1.0)], [dist.Normal(0.0, 1.0)]):
        with pytest.raises(ValueError, match=r"Outputs: expected parts univariate, of one shape \(\.\.\., B\)"):
            Outputs(parts)
