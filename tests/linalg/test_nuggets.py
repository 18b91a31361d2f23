"""Extra nuggets: warnings, silence in one thread, and reports from a device."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyro_nngp.linalg import NotPositiveDefiniteError, cholesky, report_nuggets
from pyro_nngp.linalg.nuggets import nugget_flags, quiet_nuggets


def test_nuggets_are_quiet_in_one_thread_alone():
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
    counters = nugget_flags(torch.device("cpu"), torch.float32, 7)
    yield counters
    counters.zero_()


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
