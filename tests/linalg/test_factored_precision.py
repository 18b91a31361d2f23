"""A precision with a sparse root and dense columns, beside dense matrices."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array, eye_array, random_array, vstack

from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.linalg.factored_precision import FactoredPrecision


def pair(num_dense):
    """A precision of 8 sparse and some dense columns, and the same one as a dense matrix."""
    rng = np.random.default_rng(0)
    sparse = csr_array(vstack([eye_array(8), random_array((6, 8), density=0.3, random_state=rng)]))
    dense = rng.standard_normal((14, num_dense))
    root = torch.from_numpy(np.concatenate([sparse.toarray(), dense], -1))
    return FactoredPrecision(sparse, dense), root.mT @ root


@pytest.mark.parametrize("num_dense", [0, 3])
def test_solutions_determinant_and_density_are_those_of_the_dense_matrix(num_dense):
    precision, dense = pair(num_dense)
    right = torch.linspace(-1, 2, 2 * len(dense), dtype=torch.float64).reshape(2, -1)
    want = torch.distributions.MultivariateNormal(torch.zeros_like(right[0]), precision_matrix=dense)
    assert len(precision) == len(dense)
    torch.testing.assert_close(precision.solve(right) @ dense, right)
    assert precision.log_det() == pytest.approx(float(torch.logdet(dense)))
    torch.testing.assert_close(precision.log_prob(right), want.log_prob(right))


def test_draws_have_the_inverse_as_covariance():
    precision, dense = pair(3)
    torch.manual_seed(0)
    draws = precision.draw(20_000)
    white = draws @ torch.linalg.cholesky(dense)
    torch.testing.assert_close(white.mT.cov(), torch.eye(len(dense), dtype=torch.float64), rtol=0, atol=6 * 0.01)
    assert draws.mean(0).abs().max() < 6 * (draws.std(0).max() / 20_000**0.5)


@pytest.mark.parametrize("num_dense", [0, 3])
def test_covariances_are_parts_of_the_dense_inverse(num_dense):
    precision, dense = pair(num_dense)
    given = torch.linalg.inv(dense[:8, :8])
    torch.testing.assert_close(torch.from_numpy(precision.slope()), -given @ dense[:8, 8:])
    torch.testing.assert_close(torch.from_numpy(precision.dense_covariance()), torch.linalg.inv(dense)[8:, 8:])
    linked = (dense[:8, :8] != 0).numpy()
    pairs = np.argwhere(linked)
    found = torch.from_numpy(precision.sparse_covariance(pairs))
    torch.testing.assert_close(found, given[pairs[:, :, None], pairs[:, None, :]])


def test_errors():
    sparse, dense = csr_array(eye_array(3)), np.ones((3, 1))
    with pytest.raises(ValueError, match=r"FactoredPrecision: expected sparse, dense with the same number of rows"):
        FactoredPrecision(sparse, dense[:2])
    with pytest.raises(NotPositiveDefiniteError, match=r"dense columns are linearly dependent"):
        FactoredPrecision(csr_array(vstack([sparse, sparse])), np.zeros((6, 1)))
    with pytest.raises(NotPositiveDefiniteError, match=r"sparse columns are linearly dependent"):
        FactoredPrecision(csr_array(np.ones((1, 2))), np.zeros((1, 0)))
