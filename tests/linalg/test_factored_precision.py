"""A precision with a sparse root and dense columns, beside dense matrices."""

import numpy as np
import pytest
import torch
from builders import F64, normal

from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.linalg.factored_precision import FactoredPrecision
from pyro_nngp.linalg.nested_dissection import nested_dissection
from pyro_nngp.linalg.sparse_rows import SparseRows

TABLES = [
    torch.arange(8)[:, None],
    torch.tensor([[0, 3, 5], [1, 1, 2], [6, 7, 0]]),
    torch.tensor([[4, 2], [5, 6], [7, 1]]),
]


def plan_of(*tables, n=8):
    return nested_dissection(torch.arange(float(n))[:, None], tables, leaf=2)


def pair(num_dense):
    """A precision of 8 sparse and some dense columns, and the same one as a dense matrix."""
    values = [normal(*table.shape) for table in TABLES]
    sparse = torch.cat(
        [torch.zeros(len(c), 8, dtype=F64).scatter_add(-1, c, v) for c, v in zip(TABLES, values, strict=True)]
    )
    dense = normal(14, num_dense)
    root = torch.cat([sparse, dense], -1)
    rows = [SparseRows(*table) for table in zip(TABLES, values, strict=True)]
    return FactoredPrecision(rows, dense.numpy(), plan_of(*TABLES)), root.mT @ root


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
    for columns, found in zip(TABLES, precision.sparse_covariances(range(3)), strict=True):
        torch.testing.assert_close(found, given[columns[:, :, None], columns[:, None, :]])


def test_errors():
    columns, dense = torch.arange(3)[:, None], np.ones((3, 1))
    rows, plan = SparseRows(columns, torch.ones(3, 1, dtype=F64)), plan_of(columns, n=3)
    with pytest.raises(ValueError, match=r"FactoredPrecision: expected sparse, dense with the same number of rows"):
        FactoredPrecision([rows], dense[:2], plan)
    with pytest.raises(NotPositiveDefiniteError, match=r"dense columns are linearly dependent"):
        FactoredPrecision([rows], np.zeros((3, 1)), plan)
    both = torch.tensor([[0, 1]])
    with pytest.raises(NotPositiveDefiniteError, match=r"the precision of 2 values is singular"):
        FactoredPrecision([SparseRows(both, torch.ones(1, 2, dtype=F64))], np.zeros((1, 0)), plan_of(both, n=2))
