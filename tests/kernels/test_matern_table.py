"""Tables of Matérn correlations: SciPy's Bessel functions, both dtypes, derivatives, far and coincident points."""

import math

import pytest
import scipy.special
import torch
from builders import scalar, tensor

from pyro_nngp.kernels.matern_table import correlation, layout, tables


@pytest.mark.parametrize("nu", [0.05, 0.3, 1.0, 3.7, 12.0])
def test_correlations_against_bessel_functions(nu: float) -> None:
    r = torch.logspace(-6, 1.5, 60, dtype=torch.float64)
    z = math.sqrt(2 * nu) * r
    log_scale = (1 - nu) * math.log(2) - math.lgamma(nu) + nu * z.log()
    exact = log_scale.exp() * torch.as_tensor(scipy.special.kv(nu, z.numpy()))
    torch.testing.assert_close(correlation(r.square(), scalar(nu)), exact, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tables_have_their_layout_and_the_accuracy_of_the_dtype(dtype: torch.dtype) -> None:
    nu, q = tensor(0.7, 2.2), torch.logspace(-6, 3, 200, dtype=torch.float64)
    assert tables(nu, dtype).shape == (2, *layout(dtype).shape)
    assert tables(nu, dtype).dtype == dtype
    found, exact = correlation(q.to(dtype), nu[:, None]), correlation(q, nu[:, None])
    torch.testing.assert_close(found.double(), exact, rtol=0.0, atol=2e-7 if dtype == torch.float32 else 0.0)


def test_coincident_points_have_correlation_one_and_distant_ones_zero() -> None:
    found = correlation(tensor(0.0, 1e-40, 1e7, math.inf), scalar(1.3))
    torch.testing.assert_close(found, tensor(1.0, 1.0, 0.0, 0.0), rtol=0.0, atol=1e-14)


def test_derivatives() -> None:
    q, nu = tensor(0.05, 0.8, 3.1).requires_grad_(), scalar(1.3).requires_grad_()
    assert torch.autograd.gradcheck(correlation, (q, nu), eps=1e-6, atol=1e-6)
