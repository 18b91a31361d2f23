"""The posterior of coefficients by itself."""

import torch
from builders import normal, tensor

from pyro_nngp.coefficients import Trend, posterior_of_coefficients
from pyro_nngp.means import ConstantMean, LinearMean


def test_the_root_is_that_of_the_inverse_precision_and_unknown_coefficients_stay_at_zero():
    a = normal(9, 3)
    a[:, 1] = 0  # a column without any variation
    loc, root = posterior_of_coefficients(LinearMean(2), a.T @ a, a.T @ torch.ones(9).double())
    some = torch.tensor([0, 2])
    precision = (a.T @ a)[some][:, some]
    cov = torch.cholesky_inverse(torch.linalg.cholesky(precision))
    torch.testing.assert_close((root @ root.T)[some][:, some], cov, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(loc[some], cov @ a.T[some] @ torch.ones(9).double(), rtol=1e-7, atol=1e-9)
    assert loc[1] == 0
    assert not root[1].any()


def test_functions_that_share_coefficients_add_what_they_say():
    precision, linear = tensor(2.0, 6.0).reshape(2, 1, 1), tensor(1.0, 3.0)[:, None]
    loc, root = posterior_of_coefficients(ConstantMean(), precision, linear)
    torch.testing.assert_close(torch.cat([loc, root[0] ** 2]), tensor(0.5, 0.125), rtol=1e-7, atol=0)
    loc, root = posterior_of_coefficients(ConstantMean(num_latents=2), precision, linear)
    torch.testing.assert_close(loc, tensor(0.5, 0.5)[:, None], rtol=1e-7, atol=0)
    torch.testing.assert_close(root.square()[:, 0, 0], tensor(0.5, 1 / 6), rtol=1e-7, atol=0)


def test_a_datum_that_alone_determines_a_coefficient_leaves_f_unknown_without_it():
    trend = Trend(torch.ones_like, torch.eye(1).double(), True)
    shift, added = trend.left_out(torch.ones(1, 1).double(), normal(1), tensor(0.5), tensor(0.5))
    assert shift.isfinite()
    assert added > 1e5
