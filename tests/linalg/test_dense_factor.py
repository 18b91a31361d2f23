"""Cholesky factors with nuggets, errors where there is none, and solves."""

from functools import partial

import pytest
import torch

from pyro_nngp.linalg import (
    NotPositiveDefiniteError,
    add_diagonal,
    cholesky,
    factor_inverse,
    factor_log_det,
    factor_solve,
    half_solve,
    reverse_cholesky,
)
from pyro_nngp.linalg.dense_factor import cholesky_above, factorize, paneled_cholesky

F64 = torch.float64


@pytest.mark.parametrize("escalate", [False, True])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_factors_are_those_of_the_matrix_with_its_nugget(batch, escalate):
    root = torch.randn(*batch, 5, 7, dtype=F64)
    cov = root @ root.mT
    tril = cholesky(cov, 1e-2, escalate=escalate)
    want = cov + 1e-2 * torch.diag_embed(cov.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(tril @ tril.mT, want, rtol=1e-10, atol=1e-12)
    assert torch.equal(tril, tril.tril())
    assert torch.equal(cholesky(cov, 0.0, escalate=escalate), torch.linalg.cholesky(cov))


def test_a_matrix_below_a_part_of_another_is_raised_to_it():
    """Eigenvalues in units of the other below the part become the part; a positive-definite matrix stays as it is."""
    root = torch.randn(3, 2, 5, dtype=F64)
    blocks = root @ root.mT
    other, axes = torch.block_diag(*blocks), torch.linalg.qr(torch.randn(6, 6, dtype=F64))[0]
    half = torch.linalg.cholesky(other) @ axes
    values = torch.tensor([2.0, 1.0, 0.5, 0.01, 0.0, -3.0], dtype=F64)
    tril = cholesky_above((half * values) @ half.mT, blocks, 0.1)
    torch.testing.assert_close(tril @ tril.mT, (half * values.clamp(min=0.1)) @ half.mT, rtol=1e-8, atol=1e-10)
    assert torch.equal(cholesky_above(other / 100, blocks, 0.1), torch.linalg.cholesky(other / 100))


@pytest.mark.parametrize("escalate", [False, True])
def test_gradients(escalate):
    root = torch.randn(2, 3, 4, dtype=F64, requires_grad=True)
    torch.autograd.gradcheck(lambda root: cholesky(root @ root.mT, 1e-2, escalate=escalate), root)


def test_a_matrix_without_a_factor_is_an_error_that_hamiltonian_monte_carlo_takes_for_a_divergence():
    with pytest.raises(
        NotPositiveDefiniteError, match=r"cholesky: input is not positive-definite: .* size 3 .* of 0e\+00"
    ):
        cholesky(-torch.eye(3), 0.0)


@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_only_matrices_without_a_factor_get_a_larger_nugget(batch):
    cov = torch.ones(*batch, 2, 3, 3) + 2 * torch.eye(3) * torch.tensor([0.0, 1.0])[:, None, None]
    with pytest.warns(UserWarning, match=r"of the covariances were indefinite"):
        tril = cholesky(cov, 0.0, escalate=True)
    torch.testing.assert_close(tril @ tril.mT, cov, rtol=0, atol=1e-4)
    torch.testing.assert_close((tril @ tril.mT)[..., 1, :, :], cov[..., 1, :, :], rtol=1e-6, atol=0)
    with pytest.raises(NotPositiveDefiniteError, match=r"1 of the covariances of size 2 in torch.float32"):
        cholesky(-torch.eye(2), 0.0, escalate=True)


def test_what_was_added_is_known():
    system = torch.stack([torch.eye(2), torch.ones(2, 2)])
    with pytest.warns(UserWarning, match=r"1 of the covariances were indefinite in torch.float32"):
        tril, extra = factorize(system)
    assert extra[0] == 0 < extra[1] <= 1e-4
    torch.testing.assert_close(tril @ tril.mT, system + extra[:, None, None] * torch.eye(2))
    assert factorize(system[:1])[1] is None


@pytest.mark.parametrize("size", [79, 80, 97, 128])
def test_paneled_factor_is_lapacks(size):
    a = torch.randn(5, size, size + 4, dtype=F64)
    system = a @ a.mT
    system[2, 50, 50] = -1.0  # in the fourth panel
    system[4] = float("nan")
    tril, info = paneled_cholesky(system)
    assert (info > 0).tolist() == [False, False, True, False, True]
    definite = torch.tensor([0, 1, 3])
    torch.testing.assert_close(tril[definite], torch.linalg.cholesky(system[definite]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_solves_inverse_and_determinant_are_those_of_the_matrix(batch):
    root, right = torch.randn(*batch, 5, 8, dtype=F64), torch.randn(*batch, 5, 2, dtype=F64)
    matrix = root @ root.mT
    tril, inverse = cholesky(matrix, 0.0), torch.linalg.inv(matrix)
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    close(tril @ half_solve(tril, right), right)
    close(tril.mT @ half_solve(tril, right, transposed=True), right)
    close(factor_solve(tril, right), inverse @ right)
    close(half_solve(tril, half_solve(tril, right), transposed=True), inverse @ right)
    close(factor_inverse(tril), inverse)
    close(factor_log_det(tril), torch.linalg.slogdet(matrix).logabsdet)


def test_a_factor_broadcasts_against_right_hand_sides():
    tril, right = torch.randn(4, 4, dtype=F64).tril() + 4 * torch.eye(4, dtype=F64), torch.randn(3, 2, 4, 1, dtype=F64)
    for solve in (half_solve, partial(half_solve, transposed=True), factor_solve):
        want = torch.stack([torch.stack([solve(tril, column) for column in row]) for row in right])
        torch.testing.assert_close(solve(tril, right), want)


def test_a_reverse_factor_is_upper_triangular_and_gives_the_factor_of_the_inverse():
    root = torch.randn(2, 5, 7, dtype=F64)
    matrix = root @ root.mT
    upper = reverse_cholesky(matrix)
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper @ upper.mT, matrix)
    eye = torch.eye(5, dtype=F64).expand(2, 5, 5)
    torch.testing.assert_close(half_solve(upper.mT, eye), cholesky(torch.linalg.inv(matrix), 0.0))


def test_diagonals_are_added_and_broadcast():
    matrix, diagonal = torch.randn(3, 3), torch.rand(2, 3)
    want = torch.stack([matrix + torch.diag(row) for row in diagonal])
    torch.testing.assert_close(add_diagonal(matrix, diagonal), want)
