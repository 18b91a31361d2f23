"""Cholesky factors with nuggets, and errors where there is none."""

import warnings

import pytest
import torch

from pyro_nngp.linalg import quiet_nuggets, report_nuggets
from pyro_nngp.linalg.cholesky import NotPositiveDefiniteError, cholesky, cholesky_ex, factorize, nugget_flags

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
    tril, info = cholesky_ex(system)
    assert (info > 0).tolist() == [False, False, True, False, True]
    definite = torch.tensor([0, 1, 3])
    torch.testing.assert_close(tril[definite], torch.linalg.cholesky(system[definite]), rtol=1e-10, atol=1e-10)


def test_nuggets_are_quiet_in_one_thread_alone():
    from concurrent.futures import ThreadPoolExecutor

    from pyro_nngp.linalg import quiet_nuggets

    system = torch.ones(1, 3, 3)
    with quiet_nuggets():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cholesky(system, 0.0, escalate=True)
        with ThreadPoolExecutor(1) as other, pytest.warns(UserWarning, match="took an extra nugget"):
            other.submit(cholesky, system, 0.0, escalate=True).result()
    with pytest.warns(UserWarning, match="took an extra nugget"):
        cholesky(system, 0.0, escalate=True)


@pytest.fixture
def flags():
    """Counters as code on a device writes them."""
    found = nugget_flags(torch.device("cpu"), torch.float32, 7)
    yield found
    found.zero_()


def test_nuggets_added_on_a_device_are_reported_once(flags):
    report_nuggets()
    flags += torch.tensor([3, 5], dtype=torch.int32)
    assert nugget_flags(torch.device("cpu"), torch.float32, 7) is flags
    with pytest.warns(UserWarning, match=r"5 of the covariances were .* in torch.float32.*up to 1e-04"):
        report_nuggets()
    report_nuggets()


def test_nuggets_added_quietly_are_not_reported_but_failures_are(flags):
    with quiet_nuggets():
        quiet = nugget_flags(torch.device("cpu"), torch.float32, 7)
    assert quiet is not flags
    quiet += torch.tensor([5, 2], dtype=torch.int32)
    report_nuggets()
    quiet += torch.tensor([6, 2], dtype=torch.int32)
    with pytest.raises(NotPositiveDefiniteError, match="some of 2 of the covariances of size 7"):
        report_nuggets()
    report_nuggets()
