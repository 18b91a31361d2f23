"""Checks that several entrances share."""

import pytest
import torch

from pyro_nngp._checks import (
    check_batch,
    check_device,
    check_int,
    check_memory,
    check_num_neighbors,
    check_number,
    check_path,
    check_same_kind,
    check_seed,
    check_tensor,
    trusted_rows,
    warn,
)
from pyro_nngp._kinds import check_callable
from pyro_nngp.kernels import RBF


def test_mixed_devices_are_named():
    with pytest.raises(ValueError, match=r"f: expected y on the device of x \(cpu\), got meta\. Move it with \.to"):
        check_same_kind("f", x=torch.zeros(2), y=torch.zeros(2, device="meta"))


@pytest.mark.parametrize("k", [2.0, True, "3"])
def test_numbers_of_neighbors_are_integers(k):
    with pytest.raises(TypeError, match=r"f: expected num_neighbors to be an int, got (float|bool|str)"):
        check_num_neighbors("f", k, 5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "to be a torch.Tensor, got list"),
        (torch.ones(2).to_sparse(), "to be a dense tensor, got torch.sparse_coo"),
        (torch.ones(2, device="meta"), "to have values, got a meta tensor"),
        (torch.ones(2).half(), "in float32, float64, integers or booleans, got torch.float16"),
        (torch.ones(2).bfloat16(), "in float32, float64, integers or booleans, got torch.bfloat16"),
        (torch.ones(2, dtype=torch.complex64), "in float32, float64, integers or booleans, got torch.complex64"),
    ],
)
def test_tensors_that_linear_algebra_cannot_take_are_refused(value, message):
    with pytest.raises(TypeError, match=f"f: expected x {message}"):
        check_tensor("f", "x", value)
    with pytest.raises(TypeError, match=f"RBF: expected x {message}"):
        RBF(2)(value)


def test_integers_and_numbers():
    for value in (True, 2.0, "3", None):
        with pytest.raises(TypeError, match=r"f: expected n to be an int, got .*\. Pass a plain integer\."):
            check_int("f", "n", value)
    with pytest.raises(ValueError, match="f: expected n >= 1, got 0"):
        check_int("f", "n", 0, 1)
    for value in (True, "3", None, 1j):
        with pytest.raises(TypeError, match="f: expected s to be a number, got"):
            check_number("f", "s", value)
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="f: expected s to be finite and >= 0, got"):
            check_number("f", "s", value)


def test_seeds_functions_paths_and_devices():
    check_seed("f", -1)
    with pytest.raises(TypeError, match="f: expected seed to be an int, got 0.5"):
        check_seed("f", 0.5)
    with pytest.raises(ValueError, match=r"f: expected seed in -2\*\*63"):
        check_seed("f", 2**64)
    check_callable("f", "g", print, "")
    with pytest.raises(TypeError, match="f: expected g to be callable, got the class RBF. An instance."):
        check_callable("f", "g", RBF, "An instance.")
    with pytest.raises(TypeError, match="f: expected g to be callable, got int"):
        check_callable("f", "g", 3, "")
    with pytest.raises(TypeError, match="f: expected p to be a path, got int"):
        check_path("f", "p", 3)
    check_device("f", "cpu")
    with pytest.raises(ValueError, match="f: expected device to be a device of torch, got 'gpu'"):
        check_device("f", "gpu")
    there = torch.cuda.device_count()
    with pytest.raises(ValueError, match=rf"f: expected device that torch can use here, got 'cuda:{there}' \("):
        check_device("f", f"cuda:{there}")


def test_results_beyond_the_memory_of_the_machine_are_refused():
    check_memory("f", "draws", 10**6, torch.float64)
    with pytest.raises(
        MemoryError, match=r"f: expected draws to fit into memory, got 7450581 GiB\. The machine has \d+ GiB"
    ):
        check_memory("f", "draws", 10**15, torch.float64)


@pytest.mark.parametrize("value", ["text", True, 1j, [1.0], lambda: 0])
def test_hyperparameters_and_columns_are_numbers(value):
    with pytest.raises(TypeError, match="RBF: expected variance to be a number, a tensor, a PyroParam or a PyroSample"):
        RBF(2, variance=value)
    with pytest.raises(TypeError, match="RBF: expected input_dim to be an int, got"):
        RBF(value)
    if value != [1.0]:
        with pytest.raises(TypeError, match="RBF: expected active_dims to be a list of ints, got"):
            RBF(1, active_dims=value)
    with pytest.raises(TypeError, match="RBF: expected active_dims to be an int, got 0.5. List column numbers"):
        RBF(1, active_dims=[0.5])


def test_points_of_a_kernel_are_of_one_floating_point_type():
    with pytest.raises(TypeError, match=r"RBF: expected x in floating point, got torch.int64\. Call \.float"):
        RBF(2)(torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="RBF: expected z of the dtype of x"):
        RBF(2)(torch.ones(3, 2), torch.ones(3, 2).double())


def test_rows_are_trusted_within_blocks_that_may_end_in_any_order():
    rows = torch.tensor([0, 0, 5])
    first, second = trusted_rows(), trusted_rows()
    for block in (first, second):
        block.__enter__()
    first.__exit__(None, None, None)
    check_batch("f", "idx", rows, 3)
    second.__exit__(None, None, None)
    with pytest.raises(ValueError, match=r"f: expected idx in 0\.\.2, got 0\.\.5"):
        check_batch("f", "idx", rows, 3)


def test_a_warning_points_at_the_caller_outside_of_the_package():
    inner = {"__name__": "pyro_nngp.inner", "warn": warn}
    exec("def one():\n    warn('here', RuntimeWarning)\n\ndef two():\n    one()", inner)
    with pytest.warns(RuntimeWarning, match="here") as found:
        inner["two"]()
    assert found[0].filename == __file__
