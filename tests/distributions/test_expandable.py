"""Expanded distributions broadcast their tensors, and share everything else."""

import pytest
import torch
from builders import tensor

from pyro_nngp.distributions import PolyaGamma, SparseCholeskyNormal

F64 = torch.float64
PATTERN = torch.tensor([[-1], [0], [1]])
DISTRIBUTIONS = {
    "polya-gamma": lambda: PolyaGamma(tensor(0.5, 2.0), tensor(1.0, -1.0)),
    "sparse": lambda: SparseCholeskyNormal(
        torch.randn(2, 3, dtype=F64), torch.rand(2, 3, dtype=F64) + 0.1, torch.randn(2, 3, 1, dtype=F64), PATTERN
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_expanding_broadcasts_densities_and_moments(name):
    one = DISTRIBUTIONS[name]()
    wide = one.expand([4, 2])
    assert type(wide) is type(one)
    assert (wide.batch_shape, one.batch_shape) == ((4, 2), (2,))
    assert wide.event_shape == one.event_shape
    value = one.sample((4,))
    torch.testing.assert_close(wide.log_prob(value), one.log_prob(value), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wide.mean, one.mean.expand(wide.mean.shape), rtol=0, atol=0)
    assert wide.expand([3, 4, 2]).sample((5,)).shape == (5, 3, 4, 2, *one.event_shape)


def test_no_tensor_is_copied_and_validation_stays():
    one = SparseCholeskyNormal(torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64), validate_args=True)
    wide = one.expand([4])
    assert wide.loc.data_ptr() == one.loc.data_ptr()
    assert wide.pattern is one.pattern
    with pytest.raises(ValueError, match="within the support"):
        wide.log_prob(torch.full((4, 3), torch.nan, dtype=F64))


def test_a_draw_of_rows_is_known_to_its_expansion_and_no_other_value():
    rows = torch.tensor([1, 2])
    scale, weights = torch.ones(2, dtype=F64), torch.full((2, 1), 0.5, dtype=F64)
    one = SparseCholeskyNormal(torch.zeros(2, dtype=F64), scale, weights, PATTERN[rows], rows)
    value = one.sample((4,))
    torch.testing.assert_close(one.expand([4]).log_prob(value), one.log_prob(value))
    with pytest.raises(ValueError, match="expected value to be the last draw of these rows"):
        one.expand([4]).log_prob(value.clone())
