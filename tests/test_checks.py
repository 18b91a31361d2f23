"""Checks that no other test can reach without a second device."""

import pytest
import torch

from pyro_nngp._checks import check_num_neighbors, check_same_kind


def test_mixed_devices_are_named():
    with pytest.raises(ValueError, match=r"f: expected y on the device of x \(cpu\), got meta\. Move it with \.to"):
        check_same_kind("f", x=torch.zeros(2), y=torch.zeros(2, device="meta"))


@pytest.mark.parametrize("k", [2.0, True, "3"])
def test_numbers_of_neighbors_are_integers(k):
    with pytest.raises(TypeError, match=r"f: expected num_neighbors to be an int, got (float|bool|str)"):
        check_num_neighbors("f", k, 5)
